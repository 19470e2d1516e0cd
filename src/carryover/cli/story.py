"""Commands that do everything in one go: the demo, recipes, the lab target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .shared import (
    DebugOption,
    ThreadsOption,
    app,
    quiet,
)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Run folder; an interrupted demo goes on from it.")] = Path("runs/demo"),
    train: Annotated[bool, typer.Option("--train", help="Make a drafter of the lab target first.")] = False,
    fast: Annotated[bool, typer.Option("--fast", help="A few steps of each; the figures mean nothing.")] = False,
    threads: ThreadsOption = None,
    debug: DebugOption = False,
) -> None:
    """Decode on the embedded targets, plainly and with packaged drafters; ends in tables and an HTML page.

    With --train: record, train a baseline, its control and its Carryover first, on the lab target."""
    from dataclasses import replace

    from ..demo import FAST, DemoPlan, run_demo

    quiet()
    run_demo(out, replace(FAST if fast else DemoPlan(), train=train))


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(help="YAML file; see recipes/.")],
    out: Annotated[Path, typer.Option(help="Run folder; an interrupted run goes on from it.")],
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override: train.baseline.steps=100.")] = None,
    cells: Annotated[
        list[str] | None, typer.Option("--cell", help="Of a grid only this cell, as CELL-sSEED or CELL; repeatable.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    threads: ThreadsOption = None,
    debug: DebugOption = False,
) -> None:
    """Record, train a baseline, its control and its Carryover, decode held-out prompts with all, report. Resumable.

    A recipe with `cells` and `seeds` is a grid: all of that for each of them, and one table."""
    from ..config import Recipe
    from ..run import check_owner, chosen, missing, overlap, plan, plan_grid, recorded_in, run_grid, shared_corpus
    from ..run import run as run_recipe

    quiet()
    recipes = Recipe.load_grid(recipe, settings or [])
    names = chosen(recipes, cells or [])
    if dry_run:
        for name in names:
            resolved = recipes[name]
            recorded = recorded_in(resolved, out) if name else None
            check_owner(out / name, shared_corpus(resolved, recorded) if recorded else resolved, recorded)
        if "" in recipes:
            steps = [f"{number}. {title}" for number, title in enumerate(plan(recipes[""], out), 1)]
        else:
            steps = plan_grid(recipes, out, names)
        typer.echo("\n".join(steps))
        for path in dict.fromkeys(path for name in names for path in missing(recipes[name])):
            typer.echo(f"note: there is no {path} yet")
        for note in dict.fromkeys(note for name in names for note in overlap(recipes[name])):
            typer.echo(f"note: {note}")
        return
    page = run_recipe(recipes[""], out) if "" in recipes else run_grid(recipes, out, names=names)
    typer.echo(f"the report: {page}")


@app.command()
def lab(
    out: Annotated[Path, typer.Option(help="Folder for prompts, model and training checkpoint.")] = Path("runs/lab"),
    prompts_only: Annotated[bool, typer.Option("--prompts-only", help="The packaged target `lab` is enough.")] = False,
    train_prompts: Annotated[int, typer.Option(min=1)] = 4000,
    eval_prompts: Annotated[int, typer.Option(min=1)] = 400,
    ambiguity: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Scale the rates of choice, training on from the packaged target (minutes)."),
    ] = None,
    threads: ThreadsOption = None,
    debug: DebugOption = False,
) -> None:
    """Write prompts of the lab language and train the lab target, reproducibly; goes on where it was interrupted."""
    from ..lab import write_prompts
    from ..lab.training import LabRecipe, train_lab

    for path in write_prompts(out, train_prompts, eval_prompts):
        typer.echo(f"prompts: {path}")
    if not prompts_only:
        train_lab(out, None if ambiguity is None else LabRecipe.retrained(ambiguity))
        typer.echo(f"the lab target: {out}")
