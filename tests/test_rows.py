"""Visibility of rows: `rows.py` against slow double loops that restate SPEC 1.5, 2.1 and 6.2 row by row.

Layouts are random: packed documents with padding, anchors that repeat and whose blocks overlap, every number of
accepted proposals from none to all.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from carryover.rows import (
    DrafterRule,
    Rows,
    TargetRule,
    block_rows,
    branch_rows,
    carry_rows,
    concat,
    context_rows,
    dense,
    flex,
)


# ---- random layouts, described without Rows ------------------------------------------------------------------------
class Token(NamedTuple):
    """A committed token: document (-1 padding) and position in it."""

    document: int
    position: int


class Branch(NamedTuple):
    """An anchor: its document and position, how many of its proposals were accepted."""

    document: int
    position: int
    accepted: int


class Slot(NamedTuple):
    """Row `offset` of the carry, block or branch rows of anchor number `index`."""

    index: int
    offset: int


@dataclass
class Layout:
    tokens: list[Token]
    branches: list[Branch]
    proposals: int
    block: int

    def carry(self) -> list[Slot]:
        return [Slot(i, j) for i in range(len(self.branches)) for j in range(1, self.proposals + 1)]

    def blocks(self) -> list[Slot]:
        return [Slot(i, k) for i in range(len(self.branches)) for k in range(self.block)]

    def shifted(self) -> list[int]:
        """The anchors of the second draft: a + n + 1."""
        return [b.position + b.accepted + 1 for b in self.branches]


def random_layout(seed: int, lengths: tuple[int, ...] = (9, 14, 6), padding: int = 3, anchors: int = 7) -> Layout:
    rng = random.Random(seed)
    tokens = [Token(d, t) for d, length in enumerate(lengths) for t in range(length)] + [Token(-1, 0)] * padding
    proposals, branches = 5, []
    for i in range(anchors):
        document = rng.randrange(len(lengths))
        accepted = (0, proposals)[i] if i < 2 else rng.randint(0, proposals)  # none and all are always among them
        branches.append(Branch(document, rng.randrange(lengths[document] - 1), accepted))
    branches[-1] = branches[-2]._replace(accepted=rng.randint(0, proposals))  # the same anchor twice
    return Layout(tokens, branches, proposals, block=rng.choice((proposals, proposals + 1)))


def tensors(layouts: list[Layout]) -> dict[str, Rows]:
    """The same layouts as `rows.py` describes them, one batch entry each."""

    def stack(values: Callable[[Layout], list[int]]) -> Tensor:
        return torch.tensor([values(layout) for layout in layouts])

    anchor = stack(lambda layout: [b.position for b in layout.branches])
    document = stack(lambda layout: [b.document for b in layout.branches])
    accepted = stack(lambda layout: [b.accepted for b in layout.branches])
    proposals, block = layouts[0].proposals, layouts[0].block
    return {
        "context": context_rows(
            stack(lambda layout: [t.position for t in layout.tokens]),
            stack(lambda layout: [t.document for t in layout.tokens]),
        ),
        "carry": carry_rows(anchor, document, accepted, proposals),
        "first block": block_rows(anchor, document, block),
        "second block": block_rows(stack(Layout.shifted), document, block),
        "branch": branch_rows(anchor, document, proposals),
    }


def pair(seed: int) -> list[Layout]:
    """Two layouts of one shape, as a batch."""
    first, second = random_layout(seed), random_layout(seed + 1000)
    second.block = first.block
    return [first, second]


# ---- SPEC 2.1 and 6.2, stages 1 and 3, spelled out -----------------------------------------------------------------
WINDOWS = [None, ("slot", 4), ("anchor", 4)]


def sees_token(anchor: int, document: int, k: int, token: Token, window: tuple[str, int] | None) -> bool:
    if token.document != document or token.document == -1:
        return False
    if token.position >= anchor:  # strictly before the anchor
        return False
    if window is None:
        return True
    kind, width = window
    if kind == "slot":  # the slot and the width - 1 positions before it
        return token.position in range(anchor + k - (width - 1), anchor + k + 1)
    return token.position in range(anchor - width, anchor)


def slow_draft_mask(
    layout: Layout, anchors: list[int], with_carry: bool, causal: bool, window: tuple[str, int] | None
) -> list[list[bool]]:
    mask = []
    for i, k in layout.blocks():
        row = [sees_token(anchors[i], layout.branches[i].document, k, token, window) for token in layout.tokens]
        if with_carry:
            row += [other == i and j > layout.branches[i].accepted for other, j in layout.carry()]
        for other, kk in layout.blocks():
            row.append(other == i and (kk <= k or not causal))
        mask.append(row)
    return mask


def rule_for(causal: bool, window: tuple[str, int] | None) -> DrafterRule:
    return DrafterRule(causal) if window is None else DrafterRule(causal, window[1], window[0] == "anchor")


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_second_draft_sees_context_carry_and_its_own_block(seed: int, causal: bool, window: tuple[str, int] | None):
    layouts = pair(seed)
    rows = tensors(layouts)
    keys = concat(rows["context"], rows["carry"], rows["second block"])
    mask = dense(rule_for(causal, window), rows["second block"], keys)
    expected = [slow_draft_mask(layout, layout.shifted(), True, causal, window) for layout in layouts]
    assert mask[:, 0].tolist() == expected


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_first_draft_sees_context_and_its_own_block(seed: int, causal: bool, window: tuple[str, int] | None):
    layouts = pair(seed)
    rows = tensors(layouts)
    mask = dense(rule_for(causal, window), rows["first block"], concat(rows["context"], rows["first block"]))
    anchors = [[b.position for b in layout.branches] for layout in layouts]
    expected = [slow_draft_mask(layout, a, False, causal, window) for layout, a in zip(layouts, anchors, strict=True)]
    assert mask[:, 0].tolist() == expected


# ---- SPEC 6.2, stages 0 and 2, spelled out -------------------------------------------------------------------------
def slow_target_mask(layout: Layout, window: int | None) -> list[list[bool]]:
    """Queries and keys: the committed tokens, then the branch rows."""

    def near(query: int, key: int) -> bool:
        return window is None or query - key < window

    mask = []
    for q in layout.tokens:
        same = [t.document == q.document and t.document != -1 for t in layout.tokens]
        row = [
            s and t.position <= q.position and near(q.position, t.position)
            for s, t in zip(same, layout.tokens, strict=True)
        ]
        mask.append(row + [False] * len(layout.carry()))
    for i, j in layout.carry():  # the proposals, as rows of the target
        branch = layout.branches[i]
        at = branch.position + j
        row = [
            t.document == branch.document and t.position <= branch.position and near(at, t.position)
            for t in layout.tokens
        ]
        row += [
            other == i and jj <= j and near(at, layout.branches[other].position + jj) for other, jj in layout.carry()
        ]
        mask.append(row)
    return mask


@pytest.mark.parametrize("window", [None, 3, 6])
@pytest.mark.parametrize("seed", range(6))
def test_target_sees_prefix_and_its_own_branch(seed: int, window: int | None):
    layouts = pair(seed)
    rows = tensors(layouts)
    everything = concat(rows["context"], rows["branch"])
    mask = dense(TargetRule(window), everything, everything)
    assert mask[:, 0].tolist() == [slow_target_mask(layout, window) for layout in layouts]


# ---- what must never be visible ------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(10))
def test_no_leak(seed: int):
    """Nothing at or after the anchor, no other document, no other anchor's rows, no accepted proposal, no padding."""
    layout = random_layout(seed)
    rows = tensors([layout])
    keys = concat(rows["context"], rows["carry"], rows["second block"])
    mask = dense(DrafterRule(), rows["second block"], keys)[0, 0]
    s, r = len(layout.tokens), len(layout.carry())
    for q, (i, _) in enumerate(layout.blocks()):
        branch, anchor = layout.branches[i], layout.shifted()[i]
        seen = [layout.tokens[t] for t in mask[q, :s].nonzero().flatten()]
        assert {t.document for t in seen} <= {branch.document}
        assert max((t.position for t in seen), default=-1) < anchor
        carried = [layout.carry()[t] for t in mask[q, s : s + r].nonzero().flatten()]
        assert carried == [Slot(i, j) for j in range(branch.accepted + 1, layout.proposals + 1)]
        assert {layout.blocks()[t].index for t in mask[q, s + r :].nonzero().flatten()} == {i}


def test_full_acceptance_leaves_no_carry():
    anchor, document = torch.tensor([[4, 9]]), torch.tensor([[0, 0]])
    carry = carry_rows(anchor, document, torch.tensor([[5, 4]]), 5)
    mask = dense(DrafterRule(), block_rows(anchor + torch.tensor([[6, 5]]), document, 6), carry)[0, 0]
    assert mask[:6].sum() == 0
    assert mask[6:].sum() == 6 and mask[6:, 9].all()  # the one rejected proposal of the other anchor


def test_first_carry_row_shares_the_new_anchors_position():
    anchor, accepted = torch.tensor([[4]]), torch.tensor([[2]])
    carry = carry_rows(anchor, torch.zeros_like(anchor), accepted, 5)
    assert carry.position.tolist() == [[5, 6, 7, 8, 9]]
    new_anchor = anchor + accepted + 1
    block = block_rows(new_anchor, torch.zeros_like(anchor), 3)
    assert block.position.tolist() == [[7, 8, 9]]
    assert dense(DrafterRule(causal=True), block, carry)[0, 0].tolist() == [[False, False, True, True, True]] * 3


# ---- the flex lowering ---------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:flex_attention called without")  # the fused kernel needs a GPU
@pytest.mark.parametrize("rule", [DrafterRule(), DrafterRule(True, 20), DrafterRule(False, 20, True)])
def test_flex_equals_dense_for_the_drafter(rule: DrafterRule):
    rows = tensors([random_layout(s, lengths=(60, 90, 70), padding=20, anchors=24) for s in (1, 2001)])
    keys = concat(rows["context"], rows["carry"], rows["second block"])
    assert_flex_equals_dense(rule, rows["second block"], keys)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("window", [None, 20])
def test_flex_equals_dense_for_the_target(window: int | None):
    rows = tensors([random_layout(s, lengths=(60, 90, 70), padding=0, anchors=60) for s in (3, 2003)])
    assert_flex_equals_dense(TargetRule(window), rows["branch"], concat(rows["context"], rows["branch"]))


def assert_flex_equals_dense(rule: DrafterRule | TargetRule, queries: Rows, keys: Rows) -> None:
    b, q, k = *queries.kind.shape, keys.kind.shape[1]
    mask, block_mask = dense(rule, queries, keys), flex(rule, queries, keys)
    at = [t.flatten() for t in torch.meshgrid(torch.arange(b), torch.arange(q), torch.arange(k), indexing="ij")]
    visible = block_mask.mask_mod(at[0], torch.zeros_like(at[0]), at[1], at[2])
    assert torch.equal(visible.view(b, 1, q, k), mask)
    assert not block_mask.to_dense().all(), "the layout should leave whole blocks empty"

    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(b, 2, n, 16, generator=generator) for n in (q, k, k)]
    torch.testing.assert_close(
        flex_attention(*draw, block_mask=block_mask), scaled_dot_product_attention(*draw, attn_mask=mask)
    )
