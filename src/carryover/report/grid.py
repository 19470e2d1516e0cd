"""The cells of a grid side by side: results joined into one file a temperature, and the table of their gains.

Runs are named CELL-STAGE-sSEED, stage one of start, continued, carryover, carryover-off; the comparisons are
carryover / continued and carryover / start of the same cell and seed. The format is that of results.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from ..errors import InputError
from ..evaluate.results import read_results
from ..files import write_text

TABLE = "grid.md"
NAMES = {
    "baseline": "start",
    "continued": "continued",
    "carryover": "carryover",
    "carryover (carry off)": "carryover-off",
}
STAGES = tuple(NAMES.values())
Json = dict[str, Any]


def write(out: Path, names: Sequence[str]) -> None:
    """Writes `grid-tT.json` for every temperature T there are evaluations at, and `grid.md`, from what is finished."""
    pages = []
    folders = {path.parent.name for name in names for path in (out / name).glob("t*/results.json")}
    temperatures = [
        folder for folder in folders if re.fullmatch(r"t\d+(\.\d+)?(e[+-]?\d+)?", folder)
    ]  # others are the user's
    for temperature in sorted(temperatures, key=lambda t: float(t[1:])):
        results = joined(out, names, temperature)
        write_text(out / f"grid-{temperature}.json", json.dumps(results, indent=1) + "\n")
        pages.append(f"T={temperature[1:]}\n\n{table(results)}\n\n{task_table(results)}\n")
    write_text(out / TABLE, "\n".join(pages))


def joined(out: Path, names: Sequence[str], temperature: str) -> Json:
    """All finished cells `out/NAME` at one temperature (the folder's name, `t0`)."""
    whole: Json = {}
    for name in names:
        path = out / name / temperature / "results.json"
        if not path.exists():
            continue
        results = read_results(path)
        results["environment"].pop("platform", None)  # the kernel's name says nothing about the figures
        cell, _, seed = name.rpartition("-s")

        def renamed(run: str, cell: str = cell, seed: str = seed) -> str:
            return f"{cell}-{NAMES[run]}-s{seed}"

        counts = {task: stats["prompts"] for task, stats in results["runs"][0]["tasks"].items()}
        if whole and counts != {task: stats["prompts"] for task, stats in whole["runs"][0]["tasks"].items()}:
            raise InputError(
                f"{path.parent} was decoded on other prompts than the cells before it; delete it to redo it."
            )
        if not whole:
            whole = {**results, "runs": [results["runs"][0]], "comparisons": [], "divergences": [], "cells": {}}
            whole.pop("seed")
        whole["cells"][name] = {"seed": results["seed"], "environment": results["environment"]}
        whole["divergences"] += [{**d, "run": renamed(d["run"])} for d in results["divergences"]]
        for run in results["runs"][1:]:
            whole["runs"].append({**run, "name": renamed(run["name"]), "drafter": renamed(run["name"])})
        whole["comparisons"] += [
            {**c, "a": renamed(c["a"]), "b": renamed(c["b"])}
            for c in results["comparisons"]
            if c["a"] == "carryover" and c["b"] in ("baseline", "continued")
        ]
    return whole


def percent(comparison: Json) -> str:
    low, high = comparison["acceptance_gain_ci95"]
    if comparison["acceptance_gain"] is None or low is None:
        return "–"
    return f"{100 * comparison['acceptance_gain']:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def gains_of(results: Json, task: str) -> dict[tuple[str, str], Json]:
    return {(c["a"], c["b"]): c for c in results["comparisons"] if c["task"] == task}


def of(name: str, stage: str) -> str:
    cell, _, seed = name.rpartition("-s")
    return f"{cell}-{stage}-s{seed}"


def table(results: Json) -> str:
    """One row a cell and seed, and the mean gain over seeds of each cell."""
    length = {run["name"]: run["overall"]["acceptance_length"] for run in results["runs"]}
    gains = gains_of(results, "overall")
    head = "drafter | seed | start | continued | carryover | off | carryover / continued, % | carryover / start, %"
    lines = [f"| {head} |", "|---" * 8 + "|"]
    means: dict[str, list[tuple[float, float]]] = {}
    for name in sorted(results["cells"]):
        cell, _, seed = name.rpartition("-s")
        against = [gains[of(name, "carryover"), of(name, stage)] for stage in ("continued", "start")]
        if None not in (pair := (against[0]["acceptance_gain"], against[1]["acceptance_gain"])):
            means.setdefault(cell, []).append(pair)
        lengths = [length.get(of(name, stage)) for stage in STAGES]
        figures = ["" if value is None else f"{value:.2f}" for value in lengths]
        lines.append(f"| {cell} | {seed} | {' | '.join(figures)} | {percent(against[0])} | {percent(against[1])} |")
    for cell, pairs in means.items():
        continued, start = (f"{100 * mean(pair[i] for pair in pairs):+.1f}" for i in (0, 1))
        lines.append(f"| **{cell}** | mean of {len(pairs)} | | | | | **{continued}** | **{start}** |")
    return "\n".join(lines)


def task_table(results: Json) -> str:
    """Carryover / continued in percent of every task and cell: the mean over seeds, and each."""
    cells: dict[str, list[str]] = {}
    for name in sorted(results["cells"]):
        cells.setdefault(name.rpartition("-s")[0], []).append(name)
    rows = {}
    for task in results["runs"][0]["tasks"]:
        known = {pair: c["acceptance_gain"] for pair, c in gains_of(results, task).items()}
        rows[task] = [
            [100 * gain for name in names if (gain := known[of(name, "carryover"), of(name, "continued")]) is not None]
            for names in cells.values()
        ]
    lines = [f"| task | {' | '.join(cells)} |", "|---" * (len(cells) + 1) + "|"]
    for task, values in sorted(rows.items(), key=lambda row: -mean(row[1][0] or [0])):
        shown = [f"{mean(v):+.0f}" + (f" ({', '.join(f'{x:+.0f}' for x in v)})" if len(v) > 1 else "") if v else "–"
                 for v in values]  # fmt: skip
        lines.append(f"| {task} | {' | '.join(shown)} |")
    return "\n".join(lines)
