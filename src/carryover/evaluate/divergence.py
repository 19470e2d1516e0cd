"""Where an output parts from plain decoding, and how close the target's two candidates were there.

Greedy verification commits what the target prefers, so an output can differ only where rounding decides: a forward over
many rows and one over a single row need not round alike in bf16. A gap far above the spacing of the logits is a bug.

Letters: `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..target import Target


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs; None for equal responses or where one only goes on longer."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


@torch.no_grad()
def logit_gap(target: Target, prompt_ids: Sequence[int], a: Sequence[int], b: Sequence[int], position: int) -> float:
    """Absolute difference of the target's logits of `a[position]` and `b[position]` after the tokens before them."""
    tokens = torch.tensor([[*prompt_ids, *a[:position]]], device=target.device)
    logits = target.head(target.forward(tokens).hidden[0, -1])
    return float((logits[a[position]] - logits[b[position]]).abs())
