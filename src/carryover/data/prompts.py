"""Prompts: what targets are asked, for recording and for evaluation.

A prompt file is JSONL (or .jsonl.gz, or a folder of them), one object a line: `prompt` (text) or `turns` (a list of
user texts), and optionally `id`, `task`, `source`, `licence`. Evaluation prompts are never trained on.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from .jsonl import jsonl_files, read_jsonl

Paths = str | Path | Sequence[str | Path]
OVERALL = "overall"  # what results call all tasks together
# Suites that ship with the package, by name.
SUITES = {f.name.removesuffix("_prompts.jsonl"): f for f in sorted(Path(__file__).parent.glob("*_prompts.jsonl"))}


@dataclass(frozen=True)
class Prompt:
    """turns: user texts, mostly one; the target answers each before the next is asked."""

    id: str
    task: str
    turns: list[str]
    source: str = ""
    licence: str = ""


def load_prompts(
    paths: Paths, tasks: Sequence[str] | None = None, limit: int | None = None, seed: int = 0
) -> list[Prompt]:
    """Reads prompts from files, folders or packaged suites, in file order.

    tasks: only these. limit: at most so many, spread evenly over the tasks and drawn by `seed`. Without `id` a prompt
    is called FILE:LINE, without `task` it belongs to FILE. Raises InputError, with file and line, for what cannot be
    used.
    """
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}
    suites = ", ".join(SUITES)
    for path in [paths] if isinstance(paths, str | Path) else paths:
        if str(path) not in SUITES and not Path(path).exists():
            of_lab = Path(path).name in ("train_prompts.jsonl", "eval_prompts.jsonl")
            hint = f" `carryover lab --prompts-only --out {Path(path).parent}` writes the lab's." if of_lab else ""
            raise InputError(f"there is no file or folder {path}, and no packaged suite of that name ({suites}).{hint}")
        for file in jsonl_files(SUITES.get(str(path), Path(path))):
            for where, record in read_jsonl(file):
                prompt = _prompt(where, record, file)
                if prompt.id in seen:
                    raise InputError(f"{where} repeats the id {prompt.id!r} of {seen[prompt.id]}; ids must be unique.")
                seen[prompt.id] = where
                prompts.append(prompt)
    if not prompts:
        raise InputError(f"there are no prompts in {paths}.")
    known = sorted({prompt.task for prompt in prompts})
    if unknown := sorted(set(tasks or ()) - set(known)):
        raise InputError(f"there are no prompts of task {unknown[0]!r}; the tasks are {', '.join(known)}.")
    if tasks:
        prompts = [prompt for prompt in prompts if prompt.task in tasks]
    return prompts if limit is None or limit >= len(prompts) else _balanced(prompts, limit, seed)


def _prompt(where: str, record: dict[str, Any], file: Path) -> Prompt:
    stem = file.name.split(".jsonl")[0]
    turns = record["turns"] if "turns" in record else [record.get("prompt")]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise InputError(f"{where} needs `prompt` (text) or `turns` (a list of texts).")
    if not all(turn.strip() for turn in turns):
        raise InputError(f"{where} has an empty prompt; remove the line or fill it in.")
    try:
        "".join(turns).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where} holds half a character (a lone surrogate), which is no text.") from error
    text = {key: str(record[key]) for key in ("id", "task", "source", "licence") if record.get(key) is not None}
    name, task = text.get("id") or f"{stem}:{where.rpartition(':')[2]}", text.get("task") or stem
    if task == OVERALL:
        raise InputError(f"{where} has the task {OVERALL!r}, which is the name of all tasks together; give it another.")
    return Prompt(name, task, turns, text.get("source", ""), text.get("licence", ""))


def _balanced(prompts: list[Prompt], limit: int, seed: int) -> list[Prompt]:
    """`limit` prompts, one of each task in turn, each task's in random order; the result in file order."""
    by_task: dict[str, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_task[prompt.task].append(index)
    for task, indices in by_task.items():
        random.Random(f"{seed}:{task}").shuffle(indices)
    ranked = sorted((rank, task, index) for task, indices in by_task.items() for rank, index in enumerate(indices))
    return [prompts[index] for index in sorted(index for _, _, index in ranked[:limit])]
