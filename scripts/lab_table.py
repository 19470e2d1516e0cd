"""Joins the cells of scripts/lab_grid.sh into the results of record and prints the table of docs/lab.md.

    python scripts/lab_table.py runs/lab docs/results      writes lab.json (T=0) and lab-t1.json (T=1)

The format is that of results.json; runs are named DRAFTER-bBLOCK-STAGE-sSEED, stage one of start, continued, carryover,
carryover-off, and the comparisons are carryover / continued and carryover / start of the same drafter, block and seed.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from statistics import mean
from typing import Any

CELL = re.compile(r"(?P<drafter>\w+)-b(?P<block>\d+)-s(?P<seed>\d+)")
OFF = "carryover (carry off)"
NAMES = {"baseline": "start", "continued": "continued", "carryover": "carryover", OFF: "carryover-off"}
Json = dict[str, Any]


def joined(folder: Path, temperature: str) -> Json | None:
    """All finished cells at one temperature; None if there is none."""
    whole: Json | None = None
    for path in sorted(folder.glob(f"*-b*-s*/t{temperature}/results.json")):
        cell = CELL.fullmatch(path.parts[-3])
        if cell is None:
            continue
        results = json.loads(path.read_text())
        results["environment"].pop("platform", None)  # the kernel's name says nothing about the figures

        def name(run: str, cell: re.Match[str] = cell) -> str:
            return f"{cell['drafter']}-b{cell['block']}-{NAMES[run]}-s{cell['seed']}"

        if whole is None:
            whole = {**results, "runs": [results["runs"][0]], "comparisons": [], "divergences": [], "cells": {}}
            whole.pop("seed")
        whole["cells"][path.parts[-3]] = {"seed": results["seed"], "environment": results["environment"]}
        whole["divergences"] += [{**d, "run": name(d["run"])} for d in results["divergences"]]
        for run in results["runs"][1:]:
            whole["runs"].append({**run, "name": name(run["name"]), "drafter": name(run["name"])})
        whole["comparisons"] += [
            {**c, "a": name(c["a"]), "b": name(c["b"])}
            for c in results["comparisons"]
            if c["a"] == "carryover" and c["b"] in ("baseline", "continued")
        ]
    return whole


def percent(comparison: Json) -> str:
    low, high = comparison["acceptance_gain_ci95"]
    return f"{100 * comparison['acceptance_gain']:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def table(results: Json) -> str:
    """One row a cell, and the mean gain over seeds of each drafter and block."""
    length = {run["name"]: run["overall"]["acceptance_length"] for run in results["runs"]}
    gains = {(c["a"], c["b"]): c for c in results["comparisons"] if c["task"] == "overall"}
    head = "drafter | seed | start | continued | carryover | off | carryover / continued, % | carryover / start, %"
    lines = [f"| {head} |", "|---" * 8 + "|"]
    means: dict[str, list[tuple[float, float]]] = {}
    for cell in results["cells"]:
        kind, seed = cell.rsplit("-s", 1)
        start, continued, carryover, off = (
            f"{kind}-{stage}-s{seed}" for stage in ("start", "continued", "carryover", "carryover-off")
        )
        against = gains[carryover, continued], gains[carryover, start]
        means.setdefault(kind, []).append((against[0]["acceptance_gain"], against[1]["acceptance_gain"]))
        figures = " | ".join(f"{length[run]:.2f}" for run in (start, continued, carryover, off))
        lines.append(f"| {kind} | {seed} | {figures} | {percent(against[0])} | {percent(against[1])} |")
    for kind, pairs in means.items():
        shown = " | ".join(f"{100 * mean(p[i] for p in pairs):+.1f}" for i in (0, 1))
        lines.append(f"| **{kind}** | mean of {len(pairs)} | | | | | **{shown.replace(' | ', '** | **')}** |")
    return "\n".join(lines)


def main() -> None:
    folder, out = map(Path, sys.argv[1:3])
    out.mkdir(parents=True, exist_ok=True)
    for temperature, name in (("0", "lab.json"), ("1", "lab-t1.json")):
        results = joined(folder, temperature)
        if results is not None:
            (out / name).write_text(json.dumps(results, indent=1) + "\n")
            print(f"T={temperature}\n\n{table(results)}\n")


if __name__ == "__main__":
    main()
