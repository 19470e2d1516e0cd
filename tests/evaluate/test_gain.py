"""Figures by task, their correlation with the gain, and state by state, on constructed data."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from carryover.evaluate.gain import (
    NAMES,
    PREDICTORS,
    by_row,
    correlations,
    explain,
    figures,
    over_states,
    pearson,
    resample,
)


def test_figures() -> None:
    values = (300, 60, 200, 50, 50, 40, 400, 20, 180, 90, 45, 80, 320, 120, 100, 60, 40, 160, 140, 100)
    f = figures(dict(zip(NAMES, values, strict=True)))
    expected = {
        "acceptance_length": 5, "baseline_acceptance_length": 4, "gain": 0.25, "reconvergence": 4.5,
        "reconvergence_exact": 2.25, "reconvergence_unique": 4, "reconvergence_per_baseline_length": 1.125,
        "reconvergence_per_row": 0.5, "reconvergence_truncated": 3, "reconvergence_truncated_per_baseline_length": 0.75,
        "reconvergence_truncated_per_row": 0.375, "post_rejection": 2.5, "post_rejection_run": 1.5, "rejected_rows": 8,
        "rejected_rows_per_baseline_length": 2, "per_baseline_length": 0.25, "replay_on": 4, "replay_off": 3.5,
        "replay_baseline": 2.5, "replay_gain": 0.5, "replay_ratio": 5 / 4.5 - 1, "replay_training": 4.5 / 3.5 - 1,
    }  # fmt: skip
    assert {key: float(value) for key, value in f.items()} == pytest.approx(expected)
    assert set(PREDICTORS) < set(f)
    assert np.isnan(figures(dict.fromkeys(NAMES, 0))["gain"])


def test_pearson() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(5, 8)), rng.normal(size=(5, 8))
    assert pearson(x, y) == pytest.approx([np.corrcoef(a, b)[0, 1] for a, b in zip(x, y, strict=True)])
    assert np.isnan(pearson(np.ones(4), np.arange(4.0)))


def task(gain: float, rows: float, noise: float = 0.0, prompts: int = 30) -> list[Counter[str]]:
    """Prompts whose acceptance length is 4 * (1 + gain) against 4, and which reject so many rows a round."""
    rng = np.random.default_rng(int(1000 * gain))
    found = []
    for _ in range(prompts):
        more = rng.normal(scale=noise) if noise else 0.0
        sums = dict.fromkeys(NAMES, 10.0)
        sums |= {"tokens": 40 * (1 + gain + more), "verifications": 10, "baseline_tokens": 40, "baseline_rounds": 10}
        found.append(Counter({**sums, "rows": 10 * rows}))  # type: ignore[arg-type]
    return found


def test_correlation_over_tasks() -> None:
    """Rows fall as the gain rises, exactly, but for the task that is left out."""
    exact = {
        name: resample(task(g, 10 - 20 * g), i)
        for i, (name, g) in enumerate(zip("abcd", (0, 0.1, 0.2, 0.3), strict=True))
    }
    with_one = {**exact, "translation": resample(task(0.5, 10), 9)}
    found = correlations(exact)
    assert found["tasks"] == 4 and found["rejected_rows"] == pytest.approx(-1)
    assert found["rejected_rows_ci95"] == pytest.approx([-1, -1])
    assert found["post_rejection"] is None  # the same for all tasks
    gains, rows = [0, 0.1, 0.2, 0.3, 0.5], [10, 8, 6, 4, 10]
    assert correlations(with_one)["rejected_rows"] == pytest.approx(np.corrcoef(gains, rows)[0, 1])
    assert correlations(dict(list(exact.items())[:2])) == {"tasks": 2}


def test_correlation_interval_comes_from_prompts() -> None:
    noisy = {
        name: resample(task(g, 10 - 20 * g, noise=0.5), i)
        for i, (name, g) in enumerate(zip("abcd", (0, 0.1, 0.2, 0.3), strict=True))
    }
    found = correlations(noisy)
    low, high = found["rejected_rows_ci95"]
    assert low < found["rejected_rows"] < high and high - low > 0.2


def responses(gains: list[int], matches: list[int]) -> list[dict[str, Any]]:
    """Two rounds for each state: one that rejects 4 rows, of which `matches` re-converge, then the state."""
    found = []
    for gain, match in zip(gains, matches, strict=True):
        text = list(range(10, 30))
        top = [11, *(text[j + 1] if j <= match else 99 for j in range(1, 5))]
        rejected = {"anchor": 0, "proposals": [50, 51, 52, 53], "accepted": 0, "top": top}
        on, off = ([0] * gain + [1] * (4 - gain), [1] * 4) if gain >= 0 else ([1] * 4, [0] * -gain + [1] * (4 + gain))
        state = {
            "anchor": 1,
            "proposals": [1] * 4,
            "accepted": 0,
            "top": [0] * 5,
            "on": on,
            "off": off,
            "baseline": off,
        }
        found.append({"prompt_tokens": 0, "tokens": text, "following": [], "rounds": [rejected, state],
                      "baseline_tokens": 10, "baseline_rounds": 10})  # fmt: skip
    return found


def test_over_states() -> None:
    prompts = [responses([0, 1, 3], [0, 2, 4]), responses([-1, 2], [0, 2]), []]
    found = over_states(prompts, 0)
    assert (found["reconverged"], found["states"], found["gain"]) == ([0, 2, 4], [2, 2, 1], [-0.5, 1.5, 3.0])
    assert found["gain_ci95"][0] == [-1.0, 0.0] and found["gain_ci95"][2] == [3.0, 3.0]
    assert found["r_reconverged"] == pytest.approx(np.corrcoef([0, 1, 3, -1, 2], [0, 2, 4, 0, 2])[0, 1])
    assert found["r_rejected_rows"] is None  # always four


def test_recall_by_what_the_carry_row_knew() -> None:
    """Anchor 5 (token 15); 4 carry rows guess about the tokens 16 to 19, and there is a fifth position."""
    made = {"anchor": 3, "proposals": [14, 1, 1, 1, 1], "accepted": 1, "top": [14, 15, 16, 99, 19, 18]}
    state = {"anchor": 5, "on": [0, 0, 0, 0, 1], "off": [1, 0, 0, 2, 0]}
    one = {"prompt_tokens": 0, "tokens": list(range(10, 20)), "following": [20, 21, 22], "rounds": [made, state]}
    found = by_row([[one], []], 0)
    counts = {kind: (r["n"], r["on"], r["off"], r["on_minus_off"]) for kind, r in found.items()}
    assert counts == {
        "exact": (1, 1.0, 0.0, 1.0), "missed": (1, 1.0, 1.0, 0.0), "near": (2, 1.0, 0.5, 0.5),
        "uncarried": (1, 0.0, 1.0, -1.0),
    }  # fmt: skip
    assert found["near"]["on_minus_off_ci95"] == [0.5, 0.5]


def test_explain_by_task() -> None:
    tasks = {"qa": [responses([0, 1], [0, 2])], "translation": [responses([3], [4]), responses([2], [2])]}
    found = explain(tasks)
    assert found["overall"]["prompts"] == 3 and found["overall"]["states"] == 4
    assert found["tasks"]["translation"]["replay_gain"] == 2.5 and found["tasks"]["qa"]["reconvergence"] == 1.0
    assert found["tasks"]["translation"]["replay_gain_ci95"] == [2.0, 3.0]
    assert found["correlation"] == {"tasks": 2} and found["correlation_without_translation"] == {"tasks": 1}
