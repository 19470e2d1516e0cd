"""The bootstrap against slow loops, and whether its intervals cover what they should."""

from __future__ import annotations

import math

import numpy as np
import pytest

from carryover.evaluate.stats import (
    Sums,
    draws,
    gain,
    gain_interval,
    quotient_interval,
    ratio_interval,
    ratio_intervals,
)

A = Sums([12, 30, 7, 22, 5], [4, 8, 5, 5, 4])
B = Sums([12, 30, 7, 22, 5], [6, 11, 5, 8, 4])


def slow_ratio(sums: Sums, sample: list[int]) -> float:
    return sum(sums.numerator[i] for i in sample) / sum(sums.denominator[i] for i in sample)


def samples(n: int, seed: int, resamples: int) -> list[list[int]]:
    """The resamples behind the counts, as lists of prompt indices."""
    return [[i for i in range(n) for _ in range(row[i])] for row in draws(n, seed, resamples).tolist()]


def slow_percentile(values: list[float], share: float) -> float:
    """Linear interpolation between order statistics."""
    values = sorted(values)
    place = share * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


def test_micro_average_and_gain() -> None:
    assert A.ratio() == 76 / 26  # not the mean of the five ratios
    assert gain(A, B) == pytest.approx((76 / 26) / (76 / 34) - 1)
    assert math.isnan(Sums([0, 0], [0, 0]).ratio())


def test_draws_are_resamples_with_replacement() -> None:
    counts = draws(5, seed=3, resamples=4000)
    assert counts.shape == (4000, 5) and (counts.sum(axis=1) == 5).all()
    # each prompt is missing from (1 - 1/5)^5 = 32.8 % of the resamples; the standard error is 0.74 points
    assert (counts == 0).mean(axis=0) == pytest.approx(np.full(5, 0.8**5), abs=0.03)
    assert (draws(5, seed=3, resamples=4000) == counts).all() and (draws(5, seed=4, resamples=4000) != counts).any()


@pytest.mark.parametrize("resamples", [1, 2, 200])
def test_intervals_equal_slow_loops(resamples: int) -> None:
    drawn = samples(5, seed=7, resamples=resamples)
    ratios = [slow_ratio(A, s) for s in drawn]
    expected = slow_percentile(ratios, 0.025), slow_percentile(ratios, 0.975)
    assert ratio_interval(A, 7, resamples) == pytest.approx(expected)

    quotients = [slow_ratio(A, s) / slow_ratio(B, s) for s in drawn]
    low, high = slow_percentile(quotients, 0.025), slow_percentile(quotients, 0.975)
    assert quotient_interval(A, B, 7, resamples) == pytest.approx((low, high))
    assert gain_interval(A, B, 7, resamples) == pytest.approx((low - 1, high - 1))


def test_pairing_removes_what_prompts_have_in_common() -> None:
    """b is a with 10 % more rounds on every prompt: the gain is certain although the lengths vary a lot."""
    rng = np.random.default_rng(0)
    rounds = rng.integers(10, 60, 40) * 10
    tokens = rounds * rng.uniform(1, 6, 40)
    a, b = Sums(tokens, rounds), Sums(tokens, rounds * 1.1)
    low, high = gain_interval(a, b)
    assert low == pytest.approx(0.1) and high == pytest.approx(0.1)
    wide_low, wide_high = ratio_interval(a)
    assert wide_high - wide_low > 0.3


def test_one_prompt_has_no_width() -> None:
    assert ratio_interval(Sums([10], [4])) == (2.5, 2.5)


def test_prompts_without_rounds_do_not_poison_the_interval() -> None:
    low, high = ratio_interval(Sums([0, 10], [0, 4]))
    assert (low, high) == (2.5, 2.5)  # the resamples that drew only the empty prompt have no ratio
    assert all(math.isnan(end) for end in ratio_interval(Sums([0], [0])))


def test_intervals_cover_the_truth() -> None:
    """Of 200 experiments with 60 prompts, about 95 % of intervals hold the true gain (2 standard errors: 3 points)."""
    rng, hits = np.random.default_rng(1), 0
    for experiment in range(200):
        rounds_a = rng.integers(20, 80, 60)
        rounds_b = rng.integers(20, 80, 60)
        level = rng.uniform(2, 5, 60)  # hard and easy prompts, for both methods
        a = Sums(rng.poisson(1.2 * level * rounds_a), rounds_a)
        b = Sums(rng.poisson(level * rounds_b), rounds_b)
        low, high = gain_interval(a, b, seed=experiment, resamples=300)
        hits += low <= 0.2 <= high
    assert 0.89 <= hits / 200 <= 0.99


def test_several_intervals_at_once() -> None:
    rng = np.random.default_rng(2)
    a, b = rng.integers(0, 9, (12, 3)), rng.integers(1, 9, (12, 3))
    assert ratio_intervals(a, b, seed=4) == [ratio_interval(Sums(x, y), seed=4) for x, y in zip(a.T, b.T, strict=True)]
