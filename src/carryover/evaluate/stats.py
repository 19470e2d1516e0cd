"""Confidence intervals: the paired percentile bootstrap over prompts.

A prompt is the unit that is drawn, because rounds of one response are not independent. Every figure of a report is a
ratio of sums over prompts (tokens per round, tokens per second) or a ratio of two such ratios (a gain, a speedup). Both
methods of a comparison are resampled with the same draws, which removes the differences between prompts.

Letters: `n` prompts, `R` resamples. Intervals are 95 % percentile intervals.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 2000
Interval = tuple[float, float]


class Sums(NamedTuple):
    """A ratio of sums, by prompt: numerator and denominator, `[n]` each (tokens and rounds, or tokens and seconds)."""

    numerator: ArrayLike
    denominator: ArrayLike

    def ratio(self) -> float:
        """The micro-average: sum of numerators over sum of denominators; NaN without any denominator."""
        return float(divide(np.sum(self.numerator), np.sum(self.denominator)))


def draws(prompts: int, seed: int = 0, resamples: int = RESAMPLES) -> NDArray[np.int64]:
    """How often each prompt appears in each resample, `[R, n]`; every row sums to n."""
    return np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples)


def ratio_interval(sums: Sums, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """Interval of a micro-averaged ratio such as the acceptance length. With a single prompt it has no width."""
    return percentiles(_resampled(sums, draws(len(np.asarray(sums.numerator)), seed, resamples)))


def ratio_intervals(numerators: ArrayLike, denominators: ArrayLike, seed: int = 0) -> list[Interval]:
    """`ratio_interval` of several ratios at once, from the same resamples: `[n, k]` each."""
    counts = draws(len(np.asarray(numerators)), seed)
    return [percentiles(column) for column in _resampled(Sums(numerators, denominators), counts).T]


def quotient_interval(a: Sums, b: Sums, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """Interval of `a.ratio() / b.ratio()`, paired: entry i of `a` and of `b` is the same prompt."""
    counts = draws(len(np.asarray(a.numerator)), seed, resamples)
    return percentiles(divide(_resampled(a, counts), _resampled(b, counts)))


def gain(a: Sums, b: Sums) -> float:
    """`a / b - 1`: by what share a is above b."""
    return float(divide(a.ratio(), b.ratio())) - 1


def gain_interval(a: Sums, b: Sums, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """Interval of `gain(a, b)`, paired over prompts."""
    low, high = quotient_interval(a, b, seed, resamples)
    return low - 1, high - 1


def _resampled(sums: Sums, counts: NDArray[np.int64]) -> NDArray[np.float64]:
    return divide(counts @ np.asarray(sums.numerator, float), counts @ np.asarray(sums.denominator, float))


def divide(a: ArrayLike, b: ArrayLike) -> NDArray[np.float64]:
    """a / b, NaN where b is zero (a resample may hold only prompts that ended before their first round)."""
    a, b = np.asarray(a, float), np.asarray(b, float)
    return np.divide(a, b, out=np.full(np.broadcast(a, b).shape, np.nan), where=b != 0)


def percentiles(values: NDArray[np.float64]) -> Interval:
    values = values[~np.isnan(values)]
    if not values.size:
        return np.nan, np.nan
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)
