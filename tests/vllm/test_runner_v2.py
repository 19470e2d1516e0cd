"""What the model runner V2 does not share with V1: how rows are placed, the end of the longest sequence, and noise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm.engine", reason="needs vLLM: make test-vllm")
from drafters import random_drafter
from vllm_helpers import (
    DRAFTER,
    PAGE,
    PROPOSALS,
    V2,
    Recorder,
    embedded_drafts,
    generate,
    prompts_of,
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
LIMIT = 96  # tokens of the longest sequence
SLOTS: dict[str, dict[str, Any]] = {
    "fill_in": {"block_size": PROPOSALS + 1, "carry": "embedding"},
    "next_token": {"block_size": PROPOSALS, "slots": "next_token", "markov_rank": 6, "carry": "projector"},
}


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    """12 prompts that leave 12 to 34 tokens to the end of the longest sequence."""
    return prompts_of(12, target.vocab_size, lambda i: 62 + 2 * i)


@pytest.fixture(scope="module")
def known(folder: Path, prompts: list[list[int]]) -> dict[tuple[int, ...], list[int]]:
    """Prompts with what plain vLLM says up to the length of the longest sequence."""
    with vllm_engine(folder, max_model_len=LIMIT) as llm:
        out = tokens(generate(llm, prompts, params(max_tokens=LIMIT)))
    return {tuple(p): p + c for p, c in zip(prompts, out, strict=True)}


def params(**options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0, "ignore_eos": True, **options})


def saved(target: Target, path: Path, slots: str) -> tuple[Any, Path]:
    drafter = random_drafter(3, **{**DRAFTER, **SLOTS[slots]})
    save_drafter(drafter, path, "carryover", target)
    return drafter, path


class Place(NamedTuple):
    """A draft in V2: what `layout` takes, by name, and what lay in vLLM's buffers when the block was read."""

    asked: dict[str, Tensor]
    rejected: Tensor
    context_positions: Tensor
    context_slots: Tensor
    positions: Tensor
    slots: Tensor
    proposing: Tensor
    lengths: Tensor


@contextmanager
def watched(patch: pytest.MonkeyPatch, places: list[Place]) -> Iterator[None]:
    from carryover.vllm.speculator import CarrySpeculator

    propose = CarrySpeculator.propose

    def watched_propose(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = propose(self, batch, *args, **kwargs)
        if not kwargs.get("dummy_run"):
            b, n, total = batch.num_reqs, batch.num_tokens, batch.num_reqs * self.num_query_per_req
            group = self.draft_kv_cache_group_id
            asked = {
                "starts": batch.query_start_loc[: b + 1],
                "positions": batch.positions[:n],
                "rejected": args[5],
                "lengths": batch.seq_lens[:b],
                "table": self.block_tables.input_block_tables[group],
            }
            found = (
                self.model.rejected[:n],
                self.context_positions[:n],
                self._context_slot_mappings[0, :n],
                self.input_buffers.positions[:total],
                self.block_tables.slot_mappings[group, :total],
                self.sample_indices[: b * PROPOSALS],
                self.input_buffers.seq_lens[:b],
            )
            places.append(Place({k: x.clone() for k, x in asked.items()}, *(x.clone() for x in found)))
        return result

    with patch.context() as inner:
        inner.setattr(CarrySpeculator, "propose", watched_propose)
        yield


def differences(place: Place, rows: int, first: int, carry: bool) -> list[str]:
    """Of those requests that have carry, or that have none and whose block fits: what is not as in `layout`."""
    starts, rejected, lengths = (place.asked[name] for name in ("starts", "rejected", "lengths"))
    fits = lengths + rows <= LIMIT
    requests = fits if carry else ~fits & (lengths - rejected + rows <= LIMIT)
    blocks, context = requests.repeat_interleave(rows), requests.repeat_interleave(starts.diff())
    expected = layout(**place.asked, page=PAGE, rows=rows, first_slot=first, carry=carry)
    written = context if carry else context & ~expected.rejected  # without carry V2 leaves out the rejected rows
    pairs = {
        "rejected": (place.rejected[context], expected.rejected[context] & carry),
        "context_positions": (place.context_positions[written], place.asked["positions"][written]),
        "context_slots": (place.context_slots[written], expected.context_slots[written]),
        "positions": (place.positions[blocks], expected.positions[blocks]),
        "slots": (place.slots[blocks], expected.slots[blocks]),
        "proposing": (place.proposing, expected.proposing),
        "lengths": (place.lengths[requests].long(), expected.lengths[requests].long()),
    }
    return [name for name, (found, right) in pairs.items() if not torch.equal(found, right)]


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
    """There, where the block would reach too far behind rejected rows, it lies over them and there is no carry."""
    drafter, path = saved(target, tmp_path / slots, slots)
    rows, places = drafter.config.block_size, list[Place]()
    longer = {p: ids + [0] * 8 for p, ids in known.items()}
    with (
        vllm_engine(folder, path, max_model_len=LIMIT, max_num_batched_tokens=64) as llm,
        watched(monkeypatch, places),
        Recorder(longer).attached(monkeypatch) as recorder,
    ):
        out = tokens(generate(llm, prompts, params(max_tokens=LIMIT)))
    assert [p + c for p, c in zip(prompts, out, strict=True)] == list(known.values())
    for carry in (True, False):
        assert [differences(place, rows, drafter.config.first_slot, carry) for place in places] == [[]] * len(places)
    assert len(places) > 20

    on, off = Engine(target, drafter), Engine(target, drafter, carry=False)
    carried = late = told_apart = 0
    for p in known:
        # Up to where vLLM lets fewer tokens be verified than were proposed, which the embedded engine cannot replay.
        drafts = list(takewhile(lambda d: len(d.verified) in (0, PROPOSALS), recorder.drafts[p]))
        both = [embedded_drafts(engine, p, longer[p], drafts) for engine in (on, off)]
        for draft, (with_carry, found), (without, _) in zip(drafts, *both, strict=True):
            if draft.anchor + draft.rejected + rows <= LIMIT:
                assert found == with_carry
                carried += draft.rejected > 0
            elif draft.anchor + rows <= LIMIT:
                assert found == without
                late += draft.rejected > 0
                told_apart += with_carry != without
    assert carried > 20 and late > 5 and told_apart > 0


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
    with vllm_engine(folder, path, draft=sampled, max_model_len=LIMIT, max_num_seqs=2) as llm:
        monkeypatch.setattr(speculator, "gumbel_sample", watched_draw)
        out = tokens(generate(llm, [[3, 9, 14]] * 2, params(temperature=1.0, seed=5, max_tokens=40)))
        monkeypatch.undo()
        again = tokens(generate(llm, [[3, 9, 14]], params(temperature=1.0, seed=5, max_tokens=40)))
    assert out[0] == out[1] == again[0]  # in V2 a request's seed says everything, drawn proposals included
    assert len(met) > 2 * 40 and len(set(met)) == len(met)
