"""What the model runner V2 does not share with V1: how rows are placed, the end of the longest sequence, and noise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.engine", reason="needs vLLM: make test-vllm")
from drafters import random_drafter
from tiny import save_target
from vllm_helpers import (
    DRAFTER,
    PAGE,
    PROPOSALS,
    V2,
    Recorder,
    embedded_drafts,
    generate,
    prompts_of,
    serving_target,
    tokens,
    vllm_engine,
)

from carryover.decode.engine import Engine
from carryover.formats import save_drafter
from carryover.target import Target
from carryover.vllm.layout import layout

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not V2, reason="of the model runner V2: VLLM_USE_V2_MODEL_RUNNER=1 TRITON_INTERPRET=1"),
]
SLOTS: dict[str, dict[str, Any]] = {
    "fill_in": {"block_size": PROPOSALS + 1, "carry": "embedding"},
    "next_token": {"block_size": PROPOSALS, "slots": "next_token", "markov_rank": 6, "carry": "projector"},
}


@pytest.fixture(scope="module")
def target() -> Target:
    return serving_target()


@pytest.fixture(scope="module")
def folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(target, tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    return prompts_of(6, target.vocab_size, lambda i: 5 + 13 * i)


@pytest.fixture(scope="module")
def known(folder: Path, prompts: list[list[int]]) -> dict[tuple[int, ...], list[int]]:
    """Prompts with what plain vLLM says up to a length of 96, the longest here."""
    with vllm_engine(folder, max_model_len=96) as llm:
        return {
            tuple(p): p + c for p, c in zip(prompts, tokens(generate(llm, prompts, params(max_tokens=90))), strict=True)
        }


def params(**options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0, "ignore_eos": True, **options})


def saved(target: Target, path: Path, slots: str) -> tuple[Any, Path]:
    drafter = random_drafter(3, **{**DRAFTER, **SLOTS[slots]})
    save_drafter(drafter, path, "carryover", target)
    return drafter, path


@contextmanager
def watched(patch: pytest.MonkeyPatch, places: list[tuple[Any, Any]]) -> Iterator[None]:
    """Notes of every draft what was asked of `layout` and what lay in vLLM's buffers when the block was read."""
    from carryover.vllm.speculator import CarrySpeculator

    propose = CarrySpeculator.propose

    def watched_propose(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = propose(self, batch, *args, **kwargs)
        if not kwargs.get("dummy_run"):
            b, n, total = batch.num_reqs, batch.num_tokens, batch.num_reqs * self.num_query_per_req
            table, gid = self.block_tables.input_block_tables[0], self.draft_kv_cache_group_id
            asked = (batch.query_start_loc[: b + 1], batch.positions[:n], args[5], batch.seq_lens[:b], table)
            found = (
                self.model.rejected[:n],
                self._context_slot_mappings[0, :n],
                self.input_buffers.positions[:total],
                self.block_tables.slot_mappings[gid, :total],
                self.sample_indices[: b * PROPOSALS],
                self.input_buffers.seq_lens[:b],
                self.context_positions[:n],
            )
            places.append(tuple(tuple(x.clone() for x in part) for part in (asked, found)))
        return result

    with patch.context() as inner:
        inner.setattr(CarrySpeculator, "propose", watched_propose)
        yield


@pytest.mark.parametrize("slots", SLOTS)
def test_rows_lie_where_v1_puts_them_up_to_the_end_of_the_longest_sequence(
    target: Target,
    folder: Path,
    prompts: list[list[int]],
    known: dict[tuple[int, ...], list[int]],
    slots: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter, path = saved(target, tmp_path / slots, slots)
    rows, first, limit, places = drafter.config.block_size, drafter.config.first_slot, 96, []
    longer = {p: ids + [0] * 8 for p, ids in known.items()}
    with (
        vllm_engine(folder, path, max_model_len=limit, max_num_batched_tokens=64) as llm,
        watched(monkeypatch, places),
        Recorder(longer).attached(monkeypatch) as recorder,
    ):
        out = tokens(generate(llm, prompts, params(max_tokens=90)))
    assert [p + c for p, c in zip(prompts, out, strict=True)] == list(known.values())
    late = 0
    for (starts, positions, rejected, lengths, table), found in places:
        fits = lengths + rows <= limit
        for carry in (True, False):
            expected = layout(starts, positions, rejected, lengths, table, PAGE, rows, first, carry)
            mask, context_slots, block, slots_, proposing, read, context = found
            own = fits if carry else ~fits & (lengths - rejected + rows <= limit)  # requests that this case is of
            tokens_, blocks = own.repeat_interleave(starts.diff()), own.repeat_interleave(rows)
            valid = tokens_ if carry else tokens_ & ~expected.rejected
            assert torch.equal(mask[tokens_], expected.rejected[tokens_] & carry)
            assert torch.equal(context_slots[valid], expected.context_slots[valid])
            assert torch.equal(context[valid], positions[valid])
            assert torch.equal(block[blocks], expected.positions[blocks])
            assert torch.equal(slots_[blocks], expected.slots[blocks])
            assert torch.equal(proposing, expected.proposing)
            assert torch.equal(read[own], expected.lengths[own].to(read.dtype))
            late += int((own & (rejected > 0)).sum()) if not carry else 0
    assert late > 5 and len(places) > 20
    on, off = Engine(target, drafter), Engine(target, drafter, carry=False)
    near = 0
    for p in known:
        drafts = recorder.drafts[p]
        pairs = [embedded_drafts(engine, p, longer[p], drafts) for engine in (on, off)]
        for draft, (carried, _), (plain, got) in zip(drafts, *pairs, strict=True):
            end = draft.anchor + draft.rejected + rows  # with carry
            if end <= limit:
                assert got == carried
            elif draft.anchor + rows <= limit:
                assert got == plain
                near += plain != carried
    assert near > 0


def test_no_noise_is_met_twice(target: Target, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests that share a seed: theirs is the same, each draft's is new, and none is the target's."""
    from carryover.vllm import speculator

    _, path = saved(target, tmp_path / "drafter", "next_token")
    met: list[tuple[int, int]] = []
    draw = speculator.gumbel_sample

    def watched_draw(logits: Any, requests: Any, temperature: Any, seeds: Any, noise: Any, **kwargs: Any) -> Any:
        met.extend(pair for pair in zip(requests.tolist(), noise.tolist(), strict=True) if pair[0] >= 0)
        return draw(logits, requests, temperature, seeds, noise, **kwargs)

    sampled = {"draft_sample_method": "probabilistic"}
    with vllm_engine(folder, path, draft=sampled, max_model_len=96, max_num_seqs=2) as llm:
        monkeypatch.setattr(speculator, "gumbel_sample", watched_draw)
        out = tokens(generate(llm, [[3, 9, 14]] * 2, params(temperature=1.0, seed=5, max_tokens=40)))
        monkeypatch.undo()
        again = tokens(generate(llm, [[3, 9, 14]], params(temperature=1.0, seed=5, max_tokens=40)))
    assert out[0] == out[1] == again[0]  # in V2 a request's seed says everything, drawn proposals included
    assert len(met) > 2 * 40 and len(set(met)) == len(met)
