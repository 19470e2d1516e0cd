"""What makes a stage of training the one it is: its part of the recipe, the drafter it starts with, and its rows.

`run.json` in a stage's folder records it. A stage is gone on with, taken for finished, or taken over from another run
only where the record is the same.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..config import (
    CarryConfig,
    CarryoverConfig,
    DataConfig,
    DrafterShape,
    Recipe,
    Stage,
    StageConfig,
    completed,
)
from ..data.corpus import PackedRows, frequent_tokens, load_corpus, pack
from ..drafter.modeling import Drafter
from ..errors import InputError
from ..files import write_text
from ..formats import check_fits
from ..formats.files import read_json
from ..target import Target
from .start import start_drafter

RUN = "run.json"


def prepare(
    recipe: Recipe, stage: Stage, target: Target, start: Path | None, corpus: Path | None
) -> tuple[Drafter, PackedRows, dict[str, Any]]:
    """What a stage begins with: the drafter, its rows, and the record of what it depends on. Arguments: of `train`."""
    drafter = start_drafter(recipe, stage, target, start)
    check_fits(drafter.config, target)
    rows = rows_of(recipe, target, corpus)
    if stage == "baseline" and drafter.config.draft_vocab_size and recipe.drafter.start_drafter is None:
        config = drafter.config
        drafter.draft_vocab = frequent_tokens(rows.dataset, config.vocab_size, config.draft_vocab_size, target.stop_ids)
    return drafter, rows, run_record(recipe, stage, drafter, rows)


def rows_of(recipe: Recipe, target: Target, corpus: Path | None) -> PackedRows:
    paths = (str(corpus),) if corpus else recipe.data.corpus
    return packed(target, paths, tuple(map(_stamp, paths)), recipe.data.model_dump_json(), recipe.seed)


@lru_cache(maxsize=1)  # the stages of a run read the same rows one after the other
def packed(target: Target, paths: tuple[str, ...], stamps: tuple[Any, ...], data: str, seed: int) -> PackedRows:
    """The rows of a corpus; stamps: what changes when its files do; data: the recipe's section, as JSON."""
    settings = DataConfig.model_validate_json(data)
    return pack(load_corpus(paths, target, settings), settings.sequence_length, seed)


def _stamp(path: str) -> tuple[int, int]:
    """What changes when a file does; zeros for one that is not there, which reading it will say."""
    if not Path(path).exists():
        return 0, 0
    status = Path(path).stat()
    return status.st_mtime_ns, status.st_size


def stage_settings(recipe: Recipe, stage: Stage) -> dict[str, Any]:
    """The part of a recipe that makes a stage what it is; the carry section only of `carryover`."""
    parts = recipe.model_dump(mode="json")
    names = ["target", "target_dtype", "seed", "drafter", "data"] + ["carry"] * (stage == "carryover")
    return {"stage": stage, **{name: parts[name] for name in names}, "train": parts["train"][stage]}


def run_record(recipe: Recipe, stage: Stage, start: Drafter | None, rows: PackedRows) -> dict[str, Any]:
    """What must not change while a run goes on: its part of the recipe, the drafter it starts with (None: whichever),
    and its rows."""
    kept = stage_settings(recipe, stage)
    kept["data"].pop("corpus")  # where rows and weights lie does not matter, what they are does
    if recipe.drafter.start_drafter is not None:
        kept["drafter"]["start"] = "a drafter"
    return {**kept, **({} if start is None else {"start": start.digest()}), "corpus": rows.digest()}


def changed(out: Path, record: dict[str, Any]) -> list[str]:
    """Dotted names of what differs between a run's record in `out`, if it has one, and the given one."""
    path = out / RUN
    if not path.exists():
        return []
    began = {name: value for name, value in read_json(path).items() if name in record}
    stage = CarryoverConfig if record["stage"] == "carryover" else StageConfig
    for name, kind in (("drafter", DrafterShape), ("carry", CarryConfig), ("data", DataConfig), ("train", stage)):
        there = began.get(name, {})
        if name in record and isinstance(there, dict):
            began[name] = {k: v for k, v in completed(kind, there).items() if k in there or k in record[name]}
    return differences(began, record)


def claim(out: Path, record: dict[str, Any]) -> None:
    """Writes the run's record to `out`, after comparing it with the one that is there."""
    if found := changed(out, record):
        raise InputError(
            f"{out} was trained with other settings ({', '.join(found)}), so going on would mix two runs; "
            "name another --out."
        )
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / RUN, json.dumps(record, indent=1) + "\n")


def differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of the values in which two nested mappings differ."""
    found = []
    for key in sorted(before.keys() | now.keys()):
        a, b = before.get(key), now.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(prefix + key)
    return found
