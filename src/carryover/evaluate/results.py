"""From traces to the results file: STATS of each run by task and overall, and paired comparisons between runs.

The file's keys are fixed (docs/results.md explains each); benchmarks and the report read it, nobody derives a figure
twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..data.prompts import OVERALL
from ..errors import InputError
from .acceptance import (
    Responses,
    acceptance_by_position,
    acceptance_sums,
    carried_rows,
    conditional_acceptance,
    loops,
    rounds_of,
)
from .speed import same_output, speed_sums, time_shares
from .stats import gain, gain_interval, quotient_interval, ratio_interval


@dataclass
class Run:
    """One method over all prompts. drafter: where it came from, None for plain decoding. by_task: task -> prompt id ->
    responses, the same prompts in the same order for every run."""

    name: str
    drafter: str | None = None
    carry: bool = False
    by_task: dict[str, dict[str, Responses]] = field(default_factory=dict)

    def prompts(self, task: str) -> list[Responses]:
        """The responses of one task, or of all of them for `overall`."""
        tasks = self.by_task.values() if task == OVERALL else [self.by_task[task]]
        return [responses for prompts in tasks for responses in prompts.values()]


def run_record(run: Run, plain: Run, greedy: bool, seed: int = 0) -> dict[str, Any]:
    """RUN of the results file."""

    def record(task: str) -> dict[str, Any]:
        return stats(run.prompts(task), plain.prompts(task), greedy, seed)

    return {
        "name": run.name,
        "drafter": run.drafter,
        "carry": run.carry,
        "tasks": {task: record(task) for task in run.by_task},
        "overall": record(OVERALL),
    }


def stats(prompts: Sequence[Responses], plain: Sequence[Responses], greedy: bool, seed: int = 0) -> dict[str, Any]:
    """STATS of the results file. prompts, plain: responses of one run and of plain decoding, the same prompts in order.

    identical, divergent: prompts whose output is that of plain decoding; None where sampling makes them differ anyway.
    A figure without any data (no rounds, no timings) is None.
    """
    tokens_per_round, tokens_per_second = acceptance_sums(prompts), speed_sums(prompts)
    plain_speed = speed_sums(plain)
    rounds = rounds_of(prompts)
    shares = time_shares(prompts)
    same = sum(same_output(a, b) for a, b in zip(prompts, plain, strict=True))
    return {
        "prompts": len(prompts),
        "tokens": int(np.sum(tokens_per_round.numerator)),
        "rounds": len(rounds),
        "acceptance_length": known(tokens_per_round.ratio()),
        "acceptance_length_ci95": interval(ratio_interval(tokens_per_round, seed)),
        "acceptance_by_position": acceptance_by_position(rounds),
        "conditional_acceptance": conditional_acceptance(rounds),
        "carried_rows": carried_rows(rounds),
        "tokens_per_second": known(tokens_per_second.ratio()),
        "speedup": known(gain(tokens_per_second, plain_speed) + 1),
        "speedup_ci95": interval(quotient_interval(tokens_per_second, plain_speed, seed)),
        "draft_share": known(shares.draft),
        "verify_share": known(shares.verify),
        "prefill_share": known(shares.prefill),
        "identical": same if greedy else None,
        "divergent": len(prompts) - same if greedy else None,
        "looping": sum(any(loops(g.tokens) for g in responses) for responses in prompts),
    }


def comparisons(runs: Sequence[Run], seed: int = 0) -> list[dict[str, Any]]:
    """CMP of every pair of drafter runs, for each task and overall: the later one against the earlier one. A run with
    carry is also set against a later one without, so that the gain of carry is there whatever the order was."""
    drafted = [run for run in runs if run.drafter is not None]
    pairs = []
    for j, later in enumerate(drafted):
        for earlier in drafted[:j]:
            pairs.append((later, earlier))
            if earlier.carry and not later.carry:
                pairs.append((earlier, later))
    return [compare(a, b, task, seed) for a, b in pairs for task in (*a.by_task, OVERALL)]


def compare(a: Run, b: Run, task: str, seed: int = 0) -> dict[str, Any]:
    """CMP of the results file: by what share run `a` is above run `b`, paired over prompts."""
    acceptance = acceptance_sums(a.prompts(task)), acceptance_sums(b.prompts(task))
    speed = speed_sums(a.prompts(task)), speed_sums(b.prompts(task))
    return {
        "a": a.name,
        "b": b.name,
        "task": task,
        "acceptance_gain": known(gain(*acceptance)),
        "acceptance_gain_ci95": interval(gain_interval(*acceptance, seed)),
        "speedup_gain": known(gain(*speed)),
        "speedup_gain_ci95": interval(gain_interval(*speed, seed)),
    }


def read_results(path: Path) -> dict[str, Any]:
    """A results file. Raises InputError when it is not one."""
    try:
        results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        assert results["runs"][0]["overall"] and "comparisons" in results
    except (OSError, ValueError, KeyError, TypeError, IndexError, AssertionError) as error:
        raise InputError(f"{path} is not a results file of `carryover evaluate`; evaluate again.") from error
    return results


def known(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value


def interval(pair: tuple[float, float]) -> list[float | None]:
    return [known(end) for end in pair]
