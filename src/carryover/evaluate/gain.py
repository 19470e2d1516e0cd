"""What goes with the gain of carry: figures by task, their correlation with the gain, and state by state.

Figures are ratios of the sums in `reconvergence.py`, so that resamples of prompts are sums as well. The gain is the
acceptance length with carry over the baseline's, less 1. *Local replay* compares, at the same states, how many
proposals the target would accept of ON, OFF and BASELINE.

Letters: `s` states, `n` prompts, `R` resamples, `T` tasks, `F` sums. Source: SPEC 7.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..data.prompts import OVERALL
from .recall import accepted
from .reconvergence import Response, prompt_sums, round_figures
from .results import interval, known
from .stats import Sums, divide, draws, percentiles, ratio_intervals

Floats = NDArray[np.float64]
NAMES = (  # what `prompt_sums` counts
    "tokens", "verifications", "baseline_tokens", "baseline_rounds", "rounds", "rejected", "rows", "complete",
    "complete_rows", "within", "exact", "unique", "truncated_rows", "truncated", "behind", "behind_run", "states",
    "on_accepted", "off_accepted", "baseline_accepted",
)  # fmt: skip
# `per_baseline_length` is the control: what the baseline's length alone, the gain's own denominator, explains.
PREDICTORS = (
    "reconvergence", "reconvergence_exact", "reconvergence_unique", "reconvergence_per_baseline_length",
    "reconvergence_per_row", "reconvergence_truncated", "reconvergence_truncated_per_baseline_length",
    "reconvergence_truncated_per_row", "post_rejection", "post_rejection_run", "rejected_rows",
    "rejected_rows_per_baseline_length", "per_baseline_length", "replay_gain", "replay_ratio",
    "replay_training",
)  # fmt: skip


# ---- tasks -----------------------------------------------------------------------------------------------------------
def figures(sums: Mapping[str, ArrayLike]) -> dict[str, Floats]:
    """All figures from sums over prompts; sums may be arrays (resamples), NaN where nothing was counted."""
    s = {key: np.asarray(value, float) for key, value in sums.items()}
    length, base = divide(s["tokens"], s["verifications"]), divide(s["baseline_tokens"], s["baseline_rounds"])
    within, truncated = divide(s["within"], s["complete"]), divide(s["truncated"], s["rejected"])
    rows = divide(s["rows"], s["rounds"])
    on, off, baseline = (divide(s[f"{d}_accepted"], s["states"]) for d in ("on", "off", "baseline"))
    return {
        "acceptance_length": length,
        "baseline_acceptance_length": base,
        "gain": divide(length, base) - 1,
        "reconvergence": within,
        "reconvergence_exact": divide(s["exact"], s["complete"]),
        "reconvergence_unique": divide(s["unique"], s["complete"]),
        "reconvergence_per_baseline_length": divide(within, base),
        "reconvergence_per_row": divide(s["within"], s["complete_rows"]),
        "reconvergence_truncated": truncated,
        "reconvergence_truncated_per_baseline_length": divide(truncated, base),
        "reconvergence_truncated_per_row": divide(s["truncated"], s["truncated_rows"]),
        "post_rejection": divide(s["behind"], s["rejected"]),
        "post_rejection_run": divide(s["behind_run"], s["rejected"]),
        "rejected_rows": rows,
        "rejected_rows_per_baseline_length": divide(rows, base),
        "per_baseline_length": divide(1.0, base),
        "replay_on": on,
        "replay_off": off,
        "replay_baseline": baseline,
        "replay_gain": on - off,
        "replay_ratio": divide(on + 1, off + 1) - 1,
        "replay_training": divide(off + 1, baseline + 1) - 1,
    }


class Resampled(NamedTuple):
    """Figures of some prompts, and of their resamples `[R]`; counts: prompts and the rounds behind the figures."""

    value: dict[str, Floats]
    resamples: dict[str, Floats]
    counts: dict[str, int]


def resample(prompts: Sequence[Counter[str]], seed: int) -> Resampled:
    table = np.array([[sums[name] for name in NAMES] for sums in prompts], float)  # [n, F]
    totals = dict(zip(NAMES, table.sum(0), strict=True))
    drawn = dict(zip(NAMES, (draws(len(prompts), seed) @ table).T, strict=True))
    counts = {"prompts": len(prompts), **{k: int(totals[k]) for k in ("rounds", "rejected", "complete", "states")}}
    return Resampled(figures(totals), figures(drawn), counts)


def with_intervals(r: Resampled) -> dict[str, Any]:
    found: dict[str, Any] = dict(r.counts)
    for name, value in r.value.items():
        found |= {name: known(float(value)), f"{name}_ci95": interval(percentiles(r.resamples[name]))}
    return found


def pearson(x: Floats, y: Floats) -> Floats:
    """Correlation over the last axis, `[..., T]` to `[...]`; NaN without spread."""
    x, y = x - x.mean(-1, keepdims=True), y - y.mean(-1, keepdims=True)
    return divide((x * y).sum(-1), np.sqrt((x * x).sum(-1) * (y * y).sum(-1)))


def correlations(tasks: Mapping[str, Resampled]) -> dict[str, Any]:
    """Pearson correlation of the gain with each predictor over tasks; interval: prompts resampled within tasks."""
    found: dict[str, Any] = {"tasks": len(tasks)}
    for name in PREDICTORS if len(tasks) > 2 else ():
        x, y = (np.array([t.value[key] for t in tasks.values()]) for key in (name, "gain"))
        xs, ys = (np.stack([t.resamples[key] for t in tasks.values()], -1) for key in (name, "gain"))
        found |= {name: known(float(pearson(x, y))), f"{name}_ci95": interval(percentiles(pearson(xs, ys)))}
    return found


# ---- states ----------------------------------------------------------------------------------------------------------
def state_points(responses: Sequence[Response]) -> Floats:
    """One row per state with carry: accepted ON - OFF; then of the round that made its carry: re-converged (truncated),
    rejected rows, accepted behind the rejection. `[s, 4]`."""
    points = []
    for response in responses:
        for i, r in enumerate(response["rounds"]):
            if "on" in r:
                made = round_figures(response, i - 1)
                points.append([accepted(r["on"]) - accepted(r["off"]), made["truncated"], made["rows"], made["behind"]])
    return np.array(points, float).reshape(-1, 4)


def over_states(prompts: Sequence[Sequence[Response]], seed: int) -> dict[str, Any]:
    """How the local replay gain goes with what was carried, state by state: by re-converged rows, and correlations."""
    points = [state_points(responses) for responses in prompts]
    values = np.unique(np.concatenate(points)[:, 1])
    at = [[p[p[:, 1] == value, 0] for value in values] for p in points]
    gains, states = np.array([[[x.sum() for x in row], [len(x) for x in row]] for row in at]).transpose(1, 0, 2)
    found: dict[str, Any] = {
        "reconverged": values.astype(int).tolist(),
        "states": states.sum(0).astype(int).tolist(),
        "gain": (gains.sum(0) / states.sum(0)).tolist(),
        "gain_ci95": [interval(i) for i in ratio_intervals(gains, states, seed)],
    }
    # Per prompt the moments 1, x, y, xx, yy, xy, which resamples add up.
    counts = np.concatenate((np.ones((1, len(points))), draws(len(points), seed)))
    for column, name in ((1, "reconverged"), (2, "rejected_rows"), (3, "post_rejection")):
        xy = [(p[:, column], p[:, 0]) for p in points]
        moments = counts @ np.array([[len(x), x.sum(), y.sum(), x @ x, y @ y, x @ y] for x, y in xy])
        n, x, y, xx, yy, xy_ = moments.T
        r = divide(n * xy_ - x * y, np.sqrt(np.clip((n * xx - x * x) * (n * yy - y * y), 0, None)))
        found |= {f"r_{name}": known(float(r[0])), f"r_{name}_ci95": interval(percentiles(r[1:]))}
    return found


ROWS = ("exact", "near", "missed", "uncarried")


def row_counts(responses: Sequence[Response]) -> dict[str, list[int]]:
    """Per kind of position how many there were, and how often ON, and OFF, had the next token first.

    Position k of a state lies where the k-th carry row made its guess: the guess was right, right within one position,
    or missed; or there was no such row. All positions with a reference count, whatever came before them.
    """
    found = {kind: [0, 0, 0] for kind in ROWS}
    for response in responses:
        text = [*response["tokens"], *response["following"]]
        for made, r in zip(response["rounds"], response["rounds"][1:], strict=False):
            guesses, at = made["top"][made["accepted"] + 1 :], r["anchor"] - response["prompt_tokens"]
            for k, (on, off) in enumerate(zip(r.get("on", ()), r.get("off", ()), strict=True)):
                near = text[at + k : at + k + 3]  # the position before k, its own, the one behind
                guess = guesses[k] if k < len(guesses) else None
                kind = "uncarried" if guess is None else "exact" if guess == near[1] else "near"
                kind = "missed" if guess is not None and guess not in near else kind
                found[kind] = [x + y for x, y in zip(found[kind], (1, on == 0, off == 0), strict=True)]
    return found


def by_row(prompts: Sequence[Sequence[Response]], seed: int) -> dict[str, Any]:
    """Recall@1 ON and OFF by what the carry row of a position knew about it."""
    counts = np.array([[c[kind] for kind in ROWS] for c in map(row_counts, prompts)])  # [n, kinds, 3]
    n, on, off = counts.transpose(2, 0, 1)
    ends = ratio_intervals(on - off, n, seed)
    return {
        kind: {
            "n": int(n[:, k].sum()), "on": known(Sums(on[:, k], n[:, k]).ratio()),
            "off": known(Sums(off[:, k], n[:, k]).ratio()),
            "on_minus_off": known(Sums(on[:, k] - off[:, k], n[:, k]).ratio()),
            "on_minus_off_ci95": interval(ends[k]),
        }
        for k, kind in enumerate(ROWS)
    }  # fmt: skip


def explain(by_task: Mapping[str, Sequence[Sequence[Response]]], seed: int = 0) -> dict[str, Any]:
    """`tasks`, `overall`, the correlations, `states` and `rows` of diagnostics.json.

    by_task: task -> prompts -> the responses to each one's turns.
    """
    counted = {task: [prompt_sums(responses) for responses in prompts] for task, prompts in by_task.items()}
    tasks = {task: resample(sums, seed + i) for i, (task, sums) in enumerate(counted.items())}
    everything = [responses for prompts in by_task.values() for responses in prompts]
    return {
        "tasks": {task: with_intervals(r) for task, r in tasks.items()},
        OVERALL: with_intervals(resample([sums for task in counted.values() for sums in task], seed)),
        "correlation": correlations(tasks),
        "correlation_without_translation": correlations({t: r for t, r in tasks.items() if t != "translation"}),
        "states": over_states(everything, seed),
        "rows": by_row(everything, seed),
    }
