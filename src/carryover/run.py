"""A recipe from start to end: record, train a baseline, its control and its Carryover, decode held-out prompts, report.

A grid (a recipe with cells and seeds) is recorded once and has one such folder for each cell and seed, and
    OUT/grid.md, OUT/grid-t0.json, ...    all cells side by side (report/grid.py)

A single recipe:

    OUT/recorded.jsonl                    the target's responses, unless data.corpus names some
    OUT/{baseline,continued,carryover}    the drafters
    OUT/t0, OUT/t1, ...                   one evaluation for each of evaluate.temperatures
    OUT/report.html                       all of it on a page

Each step is finished once: the same command goes on where an interrupted run stopped.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import yaml
from rich.console import Console

from .config import Recipe, Stage, StageConfig, completed
from .data.prompts import SUITES, Prompt, load_prompts
from .data.record import record
from .decode.sampling import Sampling
from .errors import InputError
from .evaluate.run import Plan, evaluate
from .files import write_text
from .formats import load_drafter
from .formats.files import locate
from .report import grid, write_report
from .target import Target
from .train.trainer import default_device, differences, stage_settings, start_drafter, train

STAGES: tuple[Stage, ...] = ("baseline", "continued", "carryover")
FINISHED, RECIPE = "finished", "recipe.yaml"


class Step(NamedTuple):
    """title: what it does, with its amounts; call: does what is left of it."""

    title: str
    call: Callable[[], object]


def run(recipe: Recipe, out: Path, console: Console | None = None, target: Target | None = None) -> Path:
    """Runs what `out` does not hold yet and returns the path of the report page.

    Raises InputError when `out` belongs to another recipe or the recipe does not say what to evaluate.
    """
    console = console or Console()
    check_owner(out, recipe)
    plan(recipe)  # what cannot work is better known now than at the end, and than when `out` has been claimed
    held_out(recipe)
    if not recipe.data.corpus:
        asked(recipe)
    target = target or Target.load(recipe.target, recipe.target_dtype, default_device())
    check_start(recipe, out, target)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / RECIPE, recipe.to_yaml())
    for number, step in enumerate(steps(recipe, out, target), 1):
        with announced(console, f"{number}. {step.title}"):
            step.call()
    return write_report(out)


def chosen(recipes: Mapping[str, Recipe], cells: Sequence[str]) -> list[str]:
    """Names of a grid's recipes that are one of `cells`, CELL-sSEED or CELL for all its seeds; no cells: all names.

    Raises InputError for a cell that no recipe has.
    """
    named = {name: {name, name.rpartition("-s")[0]} for name in recipes if name}
    for cell in cells:
        if not any(cell in names for names in named.values()):
            there = f"the cells are {', '.join(named)}" if named else "this recipe is no grid"
            raise InputError(f"there is no cell {cell!r}; {there}.")
    return [name for name, names in named.items() if names & set(cells)] if cells else list(recipes)


def run_grid(
    recipes: Mapping[str, Recipe],
    out: Path,
    console: Console | None = None,
    target: Target | None = None,
    names: Sequence[str] | None = None,
) -> Path:
    """Runs recipes of a grid in `out/NAME`, those in `names` or all, and returns the path of the table of all that are
    finished: processes with cells of their own may share `out` once its responses are recorded.

    They share the target and what it answered, so these sections must agree, and stages that would be the same. Raises
    InputError otherwise, or as `run`.
    """
    names = list(recipes) if names is None else names
    console = console or Console()
    first = next(iter(recipes.values()))
    for name, recipe in recipes.items():
        if (recipe.target, recipe.target_dtype, recipe.record) != (first.target, first.target_dtype, first.record):
            raise InputError(f"the cell {name} changes target or record, which all cells of a grid share.")
        check_owner(out / name, shared_corpus(recipe, out))
        plan(recipe)
        held_out(recipe)
    target = target or Target.load(first.target, first.target_dtype, default_device())
    for name, recipe in recipes.items():
        check_start(recipe, out / name, target)
    if not first.data.corpus:
        asked(first)
        out.mkdir(parents=True, exist_ok=True)
        with announced(console, recording(first)):
            record_responses(first, target, out / "recorded.jsonl")
    for number, name in enumerate(names, 1):
        console.print(f"[bold]cell {number} of {len(names)}: {name}")
        share(recipes, out, name, console)
        run(shared_corpus(recipes[name], out), out / name, console, target)
        grid.write(out, list(recipes))
    return out / grid.TABLE


def share(recipes: Mapping[str, Recipe], out: Path, name: str, console: Console) -> None:
    """Copies to a cell the stages without carry that another cell has finished and that would be the same there: what
    sets cells apart is often only the carry interface."""

    def settings(cell: str, stages: Sequence[Stage]) -> list[dict[str, Any]]:
        return [stage_settings(recipes[cell], stage) for stage in stages]

    for stages in (STAGES[:1], STAGES[:2]):  # `continued` depends on its baseline
        mine = out / name / stages[-1]
        same = (cell for cell in recipes if cell != name and settings(cell, stages) == settings(name, stages))
        done = next((cell for cell in same if (out / cell / stages[-1] / FINISHED).exists()), None)
        if done is not None and not mine.exists():
            partial = mine.with_name(f"{mine.name}.part")  # a copy that is cut short must not look finished
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(out / done / stages[-1], partial, ignore=shutil.ignore_patterns("checkpoint-*"))
            os.replace(partial, mine)
            console.print(f"[dim]{stages[-1]}: the one of {done}")


def check_start(recipe: Recipe, out: Path, target: Target) -> None:
    """Raises InputError when the baseline is still to be trained and cannot begin as the recipe says."""
    if not (out / "baseline" / FINISHED).exists():
        start_drafter(recipe, "baseline", target, None)


def shared_corpus(recipe: Recipe, out: Path) -> Recipe:
    """A cell's recipe, reading what the grid recorded."""
    if recipe.data.corpus:
        return recipe
    data = recipe.data.model_copy(update={"corpus": (str(out / "recorded.jsonl"),)})
    return recipe.model_copy(update={"data": data})


def plan(recipe: Recipe) -> list[str]:
    """What `run` would do, one line a step; nothing is loaded."""
    return [step.title for step in steps(recipe, Path(), None)]


def missing(recipe: Recipe) -> list[str]:
    """The prompt files, corpora and drafters that it names and that do not exist."""
    named = recipe.data.corpus or recipe.record.prompts
    absent = [path for path in (*named, *recipe.evaluate.prompts) if path not in SUITES and not Path(path).exists()]
    start = recipe.drafter.start_drafter
    if start is not None:
        try:
            locate(start)
        except InputError:
            absent.append(start)
    return absent


def steps(recipe: Recipe, out: Path, target: Target | None) -> list[Step]:
    """The steps of a recipe in order. target: None where they are only named."""
    if not recipe.evaluate.prompts:
        raise InputError("evaluate.prompts is empty; name held-out prompts, or use `record`, `train` and `evaluate`.")
    if recipe.carry.interface == "none":
        raise InputError("carry.interface is none, so there would be no carryover stage; set embedding, for example.")
    corpus = None if recipe.data.corpus else out / "recorded.jsonl"  # None: the recipe's
    todo = []
    if corpus is not None:
        todo.append(Step(recording(recipe), lambda: record_responses(recipe, _there(target), corpus)))
    for name in STAGES:
        start = None if name == "baseline" else out / "baseline"
        settings: StageConfig = getattr(recipe.train, name)
        length = f"{settings.steps} steps" if settings.steps else f"{settings.epochs:g} epochs"
        what = {"baseline": "without carry", "continued": "the control, without carry", "carryover": "with carry"}
        todo.append(Step(
            f"{name}: {what[name]}, {length} of {settings.batch_size * settings.accumulation} rows",
            lambda name=name, start=start: stage(recipe, name, out / name, _there(target), corpus, start),  # type: ignore[misc]
        ))  # fmt: skip
    for temperature in recipe.evaluate.temperatures:
        todo.append(Step(
            f"decode held-out prompts at temperature {temperature:g}",
            lambda t=temperature: decode(recipe, out, _there(target), t),  # type: ignore[misc]
        ))  # fmt: skip
    return todo


def _there(target: Target | None) -> Target:
    assert target is not None
    return target


def check_owner(out: Path, recipe: Recipe) -> None:
    """Raises InputError when `out` is a file or holds a run of another recipe."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; name a folder as --out.")
    path = out / RECIPE
    if path.exists():
        began = completed(Recipe, yaml.safe_load(path.read_text(encoding="utf-8")))
        changed = differences(began, recipe.model_dump(mode="json"))
        if changed:
            raise InputError(f"{out} holds a run of another recipe ({', '.join(changed)}); name another --out.")


def recording(recipe: Recipe) -> str:
    r = recipe.record
    amount = f"{r.limit} prompts" if r.limit else f"the prompts of {', '.join(r.prompts)}"
    return f"{recipe.target} answers {amount}, at most {r.max_new_tokens} tokens at temperature {r.temperature:g}"


def record_responses(recipe: Recipe, target: Target, out: Path) -> None:
    r, prompts = recipe.record, asked(recipe)
    sampling = Sampling(r.temperature, r.top_k, r.top_p, r.min_p)
    record(target, prompts, out, sampling, r.max_new_tokens, recipe.seed, r.batch_size, recipe.data.template)


def stage(
    recipe: Recipe, name: Stage, out: Path, target: Target, corpus: Path | None, start: Path | None = None
) -> Path:
    """Trains a stage unless it is finished, going on from what an interrupted run left."""
    finished = out / FINISHED
    if not finished.exists():
        train(recipe, name, out, start, resume=True, corpus=corpus, target=target)
        finished.touch()
    return out


def asked(recipe: Recipe) -> list[Prompt]:
    r = recipe.record
    return load_prompts(r.prompts, r.tasks, r.limit, recipe.seed)


def held_out(recipe: Recipe) -> list[Prompt]:
    e = recipe.evaluate
    return load_prompts(e.prompts, e.tasks, e.limit, recipe.seed)


def decode(recipe: Recipe, out: Path, target: Target, temperature: float) -> None:
    """Evaluates the three drafters at one temperature; the target's dtype is theirs as well."""
    e = recipe.evaluate
    drafters = {str(out / name): load_drafter(out / name, target, target.dtype, target.device) for name in STAGES}
    how = Plan(
        e.max_new_tokens, Sampling(temperature), e.draft_sampling, recipe.seed, e.carry_off, e.batch_size,
        template=recipe.data.template, stop_loops=e.stop_loops,
    )  # fmt: skip
    evaluate(target, drafters, held_out(recipe), out / f"t{temperature:g}", how)


@contextmanager
def announced(console: Console, title: str) -> Iterator[None]:
    """Announces a step and says how long it took."""
    console.rule(f"[bold]{title}", align="left", style="dim")
    began = monotonic()
    yield
    console.print(f"[dim]{monotonic() - began:.0f} s")
