"""How a next token is chosen from logits: temperature, top-k, top-p and min-p, or the argmax at temperature 0.

The same object processes the target's and the drafter's logits, and the probabilities it returns are the ones it draws
from. Both happen in fp32: a draw from a bf16 softmax compared with an fp32 ratio would be biased.

Letters: `V` vocabulary. Source: SPEC 5; the order of the processors is that of transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError

# Where random numbers come from: torch's own, one generator, or one for each request of a batch.
Generators = torch.Generator | list[torch.Generator] | None


CHUNK = 256  # tokens whose running sum is taken at once when drawing
LEAST = 1e-3  # below, scores may leave the range of fp32, and only the argmax is ever drawn


@dataclass(frozen=True)
class Sampling:
    """temperature: 0 is greedy, whatever the rest says. top_k 0, top_p 1 and min_p 0 keep all tokens.

    Raises InputError for a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(f"temperature must be a finite number of at least 0, got {self.temperature}.")
        if 0 < self.temperature < LEAST:
            raise InputError(f"temperature must be 0 (greedy) or at least {LEAST}, got {self.temperature}.")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise InputError(f"top_k must be a whole number of at least 0 (0 keeps all tokens), got {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be above 0 and at most 1, got {self.top_p}.")
        if not 0 <= self.min_p <= 1:
            raise InputError(f"min_p must be between 0 and 1, got {self.min_p}.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """Logits `[..., V]` to the fp32 distribution `[..., V]` that tokens are drawn from; one-hot when greedy."""
        if self.greedy:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        scores = logits.float() / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            scores = _drop(scores, scores < scores.topk(self.top_k).values[..., -1:])
        if self.top_p < 1:
            scores = _drop(scores, _tail(scores, 1 - self.top_p))
        if self.min_p > 0:
            p = scores.softmax(-1)
            scores = _drop(scores, p < self.min_p * p.amax(-1, keepdim=True))
        return scores.softmax(-1)

    def choose(self, logits: Tensor, generator: Generators = None) -> Tensor:
        """Logits `[..., V]` to tokens `[...]`: the argmax when greedy, else independent draws."""
        return logits.argmax(-1) if self.greedy else draw(self.probabilities(logits), generator)


def uniform(shape: tuple[int, ...], device: torch.device, generator: Generators = None) -> Tensor:
    """fp64 numbers in [0, 1). Of a list, each generator fills one entry of the first dimension."""
    if isinstance(generator, list):
        rows = [torch.rand(shape[1:], dtype=torch.float64, device=device, generator=g) for g in generator]
        return torch.stack(rows)
    return torch.rand(shape, dtype=torch.float64, device=device, generator=generator)


def draw(weights: Tensor, generator: Generators = None) -> Tensor:
    """One index `[...]` for each row of non-negative `weights [..., V]`, which need not sum to one.

    Inverts the cumulative sum, in fp64 so that rare tokens keep their share and tokens of weight zero never appear: the
    sum over chunks of the vocabulary first, then over the tokens of one chunk, because a running sum over all of it is
    what a processor does one number at a time. Never waits for a device.
    """
    chunk = min(CHUNK, weights.shape[-1])
    padded = torch.nn.functional.pad(weights, (0, -weights.shape[-1] % chunk))
    chunks = padded.unflatten(-1, (-1, chunk))
    sums = chunks.sum(-1, dtype=torch.float64).cumsum(-1)
    goal = uniform((*weights.shape[:-1], 1), weights.device, generator) * sums[..., -1:]
    which = _first_above(sums, goal)
    inside = chunks.gather(-2, which[..., None].expand(*which.shape, chunk))[..., 0, :].cumsum(-1, dtype=torch.float64)
    before = torch.where(which > 0, sums.gather(-1, (which - 1).clamp(min=0)), 0)
    return (which * chunk + _first_above(inside, goal - before))[..., 0]


def _first_above(cumulative: Tensor, goal: Tensor) -> Tensor:
    """The first index whose running sum `[..., n]` is above `goal [..., 1]`, so one that added something to it. A goal
    that rounding has put at the end or behind it is pulled back."""
    last = cumulative[..., -1:]
    return torch.searchsorted(cumulative, torch.minimum(goal, last.nextafter(torch.zeros_like(last))), right=True)


def _drop(scores: Tensor, unwanted: Tensor) -> Tensor:
    return scores.masked_fill(unwanted, -torch.inf)


def _tail(scores: Tensor, mass: float) -> Tensor:
    """Which of the least likely tokens together hold at most `mass`, never the most likely one."""
    ascending, order = scores.sort(-1)
    unwanted = ascending.softmax(-1).cumsum(-1) <= mass
    unwanted[..., -1] = False
    return unwanted.scatter(-1, order, unwanted)
