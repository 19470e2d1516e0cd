"""Prompts by name: files, folders and packaged suites as everywhere, and the lab's own two suites, which are generated."""

from __future__ import annotations

from collections.abc import Sequence

from ..data.prompts import Prompt, load_prompts
from ..errors import InputError
from . import lab_prompts

SPLITS = {"lab-train": "train", "lab-eval": "eval"}
GENERATED = 400  # prompts of a generated suite when no limit says otherwise


def load_suites(
    names: Sequence[str], tasks: Sequence[str] | None = None, limit: int | None = None, seed: int = 0
) -> list[Prompt]:
    """`load_prompts`, which also knows `lab-train` and `lab-eval` (disjoint for all seeds), each a suite of its own."""
    if not set(names) & set(SPLITS):
        return load_prompts(names, tasks, limit, seed)
    if len(names) > 1:
        raise InputError(f"{', '.join(sorted(set(names) & set(SPLITS)))} cannot be mixed with other prompts.")
    rows = lab_prompts(SPLITS[names[0]], limit or GENERATED, seed, tasks)
    return [Prompt(row["id"], row["task"], [row["prompt"]], row["source"], row["licence"]) for row in rows]
