"""Where rows lie in a paged cache; needs no vLLM."""

from __future__ import annotations

import pytest
import torch

from carryover.vllm.layout import carried, layout, rejected_rows

PAGE = 4
TABLE = torch.tensor([[7, 2, 9], [1, 5, 3]])  # pages of two requests
STARTS = torch.tensor([0, 4, 7])  # request 0 verified 4 tokens at positions 3..6, request 1 read 3 at 0..2
POSITIONS = torch.tensor([3, 4, 5, 6, 0, 1, 2])
REJECTED = torch.tensor([2, 0])
LENGTHS = torch.tensor([7, 3])


def slot(request: int, index: int) -> int:
    return int(TABLE[request, index // PAGE]) * PAGE + index % PAGE


def test_the_last_rejected_rows_of_each_request_are_carry_rows() -> None:
    assert rejected_rows(STARTS, REJECTED, 7).tolist() == [False, False, True, True, False, False, False]


@pytest.mark.parametrize("carry", [True, False])
def test_the_block_lies_behind_the_carry_rows_or_over_them(carry: bool) -> None:
    places = layout(STARTS, POSITIONS, REJECTED, LENGTHS, TABLE, PAGE, 3, 1, carry)
    own = [slot(0, p) for p in (3, 4, 5, 6)] + [slot(1, p) for p in (0, 1, 2)]
    assert places.context_slots.tolist() == own
    assert places.positions.tolist() == [5, 6, 7, 3, 4, 5]  # RoPE sees the anchor's position in both cases
    behind = 2 if carry else 0
    assert places.slots.tolist() == [slot(0, p + behind) for p in (5, 6, 7)] + [slot(1, p) for p in (3, 4, 5)]
    assert places.lengths.tolist() == [5 + behind + 3, 3 + 3]
    assert places.proposing.tolist() == [1, 2, 4, 5]
    shared = set(places.slots.tolist()) & set(places.context_slots.tolist())
    assert shared == (set() if carry else {slot(0, 5), slot(0, 6)})


def test_nothing_rejected_leaves_no_carry() -> None:
    """What vLLM reserves for this case is as far as any block reaches."""
    none = torch.zeros_like(REJECTED)
    on, off = (layout(STARTS, POSITIONS, none, LENGTHS, TABLE, PAGE, 3, 0, carry) for carry in (True, False))
    assert not on.rejected.any()
    assert all(torch.equal(a, b) for a, b in zip(on, off, strict=True))
    most = layout(STARTS, POSITIONS, REJECTED, LENGTHS, TABLE, PAGE, 3, 0, True)
    assert (most.lengths <= on.lengths).all()


def test_next_token_slots_propose_from_the_anchor_on() -> None:
    places = layout(STARTS, POSITIONS, REJECTED, LENGTHS, TABLE, PAGE, 3, 0, True)
    assert places.proposing.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_block_that_would_reach_too_far_behind_rejected_rows_has_none() -> None:
    rejected = torch.tensor([2, 2, 0, 3])
    assert carried(rejected, torch.tensor([13, 14, 16, 5]), 3, 16).tolist() == [2, 0, 0, 3]
