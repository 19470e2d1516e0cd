"""Token hints: which token each slot gets, and what it does to the slot."""

from __future__ import annotations

import pytest
import torch
from drafters import config, noise, random_drafter

from carryover.drafter.context import TokenHints


@pytest.mark.parametrize(("slots", "proposals"), [("fill_in", 4), ("next_token", 5)])
@pytest.mark.parametrize("kind", ["rejected_tokens", "target_top1"])
def test_a_slot_gets_the_token_offered_for_its_position(kind: str, slots: str, proposals: int) -> None:
    """Every accepted count and every number of rows seen, position by position."""
    hints = TokenHints(config(carry="hint", carry_hint=kind, slots=slots))
    a, tokens = 20, list(range(31, 31 + proposals))
    cases = [(n, seen) for n in range(proposals + 1) for seen in range(proposals - n + 1)]
    accepted, seen = torch.tensor(cases).T
    found = hints.aligned(torch.tensor(tokens).expand(len(cases), -1), accepted, seen)
    assert found.shape == (len(cases), 5)
    for row, (n, count) in zip(found.tolist(), cases, strict=True):
        ahead = 0 if kind == "rejected_tokens" else 1
        offered = {a + j + ahead: tokens[j - 1] for j in range(n + 1, n + count + 1)}
        anchor = a + n + 1
        assert row == [-1] + [offered.get(anchor + k, -1) for k in range(1, 5)], (n, count)
    nothing = hints.aligned(torch.tensor([tokens]), torch.tensor([-1]), torch.tensor([0]))  # behind a prompt
    assert nothing.tolist() == [[-1] * 5]


@torch.no_grad()
def test_only_hinted_slots_change() -> None:
    drafter, embedding, block = random_drafter(carry="hint"), noise(96, 32), noise(1, 5, 32, seed=2)
    rejected = torch.tensor([[11, 12, 13, 14]])
    hints = drafter.hints(rejected, torch.tensor([1]), torch.tensor([3]), lambda tokens: embedding[tokens])
    expected = block.clone()
    expected[0, 1] += drafter.carry.scale * embedding[13]  # 12 was rejected where the anchor is now
    expected[0, 2] += drafter.carry.scale * embedding[14]
    assert torch.equal(drafter.carry(block, hints), expected)
    drafter.carry.start_from(drafter.fc)
    assert torch.equal(drafter.carry(block, hints), block)
