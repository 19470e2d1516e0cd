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
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import yaml
from rich.console import Console
from rich.markup import escape

from .config import Recipe, Stage, StageConfig, completed
from .data.prompts import SUITES, Prompt, load_prompts
from .data.record import read_manifest, record
from .decode.sampling import Sampling
from .errors import InputError
from .evaluate.run import Plan, evaluate
from .files import Busy, alone, write_text
from .formats import decoding_drafter, load_drafter
from .formats.files import locate
from .report import grid, write_report
from .target import Target, default_device
from .train.identity import RUN, changed, differences, prepare, rows_of, run_record, stage_settings
from .train.start import start_drafter
from .train.trainer import train

STAGES: tuple[Stage, ...] = ("baseline", "continued", "carryover")
FINISHED, RECIPE = "finished", "recipe.yaml"


class Step(NamedTuple):
    """title: what it does, with its amounts; call: does what is left of it."""

    title: str
    call: Callable[[], object]


def run(
    recipe: Recipe,
    out: Path,
    console: Console | None = None,
    target: Target | None = None,
    cells: Sequence[Path] = (),
    recorded: Path | None = None,
) -> Path:
    """Runs what `out` does not hold yet and returns the path of the report page.

    cells: folders of other runs, whose stages are taken over where they would be the same. recorded: the responses of a
    grid, which the recipe names as its corpus. Raises InputError when `out` belongs to another recipe or another
    process works on it, or when the recipe names something that is not there.
    """
    console = console or Console()
    check(recipe, out, recorded)
    target = target or Target.load(recipe.target, recipe.target_dtype, default_device())
    check_start(recipe, out, target)
    out.mkdir(parents=True, exist_ok=True)
    for note in overlap(recipe):
        console.print(f"note: {note}", markup=False, highlight=False)
    with alone(out):
        write_text(out / RECIPE, recipe.to_yaml())
        for number, step in enumerate(steps(recipe, out, target, cells, console), 1):
            with announced(console, f"{number}. {step.title}"):
                step.call()
        return write_report(out)


def check(recipe: Recipe, out: Path, recorded: Path | None = None) -> None:
    """Raises InputError for what would stop a run later: better before `out` is claimed and hours are spent. Arguments
    as of `run`."""
    check_owner(out, recipe, recorded)
    plan(recipe)
    held_out(recipe)
    if not recipe.data.corpus:
        asked(recipe)
    for path in recipe.data.corpus:
        if Path(path) != recorded and not Path(path).exists():
            raise InputError(f"data.corpus names {path}, which does not exist.")
    for name in STAGES:
        settings: StageConfig = getattr(recipe.train, name)
        if settings.eval_steps and settings.eval_prompts:
            load_prompts(settings.eval_prompts)


def chosen(recipes: Mapping[str, Recipe], cells: Sequence[str]) -> list[str]:
    """Names of a grid's recipes that are one of `cells`, CELL-sSEED or CELL for all its seeds; no cells: all names.

    Raises InputError for a cell that no recipe has.
    """
    named = {name: {name, name.rpartition("-s")[0]} for name in recipes if name}
    for cell in cells:
        if not any(cell in names for names in named.values()):
            kinds = ", ".join(dict.fromkeys(name.rpartition("-s")[0] for name in named))
            seeds = ", ".join(dict.fromkeys(f"-s{name.rpartition('-s')[2]}" for name in named))
            there = f"the cells are {kinds}, each alone or with {seeds}" if named else "this recipe is no grid"
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
    finished. Several processes may share `out`: one records, and a cell that one is at is left to it by the others.

    Cells share the target, what it answered, what they are evaluated on, and stages that would be the same. Raises
    InputError where the first three differ, or as `run`.
    """
    names = list(recipes) if names is None else names
    console = console or Console()
    first = next(iter(recipes.values()))
    for name, recipe in recipes.items():
        for section in ("target", "target_dtype", "record", "evaluate"):
            if getattr(recipe, section) != getattr(first, section):
                raise InputError(f"the cell {name} changes {section}, which all cells of a grid share.")
        if recipe.data.template != first.data.template:
            raise InputError(f"the cell {name} changes data.template, which all cells of a grid share.")
    recorded = recorded_in(first, out)
    for name, recipe in recipes.items():  # all of them: they end in one table
        with of_cell(name):
            check_owner(out / name, shared_corpus(recipe, recorded), recorded)
    for name in names:
        with of_cell(name):
            check(shared_corpus(recipes[name], recorded), out / name, recorded)
    target = target or Target.load(first.target, first.target_dtype, default_device())
    for name in names:
        with of_cell(name):
            check_start(recipes[name], out / name, target)
    if unrecorded := [recipe for recipe in recipes.values() if not recipe.data.corpus]:
        one = unrecorded[0]
        before = read_manifest(recorded if recorded.suffix else recorded / of_temperature(one, 0))
        if before is not None and isinstance(before.get("seed"), int):  # another choice of seeds goes on with it
            one = one.model_copy(update={"seed": before["seed"]})
        asked(one)
        out.mkdir(parents=True, exist_ok=True)
        for note in overlap(one):
            console.print(f"note: {note}", markup=False, highlight=False)
        with announced(console, recording(one)):
            record_responses(one, target, recorded)
    for number, name in enumerate(names, 1):
        console.print(f"[bold]cell {number} of {len(names)}: {name}")
        others = [out / cell for cell in recipes if cell != name]
        try:
            with of_cell(name):
                run(shared_corpus(recipes[name], recorded), out / name, console, target, others, recorded)
        except Busy:
            console.print("another process is at it")
        grid.write(out, list(recipes))
    return out / grid.TABLE


@contextmanager
def of_cell(name: str) -> Iterator[None]:
    """Says which cell an error is about."""
    try:
        yield
    except Busy:
        raise
    except InputError as error:
        raise InputError(f"cell {name}: {error}") from error


def check_start(recipe: Recipe, out: Path, target: Target) -> None:
    """Raises InputError when the baseline is still to be trained and cannot begin as the recipe says."""
    if not finished(out / "baseline"):
        start_drafter(recipe, "baseline", target, None)


def shared_corpus(recipe: Recipe, recorded: Path) -> Recipe:
    """A cell's recipe, reading what the grid recorded."""
    if recipe.data.corpus:
        return recipe
    data = recipe.data.model_copy(update={"corpus": (str(recorded),)})
    return recipe.model_copy(update={"data": data})


def plan(recipe: Recipe, out: Path | None = None) -> list[str]:
    """What `run` would do, one line a step; nothing is loaded. out: says as well which stages are there."""
    there = [f"{name}:" for name in STAGES if out and finished(out / name)]
    titles = [step.title for step in steps(recipe, out or Path(), None)]
    return [f"{title} (there already)" if title.startswith(tuple(there)) else title for title in titles]


def plan_grid(recipes: Mapping[str, Recipe], out: Path, names: Sequence[str]) -> list[str]:
    """What `run_grid` would do: the recording, each cell with the stages that are there or that another one makes as
    well, and its steps where they are not those of the cell before."""
    unrecorded = [recipe for recipe in recipes.values() if not recipe.data.corpus]
    lines, told = [f"once: {recording(recipe)}" for recipe in unrecorded[:1]], list[str]()
    for number, name in enumerate(names):
        there = {stage for stage in STAGES if finished(out / name / stage)}
        notes = [f"{stage} is there already" for stage in STAGES if stage in there]
        for stages in (STAGES[:1], STAGES[:2]):  # `continued` depends on its baseline
            mine = [stage_settings(recipes[name], stage) for stage in stages]
            for cell in recipes if stages[-1] not in there else ():
                made = cell in names[:number] or (cell != name and finished(out / cell / stages[-1]))
                if made and [stage_settings(recipes[cell], stage) for stage in stages] == mine:
                    notes.append(f"{stages[-1]} is taken from {cell}")
                    break
        lines.append(": ".join(filter(None, (f"cell {name}", ", ".join(notes)))))
        mine_too = steps(shared_corpus(recipes[name], recorded_in(recipes[name], out)), out / name, None)
        titles = [f"  {i}. {step.title}" for i, step in enumerate(mine_too, 1)]
        lines += titles if titles != told else []
        told = titles
    return lines


def overlap(recipe: Recipe) -> list[str]:
    """A note on held-out prompts whose answers are recorded for training as well; empty where there are none, or where
    the recipe names a corpus instead of prompts."""
    try:
        mine = [] if recipe.data.corpus else asked(recipe)
        trained, asks = {tuple(prompt.turns) for prompt in mine}, held_out(recipe)
    except InputError:  # missing, which is said elsewhere
        return []
    both = sum(tuple(prompt.turns) in trained for prompt in asks)
    return [f"{both} of {len(asks)} held-out prompts are trained on as well; they flatter every drafter."] * (both > 0)


def missing(recipe: Recipe) -> list[str]:
    """The prompt files, corpora and drafters that it names and that do not exist."""
    stages: list[StageConfig] = [getattr(recipe.train, name) for name in STAGES]
    named = [*(recipe.data.corpus or recipe.record.prompts)]
    named += [stage.eval_prompts for stage in stages if stage.eval_steps and stage.eval_prompts]
    absent = [path for path in (*named, *recipe.evaluate.prompts) if path not in SUITES and not Path(path).exists()]
    start = recipe.drafter.start_drafter
    if start is not None:
        try:
            locate(start)
        except InputError:
            absent.append(start)
    return absent


def steps(
    recipe: Recipe,
    out: Path,
    target: Target | None,
    cells: Sequence[Path] = (),
    console: Console | None = None,
) -> list[Step]:
    """The steps of a recipe in order. target: None where they are only named."""
    if not recipe.evaluate.prompts:
        raise InputError("evaluate.prompts is empty; name held-out prompts, or use `record`, `train` and `evaluate`.")
    if recipe.carry.interface == "none":
        raise InputError("carry.interface is none, so there would be no carryover stage; set embedding, for example.")
    corpus = None if recipe.data.corpus else recorded_in(recipe, out)  # None: the recipe's
    what = {"baseline": "without carry", "continued": "the control, without carry", "carryover": "with carry"}
    todo = []
    if corpus is not None:
        todo.append(Step(recording(recipe), lambda: record_responses(recipe, _there(target), corpus)))
    for name in STAGES:
        start = None if name == "baseline" else out / "baseline"
        settings: StageConfig = getattr(recipe.train, name)
        length = f"{settings.steps} steps" if settings.steps else f"{settings.epochs:g} epochs"
        others = [cell / name for cell in cells]
        todo.append(Step(
            f"{name}: {what[name]}, {length} of {settings.batch_size * settings.accumulation} rows",
            lambda name=name, start=start, others=others: stage(  # type: ignore[misc]
                recipe, name, out / name, _there(target), corpus, start, others, console
            ),
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


def check_owner(out: Path, recipe: Recipe, recorded: Path | None = None) -> None:
    """Raises InputError when `out` is a file or holds a run of another recipe. recorded: as of `run`; however it is
    spelled, it is the same grid's."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; name a folder as --out.")
    path = out / RECIPE
    if path.exists() and any((out / stage).exists() for stage in STAGES):  # before, nothing depends on it
        try:
            began = completed(Recipe, yaml.safe_load(path.read_text(encoding="utf-8")))
            changed = differences(began, recipe.model_dump(mode="json"))
        except (yaml.YAMLError, UnicodeDecodeError, TypeError, AttributeError) as error:
            raise InputError(f"{path} is damaged; restore it, or delete {out}.") from error
        if recorded is not None and recipe.data.corpus == (str(recorded),):
            changed = [name for name in changed if name != "data.corpus"]
        if changed:
            raise InputError(f"{out} holds a run of another recipe ({', '.join(changed)}); name another --out.")


def recorded_in(recipe: Recipe, out: Path) -> Path:
    """Where the responses of a run lie: a file, or for several temperatures a folder with a file for each."""
    return out / ("recorded.jsonl" if isinstance(recipe.record.temperature, float) else "recorded")


def of_temperature(recipe: Recipe, i: int) -> str:
    """The name of the file with the responses at the recipe's i-th temperature."""
    assert isinstance(recipe.record.temperature, tuple)
    return f"{i + 1}-t{recipe.record.temperature[i]:g}.jsonl"


def recording(recipe: Recipe) -> str:
    r = recipe.record
    amount = f"{r.limit} prompts" if r.limit else f"the prompts of {', '.join(r.prompts)}"
    if isinstance(r.temperature, float):
        how = f"temperature {r.temperature:g}"
    else:
        how = "temperatures " + ", ".join(f"{t:g}" for t in r.temperature)
    return f"{recipe.target} answers {amount}, at most {r.max_new_tokens} tokens at {how}"


def record_responses(recipe: Recipe, target: Target, out: Path) -> None:
    """Records what `out`, see `recorded_in`, does not hold yet."""
    if isinstance(recipe.record.temperature, float):
        record_at(recipe, target, out, recipe.record.temperature, recipe.seed)
        return
    mine = [of_temperature(recipe, i) for i in range(len(recipe.record.temperature))]
    if others := sorted(
        file.name for file in out.glob("*.jsonl*") if file.name.split(".jsonl")[0] + ".jsonl" not in mine
    ):
        raise InputError(  # all files of the folder are learnt from
            f"{out} holds responses that record.temperature does not ask for ({', '.join(others)}); restore the "
            "temperatures, delete the files, or name another --out."
        )
    for name, temperature, seed in zip(mine, recipe.record.temperature, count(recipe.seed)):
        record_at(recipe, target, out / name, temperature, seed)


def record_at(recipe: Recipe, target: Target, out: Path, temperature: float, seed: int) -> None:
    r, prompts = recipe.record, asked(recipe)
    run = out.parent if isinstance(r.temperature, float) else out.parent.parent
    learnt = any(run.glob(f"{STAGES[0]}/{RUN}")) or any(run.glob(f"*/{STAGES[0]}/{RUN}"))
    before = read_manifest(out) if learnt and out.exists() else None
    if before is not None and before.get("prompts") != len(prompts):
        answered = out.read_bytes().count(b"\n")
        if answered < sum(len(prompt.turns) for prompt in prompts):  # more would change what the drafters learnt from
            raise InputError(
                f"drafters have learnt from {out}, which answers {answered} prompts, but record.prompts now gives "
                f"{len(prompts)}; restore the prompts, or name another --out."
            )
    sampling = Sampling(temperature, r.top_k, r.top_p, r.min_p)
    record(target, prompts, out, sampling, r.max_new_tokens, seed, r.batch_size, recipe.data.template, only=True)


def stage(
    recipe: Recipe,
    name: Stage,
    out: Path,
    target: Target,
    corpus: Path | None,
    start: Path | None = None,
    others: Sequence[Path] = (),
    console: Console | None = None,
) -> Path:
    """Trains a stage unless it is finished, going on from what an interrupted run left, or takes it from one of
    `others` that has the same record: the same settings, starting weights and rows.

    Raises InputError when a finished one has another record.
    """
    console = console or Console()
    if finished(out):
        if name == "baseline" and recipe.drafter.start_drafter is not None:  # which is not needed any more
            record = run_record(recipe, name, None, rows_of(recipe, target, corpus))
        else:
            record = prepare(recipe, name, target, start, corpus)[2]
        if found := changed(out, record):
            raise InputError(
                f"{out} was trained with other settings ({', '.join(found)}); name another --out, or delete "
                f"{out.parent}."
            )
        console.print("[dim]there already")
        return out
    if not out.exists():
        for other in filter(finished, others):
            if take(other, out, prepare(recipe, name, target, start, corpus)[2]):
                console.print(f"[dim]taken from {escape(str(other))}")
                return out
    train(recipe, name, out, start, resume=True, corpus=corpus, target=target)
    (out / FINISHED).touch()
    return out


def take(other: Path, out: Path, record: Mapping[str, Any]) -> bool:
    """Copies a finished stage if this is its record and its drafter is sound; without its checkpoints."""
    if not (other / RUN).exists() or changed(other, dict(record)):
        return False
    try:
        load_drafter(other)
    except InputError:
        return False
    partial = out.with_name(f"{out.name}.part")  # a copy that is cut short must not look finished
    shutil.rmtree(partial, ignore_errors=True)
    try:
        shutil.copytree(other, partial, ignore=shutil.ignore_patterns("checkpoint-*"))
        os.replace(partial, out)
    except OSError as error:  # shutil.Error is one
        shutil.rmtree(partial, ignore_errors=True)
        raise InputError(f"{other} could not be copied to {out.parent}: {error}.") from error
    return True


def finished(stage: Path) -> bool:
    """Whether the folder of a stage holds a drafter that `run` has trained to the end."""
    return (stage / FINISHED).exists()


def asked(recipe: Recipe) -> list[Prompt]:
    r = recipe.record
    return load_prompts(r.prompts, r.tasks, r.limit, recipe.seed)


def held_out(recipe: Recipe) -> list[Prompt]:
    e = recipe.evaluate
    return load_prompts(e.prompts, e.tasks, e.limit, recipe.seed)


def decode(recipe: Recipe, out: Path, target: Target, temperature: float) -> None:
    """Evaluates the three drafters at one temperature; the target's dtype is theirs as well."""
    e = recipe.evaluate
    drafters = {str(out / name): decoding_drafter(out / name, target) for name in STAGES}
    how = Plan(
        e.max_new_tokens, Sampling(temperature), e.draft_sampling, recipe.seed, e.carry_off, e.batch_size,
        template=recipe.data.template, stop_loops=e.stop_loops,
    )  # fmt: skip
    evaluate(target, drafters, held_out(recipe), out / f"t{temperature:g}", how)


@contextmanager
def announced(console: Console, title: str) -> Iterator[None]:
    """Announces a step and says how long it took."""
    console.rule(f"[bold]{escape(title)}", align="left", style="dim")
    began = monotonic()
    yield
    console.print(f"[dim]{monotonic() - began:.0f} s")
