"""vLLM engines in the test's own process, drafts recorded and steered, and the embedded engine put in the same state.

A random drafter guesses nothing right, so recorded drafts are partly replaced by the target's known continuation before
vLLM verifies them; how many tokens of each are right then varies from none to all.

All of it works with either model runner: V1, or V2 if VLLM_USE_V2_MODEL_RUNNER says so, see `interpreted.py`.
"""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Set before vLLM is imported: one process, so that the tests can reach into it; no core of its own; a small cache.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

import interpreted
import pytest
import torch
from tiny import tiny_target

from carryover.decode.engine import Batch, Engine, Request
from carryover.decode.trace import Generation
from carryover.target import Target

V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
if V2:
    interpreted.install()

PROPOSALS = 4
PAGE = 32  # the smallest page of vLLM's CPU attention


def serving_target(vocab: int = 96) -> Target:
    """Six layers with heads of 32, which vLLM's CPU attention can read; no stop tokens but those a test names."""
    return tiny_target("llama", vocab, 6, 11, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)


DRAFTER: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
                           "intermediate_size": 48, "target_layer_ids": [0, 2, 4]}  # fmt: skip


@contextmanager
def vllm_engine(target: Path, drafter: Path | None = None, proposals: int = PROPOSALS, **options: Any) -> Iterator[Any]:
    """A `vllm.LLM` of its own; `draft` goes into the speculative config."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    if V2:
        interpreted.adapt()
    draft = options.pop("draft", {})
    if drafter is not None:
        options["speculative_config"] = {
            "method": "dflash",
            "model": str(drafter),
            "num_speculative_tokens": proposals,
            **draft,
        }
    llm = LLM(
        str(target),
        dtype="float32",
        enforce_eager=True,
        disable_log_stats=False,
        **{"max_num_seqs": 8, "num_gpu_blocks_override": 128, "block_size": PAGE, **options},
    )
    try:
        yield llm
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def generate(llm: Any, prompts: Sequence[Sequence[int]], params: Any) -> list[Any]:
    return llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)


def tokens(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def proposer_name(llm: Any) -> str:
    """The class that drafts."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    return type(runner.speculator if V2 else runner.drafter).__name__


def counters(llm: Any) -> dict[str, Any]:
    """vLLM's counts of speculative decoding and of preemptions, since the engine began."""
    named = {m.name: getattr(m, "value", None) or getattr(m, "values", None) for m in llm.get_metrics()}
    short = {name.removeprefix("vllm:"): value for name, value in named.items()}
    return {k: v for k, v in short.items() if k.startswith(("spec_decode", "num_preempt", "prefix_cache_hits"))}


@dataclass
class Draft:
    """One draft of one request. verified: the tokens that this step's verification judged, before the draft; rejected:
    how many of them it rejected; anchor, token: of the draft; proposals: what the drafter made; steered: what vLLM gets
    to verify in their place."""

    verified: list[int]
    rejected: int
    anchor: int
    token: int
    proposals: list[int]
    steered: list[int] = field(default_factory=list)


@dataclass
class Recorder:
    """Drafts by request. known: prompts with their continuation, by prompt; None: nothing is replaced."""

    known: dict[tuple[int, ...], list[int]] | None = None
    drafts: dict[tuple[int, ...], list[Draft]] = field(default_factory=dict)

    @contextmanager
    def attached(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
        with monkeypatch.context() as patch:
            (self._attach_to_v2 if V2 else self._attach_to_v1)(patch)
            yield self

    def _attach_to_v1(self, patch: pytest.MonkeyPatch) -> None:
        from vllm.v1.spec_decode.dflash import DFlashProposer
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        seen: dict[str, Any] = {}
        propose, draft = DFlashProposer.propose, GPUModelRunner.propose_draft_token_ids

        def recorded_propose(proposer: Any, *args: Any, **kwargs: Any) -> Any:
            seen.update(kwargs, proposals=propose(proposer, *args, **kwargs))
            return seen["proposals"]

        def recorded_draft(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            result = draft(runner, scheduler_output, *args, **kwargs)
            starts, steered = seen["common_attn_metadata"].query_start_loc, result.clone()
            for i, request in enumerate(runner.input_batch.req_ids):
                if runner.discard_request_mask.np[i]:
                    continue  # in the middle of its prompt
                rejected = seen["num_rejected_tokens_gpu"]
                r = 0 if rejected is None else int(rejected[i])
                anchor = int(seen["target_positions"][starts[i + 1] - 1 - r]) + 1
                prompt = tuple(runner.requests[request].prompt_token_ids)
                verified = list(scheduler_output.scheduled_spec_decode_tokens.get(request, []))
                if verified and min(verified) < 0:  # asynchronous scheduling leaves them on the device
                    verified = self.drafts[prompt][-1].steered
                record = Draft(verified, r, anchor, int(seen["next_token_ids"][i]), seen["proposals"][i].tolist())
                steered[i] = self._record(prompt, record)
            return steered

        patch.setattr(DFlashProposer, "propose", recorded_propose)
        patch.setattr(GPUModelRunner, "propose_draft_token_ids", recorded_draft)

    def _attach_to_v2(self, patch: pytest.MonkeyPatch) -> None:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        sample = GPUModelRunner.sample

        def sample_and_record(runner: Any, *args: Any) -> Any:
            """Wraps the speculator of this runner, which drafts after it has sampled."""
            propose, result = runner.speculator.propose, sample(runner, *args)

            def recorded_propose(*args: Any, **kwargs: Any) -> Any:
                runner.speculator.propose = propose
                return self._record_batch(runner.req_states, args, propose(*args, **kwargs))

            runner.speculator.propose = recorded_propose
            return result

        patch.setattr(GPUModelRunner, "sample", sample_and_record)

    def _record_batch(self, states: Any, args: Sequence[Any], proposals: torch.Tensor) -> torch.Tensor:
        """args: of V2's `propose`."""
        batch, num_sampled, num_rejected, last_sampled = args[0], *args[5:8]
        steered = proposals.clone()
        for i, slot in enumerate(batch.idx_mapping.tolist()):
            if not num_sampled[i]:
                continue  # in the middle of its prompt
            r, end = int(num_rejected[i]), int(batch.query_start_loc[i + 1])
            judged = 0 if batch.num_draft_tokens_per_req is None else int(batch.num_draft_tokens_per_req[i])
            prompt = tuple(states.all_token_ids.gpu[slot, : states.prompt_len.np[slot]].tolist())
            verified = batch.input_ids[end - judged : end].tolist()
            anchor = int(batch.positions[end - 1 - r]) + 1
            record = Draft(verified, r, anchor, int(last_sampled[slot]), proposals[i].tolist())
            steered[i] = self._record(prompt, record)
        return steered

    def _record(self, prompt: tuple[int, ...], draft: Draft) -> torch.Tensor:
        """Notes a draft; returns what vLLM is to verify instead of its proposals."""
        self.drafts.setdefault(prompt, []).append(draft)
        draft.steered = self._steer(prompt, draft)
        return torch.tensor(draft.steered)

    def _steer(self, prompt: tuple[int, ...], draft: Draft) -> list[int]:
        if self.known is None:
            return draft.proposals
        right = self.known[prompt][draft.anchor + 1 :][: pick(prompt, draft.anchor, len(draft.proposals) + 1)]
        return right + draft.proposals[len(right) :]


def pick(prompt: Sequence[int], anchor: int, choices: int) -> int:
    """A number below `choices` that depends on nothing but prompt and anchor."""
    return hashlib.sha256(f"{list(prompt)}/{anchor}".encode()).digest()[0] % choices


def embedded_drafts(engine: Engine, prompt: Sequence[int], known: Sequence[int], drafts: Sequence[Draft]) -> list[Any]:
    """What the embedded engine proposes in the states in which vLLM made `drafts`: pairs of both proposals.

    known: prompt and greedy continuation. After a preemption vLLM reads the tokens so far once more and goes on without
    a verification, hence without carry.
    """
    batch = begin(engine, prompt, known)
    pairs = []
    for number, draft in enumerate(drafts):
        request = batch.requests[0]
        if number and draft.verified:
            engine.commit(batch, torch.tensor([draft.verified]))
            assert request.anchor == draft.anchor
            assert len(draft.verified) - draft.rejected == draft.anchor - request.base - 1
        elif number:
            step(engine, batch, known)
        assert (request.anchor, int(batch.tokens[0])) == (draft.anchor, draft.token)
        proposals, _ = engine.draft(batch)
        pairs.append((proposals[0].tolist(), draft.proposals))
    return pairs


def begin(engine: Engine, prompt: Sequence[int], known: Sequence[int]) -> Batch:
    asked = Request(list(prompt), len(known) - len(prompt) + 2 * PROPOSALS)
    batch = engine.new_batch([asked], 1)
    assert engine.join(batch, asked, Generation(len(prompt)))
    return batch


def step(engine: Engine, batch: Batch, known: Sequence[int]) -> None:
    """Commits one token and forgets the carry."""
    request = batch.requests[0]
    wrong = (known[request.anchor + 1] + 1) % engine.target.vocab_size
    engine.commit(batch, torch.full((1, engine.proposals), wrong))
    request.carried = 0


Prompts = list[list[int]]


def prompts_of(count: int, vocab: int, lengths: Callable[[int], int], seed: int = 0) -> Prompts:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, vocab, (lengths(i),), generator=generator).tolist() for i in range(count)]
