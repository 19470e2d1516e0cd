"""The lab: an invented language with exactly known entropy, and a small real language model trained on it.

The lab target serves wherever a real target is too slow or too big: tests, the demo, ablations. `carryover` accepts it
by the name `lab`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from ..errors import InputError
from ..files import write_text
from . import language
from .language import TASKS, Example, Rates

__all__ = ["TASKS", "Example", "Rates", "lab_prompts", "lab_reference", "lab_target_path", "write_prompts"]


def lab_target_path() -> Path:
    """The folder of the packaged target: a Hugging Face model in bf16 with tokenizer, chat template and `card.json`."""
    return Path(__file__).parent / "weights"


def lab_prompts(
    split: str, n: int, seed: int = 0, tasks: Sequence[str] | None = None, rates: Rates | None = None
) -> list[dict[str, str]]:
    """`n` different prompts as rows `{id, task, prompt, source, licence}`, the tasks in turn.

    split: `train` or `eval`, disjoint for any seeds. The same arguments give the same rows, and a larger `n` only adds
    rows at the end. Prompts do not depend on the rates of the responses, so `rates` is only checked. Raises InputError
    for an unknown split or task.
    """
    rows: list[dict[str, str]] = []
    seen: set[str] = set()
    chosen = list(tasks or TASKS)
    while len(rows) < n:
        task, number = chosen[len(rows) % len(chosen)], len(rows)
        attempt = 0
        while (example := _draw(split, task, seed, number, attempt, rates)).prompt in seen:
            attempt += 1
        seen.add(example.prompt)
        rows.append(
            {
                "id": f"lab-{split}-{seed}-{number:06d}-{attempt}",
                "task": task,
                "prompt": example.prompt,
                "source": "carryover lab language",
                "licence": "Apache-2.0",
            }
        )
    return rows


def write_prompts(out: Path, train: int = 4000, held_out: int = 400, seed: int = 0) -> tuple[Path, Path]:
    """Writes `train_prompts.jsonl` and `eval_prompts.jsonl` to the folder `out`; no prompt is in both.

    Raises InputError where one of them is there and holds other prompts.
    """
    out.mkdir(parents=True, exist_ok=True)
    paths = out / "train_prompts.jsonl", out / "eval_prompts.jsonl"
    for path, split, n in zip(paths, ("train", "eval"), (train, held_out), strict=True):
        text = "".join(json.dumps(row) + "\n" for row in lab_prompts(split, n, seed))
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise InputError(f"{path} holds other prompts than these {n}; name another --out, or delete it.")
        write_text(path, text)
    return paths


def lab_reference(row: dict[str, str], rates: Rates | None = None) -> Example:
    """The example behind a row of `lab_prompts`: a response of the grammar, its log-probability, and its telling.

    Raises InputError when the row is not one of `lab_prompts` or its prompt was changed.
    """
    try:
        lab, split, seed, number, attempt = row["id"].split("-")
        example = _draw(split, row["task"], int(seed), int(number), int(attempt), rates)
    except (KeyError, ValueError) as error:
        raise InputError(f"the row {row.get('id')!r} does not come from lab_prompts.") from error
    if lab != "lab" or example.prompt != row["prompt"]:
        raise InputError(f"the prompt of row {row['id']!r} is not the one that lab_prompts gives; make the rows again.")
    return example


def _draw(split: str, task: str, seed: int, number: int, attempt: int, rates: Rates | None) -> Example:
    return language.sample_split(split, task, random.Random(f"{split}-{task}-{seed}-{number}-{attempt}"), rates=rates)
