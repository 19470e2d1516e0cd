"""Commands that measure and explain: evaluate, diagnose, report."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import InputError
from .shared import (
    CompileOption,
    DebugOption,
    DeviceOption,
    DraftSamplingOption,
    DtypeOption,
    FrequencyOption,
    JsonOption,
    LimitOption,
    MaxNewTokensOption,
    MinNewTokensOption,
    MinPOption,
    PresenceOption,
    PromptsOption,
    RepetitionOption,
    SeedOption,
    TargetOption,
    TaskOption,
    TemperatureOption,
    TemplateOption,
    ThreadsOption,
    TopKOption,
    TopPOption,
    VllmPythonOption,
    app,
    loaded_drafter,
    loaded_target,
    proposals_of,
    quiet,
    template_options,
)


@app.command()
def evaluate(
    target: TargetOption,
    prompts: PromptsOption,
    out: Annotated[Path, typer.Option(help="Folder for results.json and trace.jsonl; a killed run goes on from it.")],
    drafter: Annotated[
        list[str] | None, typer.Option(help="Folder, hub id or packaged drafter; repeatable, baselines first.")
    ] = None,
    task: TaskOption = None,
    limit: LimitOption = None,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    repetition_penalty: RepetitionOption = 1.0,
    presence_penalty: PresenceOption = 0.0,
    frequency_penalty: FrequencyOption = 0.0,
    min_new_tokens: MinNewTokensOption = 0,
    draft_sampling: DraftSamplingOption = "probabilistic",
    max_new_tokens: MaxNewTokensOption = 256,
    seed: SeedOption = 0,
    carry_off: Annotated[bool, typer.Option("--carry-off", help="Also run carrying drafters without carry.")] = False,
    carry_rows: Annotated[
        list[int] | None, typer.Option(min=0, help="Also run them with at most so many carry rows; repeatable.")
    ] = None,
    proposals: Annotated[
        list[str] | None,
        typer.Option(help="Also run every drafter with so many proposals, fewer than trained, or auto; repeatable."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that decode together; 1 measures latency.")] = 1,
    stop_loops: Annotated[
        bool, typer.Option("--stop-loops", help="End responses that become degenerate loops.")
    ] = False,
    template: TemplateOption = "{}",
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    compile: CompileOption = False,
    engine: Annotated[
        Literal["embedded", "vllm"], typer.Option("--engine", help="What decodes: this project's engine, or vLLM.")
    ] = "embedded",
    server: Annotated[
        str | None, typer.Option(help="With --engine vllm: measure the server at this address instead; online.json.")
    ] = None,
    concurrency: Annotated[str, typer.Option(help="Of --server: how many requests at a time.")] = "1,2,4,8,16,32",
    python: VllmPythonOption = None,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Decode prompts plainly and with every drafter, interleaved: acceptance, speed, identity. Resumable."""
    from ..data.prompts import load_prompts
    from ..decode.processors import Penalties
    from ..decode.sampling import Sampling
    from ..evaluate.run import Plan
    from ..evaluate.run import evaluate as run_evaluation

    quiet()
    sampling = Sampling(temperature, top_k, top_p, min_p)
    penalties = Penalties(repetition_penalty, presence_penalty, frequency_penalty, min_new_tokens)
    options = template_options(template)
    plan = Plan(
        max_new_tokens, sampling, draft_sampling, seed, carry_off, batch_size, penalties, options, compile, stop_loops,
        tuple(carry_rows or ()), tuple(map(proposals_of, proposals or ())), engine,
    )  # fmt: skip
    if engine == "vllm" and "auto" in plan.proposals:
        raise InputError("--proposals auto is for the embedded engine; a server is started with one number.")
    asked = load_prompts(prompts, task, limit, seed)
    if server is not None:
        if engine != "vllm" or drafter:
            raise InputError("--server measures one that runs, with vLLM's client: --engine vllm, and no --drafter.")
        _online(server, target, asked, out, concurrency, plan, python, as_json)
        return
    if engine == "vllm":
        from ..vllm.serve import vllm_python

        python = vllm_python(python)  # first: loading takes a while
    elif python is not None:
        raise InputError("--python names that of an environment with vLLM, which only --engine vllm uses.")
    loaded = loaded_target(target, dtype, device)
    named = [os.path.normpath(path) for path in drafter or []]
    if len(set(named)) < len(named):
        raise InputError("a drafter is named twice; name each --drafter once.")
    drafters = {path: loaded_drafter(path, loaded) for path in named}
    if python is not None:
        from ..vllm.offline import Workers

        with Workers(out, python) as workers:
            results = run_evaluation(loaded, drafters, asked, out, plan, not as_json, workers)
    else:
        results = run_evaluation(loaded, drafters, asked, out, plan, progress=not as_json)
    if as_json:
        typer.echo(json.dumps(results, indent=1))
    else:
        _print_results(results)
        typer.echo(f"results: {out / 'results.json'}")


@app.command()
def diagnose(
    target: TargetOption,
    drafter: Annotated[str, typer.Option(help="A drafter with carry: folder or hub id.")],
    baseline: Annotated[str, typer.Option(help="Without carry, of the same block: the start, or `continued`.")],
    prompts: PromptsOption,
    out: Annotated[Path, typer.Option(help="Folder for diagnostics.json; a killed run goes on from it.")],
    task: TaskOption = None,
    limit: LimitOption = None,
    max_new_tokens: MaxNewTokensOption = 256,
    seed: SeedOption = 0,
    template: TemplateOption = "{}",
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Say why carry helps: recall with carry, without and of a baseline at the same states, and more. Resumable."""
    from rich.console import Console

    from ..data.prompts import load_prompts
    from ..evaluate.diagnose import FILE
    from ..evaluate.diagnose import diagnose as run_diagnosis
    from ..evaluate.run import Plan
    from ..report.tables import diagnostics_tables, to_rich

    quiet()
    plan = Plan(max_new_tokens, seed=seed, template=template_options(template))
    asked = load_prompts(prompts, task, limit, seed)
    loaded = loaded_target(target, dtype, device)
    pair = [(os.path.normpath(path), loaded_drafter(path, loaded)) for path in (drafter, baseline)]
    result = run_diagnosis(loaded, pair[0], pair[1], asked, out, plan, progress=not as_json)
    if as_json:
        typer.echo(json.dumps(result, indent=1))
        return
    Console().print(*(to_rich(table, title) for title, table in diagnostics_tables(result).items()), sep="\n")
    typer.echo(f"diagnostics: {out / FILE}")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder with results.json and train_log.jsonl in it or below it.")],
    debug: DebugOption = False,
) -> None:
    """Write one self-contained HTML page about a run, and print its tables."""
    from ..evaluate.results import read_results
    from ..report import write_report

    page = write_report(run)
    for path in sorted(run.rglob("results.json")):
        typer.echo(f"{path.parent}:")
        _print_results(read_results(path))
    typer.echo(f"report: {page}")


def _online(
    server: str, target: str, prompts: Any, out: Path, concurrency: str, plan: Any, python: str | None, as_json: bool
) -> None:
    from ..vllm.online import FILE, measure
    from ..vllm.serve import vllm_python

    try:
        levels = [int(level) for level in concurrency.split(",")]
    except ValueError as error:
        raise InputError(f"--concurrency must be whole numbers with commas between, got {concurrency!r}.") from error
    if min(levels) < 1:
        raise InputError(f"--concurrency must be 1 or more, got {concurrency!r}.")
    python = vllm_python(python)
    found = measure(
        server, target, prompts, out, levels, plan.max_new_tokens, plan.sampling.temperature, plan.seed, python=python
    )
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    for level in found["levels"]:
        length = level["acceptance_length"]
        typer.echo(
            f"concurrency {level['concurrency']}: {level['tokens_per_second']:.1f} tokens/s, "
            f"{level['first_token_ms_mean']:.0f} ms to the first token, {level['response_ms_mean']:.0f} ms in all"
            + ("" if length is None else f", acceptance length {length:.2f}")
        )
    typer.echo(f"results: {out / FILE}")


def _print_results(results: dict[str, Any]) -> None:
    from rich.console import Console

    from ..report import cautions
    from ..report.tables import gains_table, terminal_table, to_rich

    console = Console()
    console.print(terminal_table(results))
    gains = gains_table(results, overall_only=True)
    if gains.rows:
        console.print(to_rich(gains))
    for caution in cautions(results):
        console.print(f"note: {caution}", markup=False, highlight=False)
