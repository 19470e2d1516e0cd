"""Which positions of a recorded response a drafter is trained at, and which recorded tokens it is supervised with there.

An anchor stands for the last committed token of a round, so it is a response token, and the token after it must be
supervised. Documents are sampled separately (a long one never starves a short one in the same packed row).

Letters: `b` packed rows, `S` tokens of a row, `N` anchors of a row (padded), `P` proposals. Source: SPEC 2.1, 6.2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Batch = dict[str, Tensor]  # input_ids, positions, document (-1 padding), loss_mask (bool), each [b, S]


class Anchors(NamedTuple):
    """index: column of the packed row, `[b, N]`; valid: False for padding. position, document: of those columns."""

    index: Tensor
    valid: Tensor
    position: Tensor
    document: Tensor

    @classmethod
    def at(cls, index: Tensor, valid: Tensor, batch: Batch) -> Anchors:
        index = torch.where(valid, index, 0)
        return cls(index, valid, batch["positions"].gather(1, index), batch["document"].gather(1, index))


def supervised(batch: Batch, ahead: int) -> Tensor:
    """`[b, S]`: whether the token `ahead` columns further is a supervised token of the same document."""
    mask, document = batch["loss_mask"], batch["document"]
    if ahead >= mask.shape[1]:
        return torch.zeros_like(mask)
    there = torch.zeros_like(mask)
    width = mask.shape[1] - ahead
    there[:, :width] = mask[:, ahead:] & (document[:, ahead:] == document[:, :width]) & (document[:, :width] >= 0)
    return there


def can_anchor(batch: Batch) -> Tensor:
    """`[b, S]`: response tokens followed by at least one supervised token."""
    return supervised(batch, 0) & supervised(batch, 1)


def sample_anchors(batch: Batch, per_document: int, ahead: int, generator: torch.Generator) -> Anchors:
    """Up to `per_document` anchors of every document, without replacement, in order.

    ahead: supervised tokens that must follow an anchor, 1 for a baseline step, 2 where the anchor is about to be shifted.
    """
    allowed = supervised(batch, 0)
    for k in range(1, ahead + 1):
        allowed = allowed & supervised(batch, k)
    chosen = []
    for row, document in zip(allowed.cpu(), batch["document"].cpu(), strict=True):
        picks = [
            columns[torch.randperm(len(columns), generator=generator)[:per_document]]
            for d in document.unique()
            if d >= 0 and len(columns := ((document == d) & row).nonzero()[:, 0])
        ]
        chosen.append(torch.cat(picks).sort().values if picks else torch.empty(0, dtype=torch.long))
    width = max(1, max(map(len, chosen)))
    index = torch.zeros(len(chosen), width, dtype=torch.long)
    valid = torch.zeros(len(chosen), width, dtype=torch.bool)
    for i, columns in enumerate(chosen):
        index[i, : len(columns)], valid[i, : len(columns)] = columns, True
    device = batch["input_ids"].device
    return Anchors.at(index.to(device), valid.to(device), batch)


class Labels(NamedTuple):
    """What the P proposals at each anchor should have been, `[b, N, P]` each.

    tokens: recorded tokens at anchor + 1 .. anchor + P; previous: the token before each; mask: whether supervised (a
    proposal counts only while all before it do); index: column whose target state predicts the label.
    """

    tokens: Tensor
    previous: Tensor
    mask: Tensor
    index: Tensor


def labels_at(batch: Batch, anchors: Anchors, proposals: int) -> Labels:
    """Recorded continuation at the anchors, cut at the first token that is not supervised."""
    s = batch["input_ids"].shape[1]
    index = anchors.index[..., None] + torch.arange(proposals, device=anchors.index.device)
    inside = (index + 1 < s) & anchors.valid[..., None]
    index, label_index = index.clamp(max=s - 1), (index + 1).clamp(max=s - 1)

    def columns(field: Tensor, at: Tensor) -> Tensor:
        return field.gather(1, at.flatten(1)).view_as(at)

    same_document = columns(batch["document"], label_index) == anchors.document[..., None]
    mask = (inside & same_document & columns(batch["loss_mask"], label_index)).cumprod(-1).bool()
    ids = batch["input_ids"]
    return Labels(columns(ids, label_index), columns(ids, index), mask, index)
