"""The plugin inside vLLM on a CPU: output as plain vLLM's, proposals as the embedded engine's, stock untouched.

Of the model runner that VLLM_USE_V2_MODEL_RUNNER says; with V2, whose kernels are interpreted, there is less of it all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.engine", reason="needs vLLM: make test-vllm")
from drafters import random_drafter
from vllm_helpers import (
    DRAFTER,
    PROPOSALS,
    V2,
    Recorder,
    counters,
    embedded_drafts,
    generate,
    prompts_of,
    proposer_name,
    tokens,
    vllm_engine,
)

from carryover.decode.engine import Engine
from carryover.decode.sampling import Sampling
from carryover.formats import save_drafter
from carryover.target import Target

pytestmark = pytest.mark.vllm
NEW = 64
TARGET_OPTIONS: dict[str, Any] = {"max_model_len": 384}
# Tight: prompts are read in chunks, requests share cached prefixes, and there are pages for about half of them.
TIGHT: dict[str, Any] = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 18, "enable_prefix_caching": True}
DRAFTERS: dict[str, dict[str, Any]] = {
    "dflash": {"block_size": PROPOSALS + 1, "carry": "embedding"},
    "markov-next-token": {
        "block_size": PROPOSALS,
        "slots": "next_token",
        "markov_rank": 6,
        "carry": "embedding",
        "carry_site": "post_norm",
    },
    "markov-fill-in": {
        "block_size": PROPOSALS + 1,
        "markov_rank": 6,
        "markov_kind": "gated",
        "carry": "projector",
        "carry_projector": "bottleneck",
    },
    "reduced": {"block_size": PROPOSALS + 1, "markov_rank": 6, "carry": "projector", "draft_vocab_size": 40},
    "plain": {"block_size": PROPOSALS + 1, "carry": "plain"},
}


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    """24 prompts of 5 to 120 tokens; of every three, two share a beginning of 70 tokens."""
    shared = prompts_of(1, target.vocab_size, lambda i: 70, 9)[0]
    own = prompts_of(24, target.vocab_size, lambda i: 5 + 11 * i % 47)
    return [ids if i % 3 == 0 else shared + ids for i, ids in enumerate(own)]


def params(**options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0, "max_tokens": NEW, "ignore_eos": True, **options})


def endings(word: str) -> list[Any]:
    """Responses that end inside a block: by length, by a stop token, by a stop string."""
    lengths = [params(max_tokens=n) for n in (1, 2, 3, 4, 5, 7, 9, 11)]
    return [*lengths, *(params(stop_token_ids=list(range(k, 96, 13))) for k in range(5, 13)), *[params(stop=word)] * 8]


@pytest.fixture(scope="module")
def plain(folder: Path, prompts: list[list[int]]) -> Iterator[tuple[list[list[int]], list[Any]]]:
    """What plain vLLM says: 64 tokens each; and ended in other ways, (text, finish reason) of each."""
    with vllm_engine(folder, **TARGET_OPTIONS) as llm:
        full = generate(llm, prompts, params())
        word = full[-1].outputs[0].text.split()[20]
        ended = generate(llm, prompts, endings(word))
        yield tokens(full), [word, *facts(ended)]


def facts(outputs: list[Any]) -> list[Any]:
    return [
        (list(o.outputs[0].token_ids), o.outputs[0].text, o.outputs[0].finish_reason, o.outputs[0].stop_reason)
        for o in outputs
    ]


def saved(target: Target, path: Path, kind: str, form: str = "carryover") -> tuple[Any, Path]:
    """Another of the published formats stores the same drafter with its carry weights beside it."""
    drafter = random_drafter(3, **{**DRAFTER, **DRAFTERS.get(kind, {"block_size": PROPOSALS + 1})})
    if drafter.draft_vocab is not None:
        drafter.draft_vocab.copy_(torch.randperm(target.vocab_size)[: len(drafter.draft_vocab)].sort().values)
    save_drafter(drafter, path, form, target)
    return drafter, path


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("dflash", "zlab"),
        ("markov-next-token", "carryover"),
        ("markov-fill-in", "carryover"),
        ("reduced", "speculators"),
        ("plain", "carryover"),
    ],
)
def test_output_is_plain_vllms_and_proposals_are_the_embedded_engines(
    target: Target,
    folder: Path,
    prompts: list[list[int]],
    plain: Any,
    kind: str,
    form: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With chunked prefill, shared prefixes, preemption, and drafts of which none to all are right."""
    drafter, path = saved(target, tmp_path / kind, kind, form)
    continuation, (word, *ended) = plain
    known = {tuple(p): p + c for p, c in zip(prompts, continuation, strict=True)}
    full = kind == "markov-next-token" or (not V2 and kind in ("dflash", "markov-fill-in"))
    asked = prompts if full else prompts[::4]
    with (
        vllm_engine(folder, path, **TARGET_OPTIONS, **TIGHT) as llm,
        Recorder(known).attached(monkeypatch) as recorder,
    ):
        assert tokens(generate(llm, asked, params())) == [known[tuple(p)][len(p) :] for p in asked]
        happened, drafts = counters(llm), recorder.drafts
        recorder.drafts = {}
        if full:
            recorder.known = {prompt: ids + [0] * 8 for prompt, ids in known.items()}
            assert facts(generate(llm, prompts, endings(word))) == ended
    if full:
        assert happened["num_preemptions"] > 3 and happened["prefix_cache_hits"] > 100
    on, off = Engine(target, drafter), Engine(target, drafter, carry=False)
    pairs = [pair for p in asked for pair in embedded_drafts(on, p, known[tuple(p)], drafts[tuple(p)])]
    without = [pair for p in asked for pair in embedded_drafts(off, p, known[tuple(p)], drafts[tuple(p)])]
    assert sum(a != b for a, b in pairs) == 0, f"of {len(pairs)}"
    assert len(pairs) > (500 if full else 100)
    assert sum(a != b for a, b in without) > len(pairs) // 10  # the comparison sees carry
    rounds = [d for p in asked for d in drafts[tuple(p)] if d.verified]
    assert {d.rejected for d in rounds} == set(range(PROPOSALS + 1))
    # A round in which all was accepted leaves no carry: engines with and without it propose the same.
    every = [d for p in asked for d in drafts[tuple(p)]]
    all_accepted = [i for i, d in enumerate(every) if d.verified and not d.rejected]
    assert all_accepted and all(pairs[i][0] == without[i][0] for i in all_accepted)


STOCK = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from vllm_helpers import Recorder, generate, proposer_name, tokens, vllm_engine
import pytest, vllm
asked = json.loads(sys.argv[2])
with pytest.MonkeyPatch.context() as patch, vllm_engine(asked["target"], asked["drafter"], max_model_len=384) as llm:
    with Recorder({tuple(p): k for p, k in asked["known"]}).attached(patch) as recorder:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        out = tokens(generate(llm, [p for p, _ in asked["known"]], sampling))
    proposer = proposer_name(llm)
drafts = [[d.proposals for d in found] for found in recorder.drafts.values()]
print(json.dumps({"out": out, "proposer": proposer, "drafts": drafts}))
"""


def test_a_stock_drafter_proposes_the_same_without_the_plugin(
    target: Target, folder: Path, prompts: list[list[int]], plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = saved(target, tmp_path / "stock", "stock", "zlab")
    known = [(p, p + c) for p, c in zip(prompts[:8], plain[0], strict=False)]
    here = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    asked = {"target": str(folder), "drafter": str(path), "known": known}
    run = subprocess.run(
        [sys.executable, "-c", STOCK, json.dumps(here), json.dumps(asked)],
        env={**os.environ, "VLLM_PLUGINS": "none"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    without = json.loads(run.stdout.splitlines()[-1])
    with vllm_engine(folder, path, **TARGET_OPTIONS) as llm:
        with Recorder({tuple(p): k for p, k in known}).attached(monkeypatch) as recorder:
            out = tokens(generate(llm, [p for p, _ in known], params(max_tokens=32)))
        proposer = proposer_name(llm)
    drafts = [[d.proposals for d in found] for found in recorder.drafts.values()]
    assert without == {"out": out, "proposer": proposer, "drafts": drafts}
    assert out == [c[:32] for c in plain[0][:8]]
    assert proposer == ("DFlashSpeculator" if V2 else "DFlashProposer")
    assert sum(map(len, drafts)) > 80


@pytest.mark.parametrize(
    ("kind", "draws", "sampling"),
    [
        ("markov-next-token", "greedy", Sampling(1.0)),
        ("reduced", "probabilistic", Sampling(0.7, top_k=24)),
        ("dflash", "probabilistic", Sampling(1.0)),
    ],
)
def test_sampled_tokens_follow_the_targets_distribution(
    target: Target, folder: Path, kind: str, draws: str, sampling: Sampling, tmp_path: Path
) -> None:
    """Each token against the target's probabilities given the tokens before it, summed over many responses."""
    _, path = saved(target, tmp_path / kind, kind)
    prompt, (count, new) = [3, 9, 14, 27], (64, 8) if V2 else (400, 12)
    how = {"temperature": sampling.temperature, "top_k": sampling.top_k or -1, "max_tokens": new}
    with vllm_engine(folder, path, draft={"draft_sample_method": draws}, max_num_seqs=64, **TARGET_OPTIONS) as llm:
        seeded = [
            params(**how, seed=10 * i, n=2) for i in range(count // 2)
        ]  # vLLM counts up for the second of the two
        outputs = generate(llm, [prompt] * (count // 2), seeded)
        responses = [list(one.token_ids) for output in outputs for one in output.outputs]
        if V2 or draws == "greedy":  # V1 draws proposals without the request's seed, so a seed does not say everything
            again = generate(llm, [prompt] * 8, seeded[:8])
            assert [list(one.token_ids) for output in again for one in output.outputs] == responses[:16]
        assert counters(llm)["spec_decode_num_accepted_tokens"] > 0
    assert len(set(map(tuple, responses))) > count // 2
    ids = torch.tensor([prompt + response for response in responses])
    p = sampling.probabilities(target.head(target.forward(ids).hidden)[:, len(prompt) - 1 : -1]).double()
    drawn = torch.nn.functional.one_hot(ids[:, len(prompt) :], p.shape[-1])  # [count, new, V], as p
    # Prefill, the first round, the rounds with carry; together, where there are too few of each.
    for first, last in [(0, new)] if V2 else [(0, 1), (1, 4), (4, new)]:
        expected, variance = (x[:, first:last].sum((0, 1)) for x in (p, p * (1 - p)))
        usual = (expected > 5) & (variance > 5)  # enough of them to be near a normal distribution
        z = (drawn[:, first:last].sum((0, 1)) - expected)[usual] / variance[usual].sqrt()
        chi, degrees = float((z**2).sum()), int(usual.sum())
        assert degrees > 5
        assert chi < degrees + 4 * (2 * degrees) ** 0.5, f"tokens {first} to {last}: {chi:.0f} for {degrees}"


def test_an_altered_vllm_is_refused_and_stock_drafters_are_not(
    target: Target, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from carryover.vllm import internals, plugin

    _, ours = saved(target, tmp_path / "ours", "dflash", "zlab")
    _, stock = saved(target, tmp_path / "stock", "stock", "zlab")

    def configured(drafter: Path, **draft: Any) -> Any:
        asked = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": PROPOSALS, **draft}
        return EngineArgs(model=str(folder), dtype="float32", speculative_config=asked).create_engine_config()

    tables = (internals.BOTH, internals.V1, internals.V2)
    assert [internals.problem(table) for table in tables] == [None, None, None]
    served = configured(ours)
    assert served.speculative_config.draft_model_config.hf_config.architectures == ["DFlashCarryover"]
    with pytest.raises(ValueError, match="num_speculative_tokens is 9, but the drafter was trained to propose 4"):
        configured(ours, num_speculative_tokens=9)

    # What both runners need is looked at before anything is loaded, what one of them needs where its drafts are made.
    refusal = r"cannot serve this drafter with vLLM {} .*supported is vLLM 0.32.0"
    shared = "vllm.config.vllm:VllmConfig.num_lookahead_tokens"
    for version, table in (("0.32.0", {shared: "0" * 16}), ("0.33.0", {}), ("0.32.0", {shared + "_gone": "0" * 16})):
        with monkeypatch.context() as patch:
            patch.setattr(internals, "installed_version", lambda version=version: version)
            patch.setattr(plugin, "BOTH", table)
            with pytest.raises(ValueError, match=refusal.format(version)):
                configured(ours)
            found = configured(stock).speculative_config.draft_model_config.hf_config
            assert found.architectures == ["DFlashDraftModel"]
    for (module, name, _), table in zip(plugin.DRAFTS, ("V1", "V2"), strict=True):
        cls = getattr(import_module(module), name)
        with monkeypatch.context() as patch:
            patch.setattr(plugin, table, {f"{module}:{name}.propose": "0" * 16})
            with pytest.raises(ValueError, match=refusal.format("0.32.0")):
                cls.__new__(cls, served)
            assert type(cls.__new__(cls, configured(stock))) is cls
        assert type(cls.__new__(cls, served)).__name__ == ("CarryProposer" if table == "V1" else "CarrySpeculator")
