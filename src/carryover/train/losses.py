"""The training loss of a block: recorded-token cross-entropy and distances to the target's distribution, per slot.

    L = sum_i w_i (ce * CE_i + l1 * |q_i - p_i|_1 + kl * KL(p'_i || q_i)) / normaliser

q: the drafter's (corrected) distribution for proposal i, p: the target's at the same position of the recorded response,
p': p among the tokens that can be proposed. |.|_1 is the plain L1 norm, 0 to 2 (SPEC 3.2, the scale trap). KL teaches
what CE teaches on average over recordings of the same prefix (at temperature 1), from one of them. The sum is divided
by one number for the whole optimiser step, all micro-batches and ranks of it, so that accumulating k micro-batches
equals one batch k times as large.

Letters: `T` anchors (flattened), `P` proposals, `D` hidden, `V` vocabulary. Source: SPEC 2.1, 2.3, 3.2; D-PACE: arXiv
2605.18810.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from ..decode.verify import matched_prefix

LogitsOf = Callable[[Tensor, Tensor], Tensor]  # proposing rows [T, P, D], previous tokens [T, P] -> logits [T, P, V]
MAX_CHUNK = 1 << 26  # logits kept at once, in numbers: 256 MiB in fp32


@dataclass(frozen=True)
class Objective:
    """ce, l1, kl: the weights. weighting: `decay` w_i = exp(-i / gamma) with i from 0, or `dpace` (gamma unused)."""

    ce: float = 1.0
    l1: float = 0.0
    gamma: float = 7.0
    weighting: Literal["decay", "dpace"] = "decay"
    dpace_alpha: float = 0.5
    kl: float = 0.0

    def normaliser(self, mask: Tensor) -> Tensor:
        """What a block with supervised slots `mask [..., P]` adds to the divisor: its decay weights, or its slots."""
        if self.weighting == "dpace":
            return mask.sum()
        return (mask * decay_weights(mask.shape[-1], self.gamma).to(mask.device)).sum()


def learnt(labels: Tensor, mask: Tensor) -> Tensor:
    """Which supervised slots `mask [..., P]` get a loss: those before the first label that cannot be proposed.

    labels: indices into the draft vocabulary, -1 for tokens outside it. There a round ends whatever the drafter says.
    """
    return mask & (labels >= 0).cumprod(-1).bool()


def decay_weights(proposals: int, gamma: float) -> Tensor:
    """`[P]` weights exp(-i / gamma), i from 0: an early mistake costs all that follow."""
    return torch.exp(-torch.arange(proposals) / gamma)


def dpace_weights(ce: Tensor, mask: Tensor, alpha: float) -> Tensor:
    """`[T, P]` detached D-PACE weights: w_j = sum over m >= j of the smoothed chance that slots 1..m are all right.

    ce `[T, P]`: cross-entropy per slot; the chance of slot i is (1 - alpha) exp(-ce_i) + alpha. Unsupervised slots have
    weight 0, count as certain in the product and not at all in the sum.
    """
    chance = torch.where(mask, (1 - alpha) * torch.exp(-ce.detach()) + alpha, 1.0)
    reach = chance.cumprod(-1) * mask
    return reach.flip(-1).cumsum(-1).flip(-1) * mask


class BlockLoss(NamedTuple):
    """loss: the weighted sum, not yet normalised. Detached sums over supervised blocks and slots, for the log:
    ce, l1, kl, slots (of the slots that get a loss), `matched` (tokens of the longest right prefix of each block),
    blocks, `right [P]`, `seen [P]`."""

    loss: Tensor
    ce: Tensor
    l1: Tensor
    kl: Tensor
    slots: Tensor
    matched: Tensor
    blocks: Tensor
    right: Tensor
    seen: Tensor


def block_loss(
    hidden: Tensor,
    previous: Tensor,
    labels: Tensor,
    mask: Tensor,
    logits_of: LogitsOf,
    objective: Objective,
    target_logits_of: Callable[[Tensor], Tensor] | None = None,
    target_hidden: Tensor | None = None,
    vocabulary: Tensor | None = None,
    proposable_logits_of: Callable[[Tensor], Tensor] | None = None,
) -> BlockLoss:
    """The loss of `T` blocks, their logits computed a chunk at a time and again in backward when they would not fit.

    hidden `[T, P, D]`; previous, labels, mask `[T, P]`; labels are indices into the draft vocabulary, -1 outside it,
    where nothing is learnt and the drafter counts as wrong. With l1 or kl, target_hidden `[T, P, Dt]` holds the
    target's final states that predict each label. target_logits_of is the target's head, for l1; vocabulary: the tokens
    that can be proposed, None for all; what the target gives to others is a constant part of the distance.
    proposable_logits_of is the head over those tokens only, for kl.
    """
    keep = mask.any(-1)
    hidden, previous, labels, mask = hidden[keep], previous[keep], labels[keep], mask[keep]
    soft = objective.l1 or objective.kl
    teacher = target_hidden[keep] if soft and target_hidden is not None else None
    proposals = labels.shape[1]

    def one(h: Tensor, y: Tensor, x: Tensor, m: Tensor, t: Tensor | None) -> tuple[Tensor, ...]:
        logits = logits_of(h, y).float()
        ce = cross_entropy(logits.flatten(0, 1), x.flatten(), reduction="none", ignore_index=-1).view_as(x)
        learn = learnt(x, m)
        slot = objective.ce * ce
        l1, kl = torch.zeros_like(ce), torch.zeros_like(ce)
        if t is not None and objective.l1 and target_logits_of is not None:
            with torch.no_grad():
                p = target_logits_of(t).float().softmax(-1)
            p = p if vocabulary is None else p[..., vocabulary]
            l1 = (logits.softmax(-1) - p).abs().sum(-1) + (0 if vocabulary is None else 1 - p.sum(-1))
            slot = slot + objective.l1 * l1
        if t is not None and objective.kl and proposable_logits_of is not None:
            with torch.no_grad():
                log_p = proposable_logits_of(t).float().log_softmax(-1)
            kl = (log_p.exp() * (log_p - logits.log_softmax(-1))).sum(-1)
            slot = slot + objective.kl * kl
        if objective.weighting == "dpace":
            weight = dpace_weights(ce, learn, objective.dpace_alpha)
        else:
            weight = decay_weights(proposals, objective.gamma).to(m.device) * learn
        right = (logits.argmax(-1) == x) & m
        matched = matched_prefix(torch.where(m, logits.argmax(-1), -2), x)
        logged = ((value * learn).sum() for value in (ce, l1, kl))
        return (slot * weight).sum(), *logged, matched.sum(), right.sum(0)

    width = logits_of(hidden[:1], previous[:1]).shape[-1] if len(hidden) else 1
    step = max(1, MAX_CHUNK // (proposals * width))
    totals: list[Tensor] | None = None
    for i in range(0, len(hidden), step):
        part = [v[i : i + step] for v in (hidden, previous, labels, mask)]
        part.append(teacher[i : i + step] if teacher is not None else None)  # type: ignore[arg-type]
        sums = one(*part) if len(hidden) <= step else checkpoint(one, *part, use_reentrant=False)  # type: ignore[arg-type]
        totals = list(sums) if totals is None else [a + b for a, b in zip(totals, sums, strict=True)]
    if totals is None:
        zero = hidden.sum() * 0.0
        totals = [zero] * 5 + [torch.zeros(proposals, device=hidden.device)]
    loss, *logged = totals
    ce, l1, kl, matched, right = (v.detach() for v in logged)
    slots, seen = learnt(labels, mask).sum(), mask.sum(0)
    return BlockLoss(loss, ce, l1, kl, slots, matched, torch.tensor(len(labels), device=hidden.device), right, seen)
