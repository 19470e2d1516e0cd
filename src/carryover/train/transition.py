"""Draft, verify, draft: one round of decoding at many anchors of a recorded response, in parallel.

Stage 0  the target reads the recorded sequence once: features, and its K/V as the prefix of every branch.
Stage 1  a first draft at each sampled anchor, without carry and without gradient.
Stage 2  the target verifies all first drafts in one forward with isolated branches. The recorded response decides how
many
         proposals are accepted, and the next anchor follows: the position of the correction or bonus.
Stage 3  the second draft at the shifted anchors reads the states of the rejected proposals as carry rows. Only this one
         gets a loss, so gradient reaches the drafter, its fusion and the carry mark through it alone.

A baseline step is stage 0 and a draft with loss at the sampled anchors themselves.

Letters: `b` packed rows, `S` tokens, `N` anchors, `P` proposals, `B` block rows, `D` hidden, `M` captured layers.
Source: SPEC 6.2, 6.3 (paper 2.2, A.2), decisions 0.1.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..decode.verify import matched_prefix
from ..drafter.heads import Choose
from ..drafter.modeling import Drafter
from ..rows import Rows, block_rows, carry_rows, concat, context_rows
from ..target import Cache, Target
from .anchors import Anchors, Batch, can_anchor, labels_at

Acceptance = Literal["recorded", "target_guarded"]
BRANCH_TOKENS = 4096  # proposals verified per target forward; more anchors go in groups


class Prefix(NamedTuple):
    """Stage 0. hidden `[b, S, D]` final states, features `[b, S, M*D]`, rows and cache of the recorded sequence."""

    hidden: Tensor
    features: Tensor
    rows: Rows
    cache: Cache | None


class Transition(NamedTuple):
    """Stage 1 and 2. proposals `[b, N, P]`, accepted `[b, N]`, next: the shifted anchors, carry_features `[b, N*P,
    M*D]`, hints `[b, N, P]`: the token that each verified row offers to `TokenHints`."""

    anchors: Anchors
    proposals: Tensor
    accepted: Tensor
    next: Anchors
    carry_features: Tensor
    hints: Tensor
    greedy: Tensor | None  # what greedy verification by the target would have accepted, [b, N]


def read_prefix(target: Target, drafter: Drafter, batch: Batch, keep_cache: bool) -> Prefix:
    """Stage 0: one forward of the frozen target over packed documents."""
    rows = context_rows(batch["positions"], batch["document"])
    cache = target.new_cache() if keep_cache else None
    masks = target.masks(rows, rows)
    out = target.forward(batch["input_ids"], cache, drafter.config.layer_ids, batch["positions"], masks)
    assert out.features is not None
    return Prefix(out.hidden, out.features, rows, cache)


class Carried(NamedTuple):
    """What the last verification of each anchor leaves: the verified anchors, accepted `[b, N]`, features `[b, N*P,
    M*D]`, hints `[b, N, P]`."""

    anchors: Anchors
    accepted: Tensor
    features: Tensor
    hints: Tensor


def draft(
    drafter: Drafter,
    target: Target,
    batch: Batch,
    prefix: Prefix,
    anchors: Anchors,
    carried: Carried | None = None,
    together: bool | None = None,
) -> Tensor:
    """Runs the query blocks of all anchors in one forward; returns their states `[b*N, B, D]`.

    carried: of the same N anchors; None drafts without carry. together: all anchors of a packed row in one sequence of
    rows, for flex attention, which skips what is masked; else each anchor is an entry of its own, so that a dense mask
    never spans the rows of other anchors. None: together on an accelerator.
    """
    together = drafter.device.type == "cuda" if together is None else together
    dtype, block_size = drafter.dtype, drafter.config.block_size

    def entries(x: Tensor) -> Tensor:
        return x if together else x.reshape(-1, 1)

    queries = block_rows(entries(anchors.position), entries(anchors.document), block_size)
    copies = queries.kind.shape[0] // prefix.rows.kind.shape[0]
    keys, carry_features, carry_positions = [prefix.rows.map(lambda f: f.repeat_interleave(copies, 0))], None, None
    tokens = drafter.block_tokens(batch["input_ids"].gather(1, anchors.column)).view_as(queries.position)
    hints = None
    if carried is not None and drafter.config.hints:
        seen = carried.hints.shape[-1] - carried.accepted
        hints = drafter.hints(carried.hints, carried.accepted, seen, target.embed).to(dtype)
        hints = hints.view(*queries.position.shape, -1)
    elif carried is not None:
        old, proposals = carried.anchors, drafter.config.num_proposals
        rows = carry_rows(entries(old.position), entries(old.document), entries(carried.accepted), proposals)
        keys.append(rows)
        carry_features, carry_positions = carried.features.to(dtype).view(*rows.kind.shape, -1), rows.position
    hidden = drafter(
        target.embed(tokens).to(dtype),
        queries.position,
        drafter.masks(queries, concat(*keys, queries), use_flex=together),
        prefix.features.to(dtype),
        batch["positions"],
        carry_features,
        carry_positions,
        hints,
    )
    return hidden.view(-1, block_size, hidden.shape[-1])


@torch.no_grad()
def transition(
    drafter: Drafter,
    target: Target,
    batch: Batch,
    prefix: Prefix,
    anchors: Anchors,
    acceptance: Acceptance = "recorded",
    compare: bool = False,
    before: Transition | None = None,
    sample: Choose | None = None,
) -> Transition:
    """Stages 1 and 2 at the sampled anchors, detached.

    acceptance: `recorded` accepts proposals while they equal the recorded tokens (V1). `target_guarded` (V2g) accepts
    by the target's own argmax and drops anchors where that would leave the recorded prefix or carry the state of the
    committed token itself; what remains are the anchors on which both rules agree. compare: also compute the greedy
    count under V1. before: the transition that led to these anchors, whose rejected states the first draft reads, as
    when decoding; None: it has no carry. sample: how proposals are chosen from logits; None: argmax.
    """
    b, n = anchors.column.shape
    carried = before and Carried(before.anchors, before.accepted, before.carry_features, before.hints)
    hidden = draft(drafter, target, batch, prefix, anchors, carried)
    anchor_tokens = batch["input_ids"].gather(1, anchors.column)
    choose = sample or (lambda logits: drafter.token_ids(logits.argmax(-1)))
    head = target.head_of(drafter.draft_vocab)
    proposals = drafter.propose(hidden, anchor_tokens.flatten(), head, choose).tokens
    proposals = proposals.view(b, n, -1)

    verified = verify(drafter, target, prefix, anchors, proposals, compare or acceptance == "target_guarded")
    greedy = verified.greedy
    recorded = labels_at(batch, anchors, proposals.shape[-1])
    # Outside the supervised response nothing matches, so the count never runs past the recorded text.
    accepted = matched_prefix(torch.where(recorded.mask, proposals, -1), recorded.tokens)
    keep = anchors.valid if acceptance == "recorded" or greedy is None else anchors.valid & (greedy == accepted)
    shifted = anchors.column + accepted + 1
    inside = shifted < batch["input_ids"].shape[1]
    shifted = torch.where(inside, shifted, 0)
    same_document = batch["document"].gather(1, shifted) == anchors.document
    keep = keep & inside & same_document & can_anchor(batch).gather(1, shifted)
    return Transition(anchors, proposals, accepted, Anchors.at(shifted, keep, batch), *verified)


class Verified(NamedTuple):
    """Stage 2. features `[b, N*P, M*D]`, hints `[b, N, P]` and the greedy accepted counts `[b, N]`, if asked for."""

    features: Tensor
    hints: Tensor
    greedy: Tensor | None


def verify(
    drafter: Drafter, target: Target, prefix: Prefix, anchors: Anchors, proposals: Tensor, greedy: bool
) -> Verified:
    """Stage 2: the target reads all proposals, each branch on its own."""
    assert prefix.cache is not None
    p = proposals.shape[-1]
    features, counts, choices = [], [], []
    top1 = drafter.config.hints and drafter.config.carry_hint == "target_top1"
    for group in torch.arange(proposals.shape[1], device=proposals.device).split(max(1, BRANCH_TOKENS // p)):
        out = target.verify_branches(
            proposals[:, group],
            anchors.position[:, group],
            anchors.document[:, group],
            prefix.rows,
            prefix.cache,
            drafter.config.layer_ids,
        )
        assert out.features is not None
        features.append(out.features)
        if top1:
            choices.append(target.head(out.hidden).argmax(-1).unflatten(1, (-1, p)))
        if greedy:
            at_anchor = prefix.hidden.gather(1, anchors.column[:, group, None].expand(-1, -1, prefix.hidden.shape[-1]))
            states = torch.cat((at_anchor[:, :, None], out.hidden.unflatten(1, (-1, p))[:, :, :-1]), dim=2)
            counts.append(matched_prefix(proposals[:, group], target.head(states).argmax(-1)))
    hints = torch.cat(choices, dim=1) if top1 else proposals
    return Verified(torch.cat(features, dim=1), hints, torch.cat(counts, dim=1) if greedy else None)


def second_draft(
    drafter: Drafter, target: Target, batch: Batch, prefix: Prefix, step: Transition, drop: Tensor | None = None
) -> Tensor:
    """Stage 3: block states `[b*N, B, D]` at the shifted anchors, with the rejected states of stage 2 as carry rows, or
    the tokens of stage 2 as hints.

    drop `[b, N]`: anchors whose carry is withheld (carry dropout), as after full acceptance.
    """
    accepted = step.accepted if drop is None else torch.where(drop, step.proposals.shape[-1], step.accepted)
    carried = Carried(step.anchors, accepted, step.carry_features, step.hints)
    return draft(drafter, target, batch, prefix, step.next, carried)
