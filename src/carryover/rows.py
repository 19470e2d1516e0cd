"""Which row sees which. Every attention mask of the project comes from the two rules in this file.

A *row* is one key/value (or query) entry of an attention layer. The drafter attends over three kinds of rows: CONTEXT
(fused features of committed tokens), CARRY (fused features of the tokens that the last verification rejected) and
BLOCK (the query block itself). The target attends over CONTEXT rows (the committed tokens) and, while it verifies
many proposals in one forward, BRANCH rows. A rule is an ordinary boolean function of two rows; `dense` evaluates it on
all pairs for SDPA, `flex` hands the very same function to `flex_attention`.

Letters: `b` batch, `Q` query rows, `K` key rows, `N` anchors, `S` sequence, `P` proposals, `B` block rows, `W` window.
Source: SPEC 1.5, 2.1 and 6.2 (paper sections 2.1, 2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

NOTHING, CONTEXT, CARRY, BLOCK, BRANCH = 0, 1, 2, 3, 4  # row kinds; a NOTHING row is padding and nobody sees it


class Rows(NamedTuple):
    """Attributes of rows, integer tensors of one shape (`[b, rows]`, or scalars inside flex attention).

    kind:      what the row is (see above).
    position:  absolute position in its document, the one RoPE uses; two rows may share one.
    document:  packed documents never see each other.
    branch:    the anchor's index that a carry, block or branch row belongs to; -1 for context.
    offset:    index inside the branch: slot k of a block row, proposal j (from 1) of a carry or branch row; else 0.
    anchor:    for queries, the position of the last committed token this row may depend on.
    """

    kind: Tensor
    position: Tensor
    document: Tensor
    branch: Tensor
    offset: Tensor
    anchor: Tensor

    def map(self, f: Callable[[Tensor], Tensor]) -> Rows:
        return Rows(*(f(field) for field in self))


Rule = Callable[[Rows, Rows], Tensor]


def context_rows(position: Tensor, document: Tensor) -> Rows:
    """Rows of committed tokens, `[b, S]` each; document -1 marks padding. As queries they may see up to themselves."""
    kind = torch.where(document >= 0, CONTEXT, NOTHING)
    return Rows(kind, position, document, torch.full_like(position, -1), torch.zeros_like(position), position)


def carry_rows(anchor: Tensor, document: Tensor, accepted: Tensor, proposals: int) -> Rows:
    """Rows of the proposals of `N` verified anchors, `[b, N*P]`; only the rejected ones (j > accepted) are visible.

    anchor, document, accepted: `[b, N]` of the round that was verified. Row j keeps its original position anchor + j.
    """
    return _branch_rows(CARRY, anchor, document, torch.arange(1, proposals + 1, device=anchor.device), accepted)


def block_rows(anchor: Tensor, document: Tensor, block_size: int) -> Rows:
    """Query blocks at `N` anchors, `[b, N*B]`; slot k has position anchor + k. anchor, document: `[b, N]`."""
    return _branch_rows(BLOCK, anchor, document, torch.arange(block_size, device=anchor.device))


def branch_rows(anchor: Tensor, document: Tensor, proposals: int) -> Rows:
    """Proposals at `N` anchors as the target verifies them, `[b, N*P]`; row j has position anchor + j, j from 1."""
    return _branch_rows(BRANCH, anchor, document, torch.arange(1, proposals + 1, device=anchor.device))


def _branch_rows(kind: int, anchor: Tensor, document: Tensor, offset: Tensor, accepted: Tensor | None = None) -> Rows:
    b, n = anchor.shape
    offset = offset.expand(b, n, -1)
    branch = torch.arange(n, device=anchor.device)[None, :, None].expand_as(offset)
    live = torch.ones_like(offset, dtype=torch.bool) if accepted is None else offset > accepted[..., None]
    rows = Rows(
        kind=torch.where(live, kind, NOTHING),
        position=anchor[..., None] + offset,
        document=document[..., None].expand_as(offset),
        branch=branch,
        offset=offset,
        anchor=anchor[..., None].expand_as(offset),
    )
    return rows.map(lambda field: field.flatten(1))


def rejected_seen(accepted: int, proposals: int, limit: int | None = None) -> int:
    """How many rejected rows of a verification the next draft sees: the first `limit` behind the accepted ones; None:
    all of them. The first of all has the position of the new anchor."""
    return min(proposals - accepted, proposals if limit is None else limit)


def draft_rows(length: int, base: Tensor, anchor: Tensor, carried: Tensor, block_size: int) -> Rows:
    """Rows of a draft cache, `[b, length]`, where row index is position but for the block (see `DraftCache`).

    base, anchor, carried: `[b]`. The rows of the last verification begin at `base`; those before `anchor` were
    committed, the next `carried` are carry rows, and the block at `anchor` lies behind them.
    """
    index = torch.arange(length, device=base.device)[None]
    base, anchor, carried = base[:, None], anchor[:, None], carried[:, None]
    block = anchor + carried
    context, is_carry = index < anchor, (index >= anchor) & (index < block)
    is_block = (index >= block) & (index < block + block_size)
    kind = torch.where(context, CONTEXT, torch.where(is_carry, CARRY, torch.where(is_block, BLOCK, NOTHING)))
    return Rows(
        kind=kind,
        position=torch.where(is_block, index - carried, index),
        document=torch.zeros_like(kind),
        branch=torch.where(context, -1, 0),
        offset=torch.where(is_block, index - block, torch.where(is_carry, index - base, 0)),
        anchor=anchor.expand_as(kind),
    )


def concat(*parts: Rows) -> Rows:
    """Rows of several kinds side by side, `[b, K1 + K2 + ...]`."""
    return Rows(*(torch.cat(fields, dim=1) for fields in zip(*parts, strict=True)))


@dataclass(frozen=True)
class DrafterRule:
    """What a block row of the drafter sees, for one attention layer.

    * committed context strictly before its anchor (the anchor's own target state is not known yet), same document;
    * the carry rows of its own anchor, whatever their position: the target computed them before this round;
    * its own block: all of it, or up to its slot where `causal`.

    window: only context of the last W positions, counted back from the slot (the kernel convention of z-lab and vLLM)
    or, with `window_from_anchor`, from the anchor (speculators). None sees all context.
    """

    causal: bool = False
    window: int | None = None
    window_from_anchor: bool = False

    def __call__(self, q: Rows, k: Rows) -> Tensor:
        context = (k.kind == CONTEXT) & (k.document == q.document) & (k.position < q.anchor)
        if self.window is not None:
            first_seen = (q.anchor if self.window_from_anchor else q.position + 1) - self.window
            context = context & (k.position >= first_seen)
        carry = (k.kind == CARRY) & (k.branch == q.branch)
        block = (k.kind == BLOCK) & (k.branch == q.branch)
        if self.causal:
            block = block & (k.offset <= q.offset)
        return context | carry | block


@dataclass(frozen=True)
class TargetRule:
    """What a row of the target sees, for one attention layer: ordinary causal attention, plus isolated branches.

    A committed row sees committed rows up to itself. Row j of a branch sees the committed rows up to the branch's
    anchor and rows 1..j of the same branch. window: a sliding layer's width, counted in positions, not in row indices.
    """

    window: int | None = None

    def __call__(self, q: Rows, k: Rows) -> Tensor:
        committed = (k.kind == CONTEXT) & (k.document == q.document) & (k.position <= q.anchor)
        branch = (k.kind == BRANCH) & (k.branch == q.branch) & (k.offset <= q.offset)
        seen = committed | branch
        return seen if self.window is None else seen & (q.position - k.position < self.window)


def dense(rule: Rule, queries: Rows, keys: Rows) -> Tensor:
    """`[b, 1, Q, K]` boolean mask for SDPA, True where the query row sees the key row."""
    return rule(queries.map(lambda f: f[:, None, :, None]), keys.map(lambda f: f[:, None, None, :]))


def flex(rule: Rule, queries: Rows, keys: Rows) -> BlockMask:
    """The same mask for `flex_attention`, which skips every block of rows that is empty.

    Building it evaluates the rule on all pairs once; after that only the occupied blocks are kept.
    """

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return rule(queries.map(lambda f: f[b, q]), keys.map(lambda f: f[b, k]))

    b, q = queries.kind.shape
    return create_block_mask(visible, b, None, q, keys.kind.shape[1], device=str(queries.kind.device))
