"""Commands that make data and drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .shared import (
    DebugOption,
    DeviceOption,
    DtypeOption,
    FrequencyOption,
    LimitOption,
    MaxNewTokensOption,
    MinNewTokensOption,
    MinPOption,
    PresenceOption,
    PromptsOption,
    RepetitionOption,
    SeedOption,
    Stage,
    TargetOption,
    TaskOption,
    TemperatureOption,
    TemplateOption,
    ThreadsOption,
    TopKOption,
    TopPOption,
    app,
    loaded_target,
    quiet,
    template_options,
)


@app.command()
def record(
    target: TargetOption,
    prompts: PromptsOption,
    out: Annotated[Path, typer.Option(help="JSONL file; what it already holds is kept and skipped.")],
    task: TaskOption = None,
    limit: LimitOption = None,
    temperature: TemperatureOption = 0.7,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    repetition_penalty: RepetitionOption = 1.0,
    presence_penalty: PresenceOption = 0.0,
    frequency_penalty: FrequencyOption = 0.0,
    min_new_tokens: MinNewTokensOption = 0,
    max_new_tokens: MaxNewTokensOption = 512,
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    seed: SeedOption = 0,
    template: TemplateOption = "{}",
    engine: Annotated[Literal["transformers"], typer.Option(help="What generates the responses.")] = "transformers",
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    debug: DebugOption = False,
) -> None:
    """Let the target answer prompts; its exact tokens are what drafters learn from. Resumable."""
    from ..data.prompts import load_prompts
    from ..data.record import record as record_responses
    from ..decode.processors import Penalties
    from ..decode.sampling import Sampling

    quiet()
    sampling = Sampling(temperature, top_k, top_p, min_p)
    penalties = Penalties(repetition_penalty, presence_penalty, frequency_penalty, min_new_tokens)
    asked = load_prompts(prompts, task, limit, seed)
    loaded = loaded_target(target, dtype, device)
    options = template_options(template)
    done = record_responses(
        loaded, asked, out, sampling, max_new_tokens, seed, batch_size, options, engine=engine, penalties=penalties
    )
    typer.echo(f"{out}: {done.written} responses written, {done.found} were there, {done.too_long} prompts too long")


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="YAML file; see recipes/.")],
    stage: Annotated[Stage, typer.Option(help="continued and carryover go on from --start.")],
    out: Annotated[Path, typer.Option(help="Folder for the drafter, its checkpoints and train_log.jsonl.")],
    start: Annotated[Path | None, typer.Option(help="The drafter that continued and carryover start from.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
    corpus: Annotated[Path | None, typer.Option(help="Recorded responses; overrides data.corpus.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override: train.baseline.steps=100.")] = None,
    threads: ThreadsOption = None,
    debug: DebugOption = False,
) -> None:
    """Train one stage of a recipe."""
    from ..config import Recipe
    from ..train.trainer import train as train_stage

    quiet()
    resolved = Recipe.load(recipe, settings or [])
    train_stage(resolved, stage, out, start, resume, corpus)
    typer.echo(f"the {stage} drafter is in {out}")
