"""The command line. Thin: each command reads its options, calls one function of the package and prints what it returns.

Exit codes: 0 fine, 1 the check failed, 2 bad usage or input (one sentence on stderr; a traceback only with `--debug`),
130 interrupted. Heavy modules are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from .errors import InputError

if TYPE_CHECKING:
    from .drafter.modeling import Drafter
    from .target import Target

Stage = Literal["baseline", "continued", "carryover"]
Format = Literal["carryover", "zlab", "speculators", "deepspec"]


class Commands(TyperGroup):
    """Turns errors that a user can mend into one sentence and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            again = "the same command with the same --out goes on where it stopped (`train` with --resume)"
            typer.echo(f"interrupted; {again}.", err=True)
            raise typer.Exit(130) from None
        except BrokenPipeError:
            raise
        except (InputError, OSError) as error:
            if ctx.obj == "debug":
                raise
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=(
    "Trains, measures and serves block drafters that recycle rejected states (Carryover Drafting)."
))  # fmt: skip


def _debug(ctx: typer.Context, value: bool) -> None:
    if value:
        ctx.find_root().obj = "debug"


def _threads(value: int | None) -> int | None:
    if value is not None:
        import torch

        torch.set_num_threads(value)
    return value


DebugOption = Annotated[
    bool, typer.Option("--debug", is_eager=True, callback=_debug, help="Show the traceback of an error.")
]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, callback=_threads, help="CPU threads; default: torch's choice.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, nothing else.")]
TargetOption = Annotated[str, typer.Option("--target", help="Target model: a folder, a hub id, `smollm2` or `lab`.")]
DtypeOption = Annotated[
    Literal["auto", "float32", "bfloat16"], typer.Option("--dtype", help="Of target and drafter; auto: as stored.")
]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, ...")]
PromptsOption = Annotated[
    list[str],
    typer.Option("--prompts", help="JSONL file, folder of them, or a packaged suite; repeatable."),
]
TaskOption = Annotated[list[str] | None, typer.Option("--task", help="Only prompts of this task; repeatable.")]
LimitOption = Annotated[int | None, typer.Option("--limit", min=1, help="At most so many, spread over the tasks.")]
TemplateOption = Annotated[
    str, typer.Option("--template", help="Chat template options as JSON, for example '{\"enable_thinking\": false}'.")
]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
TopKOption = Annotated[int, typer.Option("--top-k", help="0 keeps all tokens.")]
TopPOption = Annotated[float, typer.Option("--top-p", help="1 keeps all tokens.")]
MinPOption = Annotated[float, typer.Option("--min-p", help="0 keeps all tokens.")]
RepetitionOption = Annotated[float, typer.Option("--repetition-penalty", help="1 changes nothing.")]
PresenceOption = Annotated[float, typer.Option("--presence-penalty", help="On tokens of the response, -2 to 2.")]
FrequencyOption = Annotated[float, typer.Option("--frequency-penalty", help="The same per occurrence, -2 to 2.")]
MinNewTokensOption = Annotated[int, typer.Option("--min-new-tokens", min=0, help="No end token before so many.")]
DraftSamplingOption = Annotated[
    Literal["greedy", "probabilistic"],
    typer.Option("--draft-sampling", help="How proposals are chosen above temperature 0; both are lossless."),
]
CompileOption = Annotated[
    bool, typer.Option("--compile", help="Decode with torch.compile; where that is impossible, without, after a note.")
]
VllmPythonOption = Annotated[
    str | None, typer.Option("--python", help="Python of an environment with vLLM and this package; default: this one.")
]
MaxNewTokensOption = Annotated[int, typer.Option("--max-new-tokens", min=1)]
SeedOption = Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1)]


# ---- the whole story -----------------------------------------------------------------------------------------------
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

    from .demo import FAST, DemoPlan, run_demo

    _quiet()
    run_demo(out, replace(FAST if fast else DemoPlan(), train=train))


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(help="YAML file; see recipes/.")],
    out: Annotated[Path, typer.Option(help="Run folder; an interrupted run goes on from it.")],
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override: train.baseline.steps=100.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    threads: ThreadsOption = None,
    debug: DebugOption = False,
) -> None:
    """Record, train a baseline, its control and its Carryover, decode held-out prompts with all, report. Resumable.

    A recipe with `cells` and `seeds` is a grid: all of that for each of them, and one table."""
    from .config import Recipe
    from .run import missing, plan, run_grid
    from .run import run as run_recipe

    _quiet()
    recipes = Recipe.load_grid(recipe, settings or [])
    if dry_run:
        for name, resolved in recipes.items():
            if name:
                typer.echo(f"cell {name}")
            for number, title in enumerate(plan(resolved), 1):
                typer.echo(f"{number}. {title}")
        for path in dict.fromkeys(path for resolved in recipes.values() for path in missing(resolved)):
            typer.echo(f"note: there is no {path} yet")
        return
    page = run_recipe(recipes[""], out) if "" in recipes else run_grid(recipes, out)
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
    from .lab import write_prompts
    from .lab.training import LabRecipe, train_lab

    for path in write_prompts(out, train_prompts, eval_prompts):
        typer.echo(f"prompts: {path}")
    if not prompts_only:
        train_lab(out, None if ambiguity is None else LabRecipe.retrained(ambiguity))
        typer.echo(f"the lab target: {out}")


# ---- data and training ---------------------------------------------------------------------------------------------
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
    max_new_tokens: MaxNewTokensOption = 512,
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    seed: SeedOption = 0,
    template: TemplateOption = "{}",
    engine: Annotated[Literal["transformers"], typer.Option(help="What generates the responses.")] = "transformers",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    debug: DebugOption = False,
) -> None:
    """Let the target answer prompts; its exact tokens are what drafters learn from. Resumable."""
    from .data.prompts import load_prompts
    from .data.record import record as record_responses
    from .decode.sampling import Sampling

    _quiet()
    sampling = Sampling(temperature, top_k, top_p, min_p)
    asked = load_prompts(prompts, task, limit, seed)
    loaded = _target(target, dtype, device)
    options = _template(template)
    done = record_responses(loaded, asked, out, sampling, max_new_tokens, seed, batch_size, options, engine=engine)
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
    from .config import Recipe
    from .train.trainer import train as train_stage

    _quiet()
    resolved = Recipe.load(recipe, settings or [])
    train_stage(resolved, stage, out, start, resume, corpus)
    typer.echo(f"the {stage} drafter is in {out}")


# ---- measuring -----------------------------------------------------------------------------------------------------
@app.command()
def evaluate(
    target: TargetOption,
    prompts: PromptsOption,
    out: Annotated[Path, typer.Option(help="Folder for results.json and trace.jsonl; a killed run goes on from it.")],
    drafter: Annotated[list[str] | None, typer.Option(help="Folder or hub id; repeatable, baselines first.")] = None,
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
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that decode together; 1 measures latency.")] = 1,
    stop_loops: Annotated[
        bool, typer.Option("--stop-loops", help="End responses that become degenerate loops.")
    ] = False,
    template: TemplateOption = "{}",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
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
    from .data.prompts import load_prompts
    from .decode.processors import Penalties
    from .decode.sampling import Sampling
    from .evaluate.run import Plan
    from .evaluate.run import evaluate as run_evaluation

    _quiet()
    sampling = Sampling(temperature, top_k, top_p, min_p)
    penalties = Penalties(repetition_penalty, presence_penalty, frequency_penalty, min_new_tokens)
    options = _template(template)
    plan = Plan(
        max_new_tokens, sampling, draft_sampling, seed, carry_off, batch_size, penalties, options, compile, stop_loops,
        tuple(carry_rows or ()), engine,
    )  # fmt: skip
    asked = load_prompts(prompts, task, limit, seed)
    if server is not None:
        if engine != "vllm" or drafter:
            raise InputError("--server measures one that runs, with vLLM's client: --engine vllm, and no --drafter.")
        _online(server, target, asked, out, concurrency, plan, python, as_json)
        return
    loaded = _target(target, dtype, device)
    named = [os.path.normpath(path) for path in drafter or []]
    if len(set(named)) < len(named):
        raise InputError("a drafter is named twice; name each --drafter once.")
    drafters = {path: _drafter(path, loaded) for path in named}
    if engine == "vllm":
        from .vllm.offline import Workers

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
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Say why carry helps: recall with carry, without and of a baseline at the same states, and more. Resumable."""
    from rich.console import Console

    from .data.prompts import load_prompts
    from .evaluate.diagnose import FILE
    from .evaluate.diagnose import diagnose as run_diagnosis
    from .evaluate.run import Plan
    from .report.tables import diagnostics_tables, to_rich

    _quiet()
    plan = Plan(max_new_tokens, seed=seed, template=_template(template))
    asked = load_prompts(prompts, task, limit, seed)
    loaded = _target(target, dtype, device)
    pair = [(os.path.normpath(path), _drafter(path, loaded)) for path in (drafter, baseline)]
    result = run_diagnosis(loaded, pair[0], pair[1], asked, out, plan, progress=not as_json)
    if as_json:
        typer.echo(json.dumps(result, indent=1))
        return
    Console().print(*(to_rich(table, title) for title, table in diagnostics_tables(result).items()), sep="\n")
    typer.echo(f"diagnostics: {out / FILE}")


@app.command()
def generate(
    target: TargetOption,
    prompt: Annotated[list[str], typer.Option(help="The user's message; repeat it for several turns.")],
    drafter: Annotated[str | None, typer.Option(help="Folder or hub id; left out: plain decoding.")] = None,
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
    carry: Annotated[bool, typer.Option(help="Carry rejected states, if the drafter can.")] = True,
    stream: Annotated[bool, typer.Option(help="Print text as it is decoded.")] = True,
    trace: Annotated[Path | None, typer.Option(help="Write the rounds here, one JSON object a line.")] = None,
    template: TemplateOption = "{}",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    compile: CompileOption = False,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Answer a prompt, or one turn after another of a conversation, printing the text as it is decoded."""
    from dataclasses import asdict

    from .data.chat import conversation, render_prompt
    from .decode.conversation import Conversation
    from .decode.engine import Engine
    from .decode.processors import Penalties
    from .decode.sampling import Sampling
    from .decode.trace import Generation

    _quiet()
    sampling, options = Sampling(temperature, top_k, top_p, min_p), _template(template)
    penalties = Penalties(repetition_penalty, presence_penalty, frequency_penalty, min_new_tokens)
    if not all(turn.strip() for turn in prompt):
        raise InputError("the prompt is empty.")
    if trace is not None:
        with trace.open("a"):  # a place that cannot be written to is named before anything is decoded
            pass
    loaded = _target(target, dtype, device)
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    draft = _drafter(drafter, loaded) if drafter else None
    talk = Conversation(Engine(loaded, draft, sampling, draft_sampling, carry, penalties=penalties, compile=compile))
    replies: list[str] = []
    all_rounds: list[dict[str, Any]] = []
    for _ in prompt:
        ids = render_prompt(tokenizer, conversation(prompt, replies), options)
        generation, shown = Generation(len(ids)), ""
        for _ in talk.rounds(ids, max_new_tokens, seed, generation):
            text = str(tokenizer.decode(generation.tokens, skip_special_tokens=True))
            if stream and not as_json and text.startswith(shown) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                typer.echo(text[len(shown) :], nl=False)
                shown = text
        text = str(tokenizer.decode(generation.tokens, skip_special_tokens=True))
        replies.append(text)
        rounds = generation.rounds
        all_rounds += map(asdict, rounds)
        figures = {
            "tokens": len(generation.tokens),
            "rounds": len(rounds),
            "acceptance_length": sum(len(r.committed) for r in rounds) / len(rounds) if rounds else None,
            "tokens_per_second": len(generation.tokens) / generation.seconds,
            "finish": generation.finish,
        }
        if as_json:
            typer.echo(json.dumps({"text": text, "token_ids": generation.tokens, **figures}))
            continue
        typer.echo(text[len(shown) :] if text.startswith(shown) else "")
        per_round = f", {figures['acceptance_length']:.2f} tokens per verification" if rounds else ""
        speed = f"{figures['tokens_per_second']:.1f} tokens/s"
        typer.echo(f"[{figures['tokens']} tokens in {len(rounds)} rounds{per_round}, {speed}]", err=True)
    if trace is not None:
        trace.write_text("".join(json.dumps(r) + "\n" for r in all_rounds), encoding="utf-8")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    ctx: typer.Context,
    target: TargetOption,
    drafter: Annotated[str | None, typer.Option(help="Folder or hub id; left out: the target alone.")] = None,
    proposals: Annotated[
        int | None, typer.Option(min=1, help="Tokens proposed in a round; default: as many as it was trained for.")
    ] = None,
    draft_sampling: DraftSamplingOption = "greedy",
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    dtype: DtypeOption = "auto",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option("--device")] = "auto",
    kv_gib: Annotated[int, typer.Option("--kv-gib", min=1, help="On a CPU: GiB of the cache.")] = 4,
    python: VllmPythonOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command, and do nothing.")] = False,
    debug: DebugOption = False,
) -> None:
    """Start vLLM's OpenAI-compatible server with a drafter, carry included; more options go to vLLM as they are."""
    from .vllm.serve import run as become
    from .vllm.serve import server

    _quiet()
    made = server(target, drafter, device, proposals, draft_sampling, host, port, dtype, kv_gib, python, ctx.args)
    typer.echo(str(made))
    if not dry_run:
        become(made)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder with results.json and train_log.jsonl in it or below it.")],
    debug: DebugOption = False,
) -> None:
    """Write one self-contained HTML page about a run, and print its tables."""
    from .report import read_results, write_report

    page = write_report(run)
    for path in sorted(run.rglob("results.json")):
        _print_results(read_results(path))
    typer.echo(f"report: {page}")


# ---- checkpoints ---------------------------------------------------------------------------------------------------
@app.command()
def check(
    drafter: Annotated[str, typer.Argument(help="Folder or hub id.")],
    target: TargetOption,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Name everything in which a drafter does not fit a target; exit 1 if there is anything."""
    from .formats import load_drafter, mismatches

    _quiet()
    loaded = _target(target)
    found = mismatches(load_drafter(drafter).config, loaded)
    if not found:
        try:
            load_drafter(drafter, loaded)  # also compares the embedding that some formats store
        except InputError as error:
            found = [str(error)]
    if as_json:
        typer.echo(json.dumps({"drafter": drafter, "target": target, "mismatches": found}))
    for mismatch in () if as_json else found:
        typer.echo(f"mismatch: {mismatch}")
    if found:
        raise typer.Exit(1)
    if not as_json:
        typer.echo(f"{drafter} fits {target}")


@app.command()
def parity(
    cases: Annotated[list[Path], typer.Argument(help="Folders with a recorded case of another project.")],
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Rerun recorded cases of other projects; exit 1 above 1e-4 or on any token that differs."""
    from dataclasses import asdict

    from rich.console import Console

    from .formats.parity import run_case
    from .report.tables import Table, to_rich

    _quiet()
    folders = [case for case in cases if case.is_dir() or not case.exists()]  # a pattern also finds the files beside
    if not folders:
        raise InputError(f"{cases[0]} is a file; name the folder of a recorded case.")
    results = [run_case(case) for case in folders]
    if as_json:
        typer.echo(json.dumps([{**asdict(r), "passed": r.passed} for r in results]))
    else:
        rows = [
            [
                r.name,
                f"{r.hidden_difference:.1e}",
                f"{r.logits_difference:.1e}",
                "–" if r.confidence_difference is None else f"{r.confidence_difference:.1e}",
                "equal" if r.tokens_equal else "differ",
                "passed" if r.passed else "FAILED",
            ]
            for r in results
        ]
        Console().print(to_rich(Table(("case", "max |Δ hidden|", "|Δ logits|", "|Δ confidence|", "tokens", ""), rows)))
    if not all(r.passed for r in results):
        raise typer.Exit(1)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="IN", help="Drafter folder or hub id, in any known format.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder.")],
    to: Annotated[Format, typer.Option("--to", help="Format to write.")],
    target: Annotated[str | None, typer.Option(help="Needed by deepspec and --draft-vocab.")] = None,
    draft_vocab: Annotated[
        int | None, typer.Option(min=1, help="Propose only so many tokens, the most frequent of --corpus.")
    ] = None,
    corpus: Annotated[list[str] | None, typer.Option(help="Recorded responses; repeatable.")] = None,
    template: TemplateOption = "{}",
    dtype: DtypeOption = "auto",
    debug: DebugOption = False,
) -> None:
    """Rewrite a drafter checkpoint in another format or dtype, or with a smaller draft vocabulary."""
    import torch

    from .config import DataConfig
    from .data.corpus import frequent_tokens, load_corpus
    from .formats import load_drafter, save_drafter

    _quiet()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists already and nothing is overwritten; name a new folder.")
    loaded = _target(target) if target else None
    drafter = load_drafter(source, loaded, None if dtype == "auto" else getattr(torch, dtype))
    if corpus and draft_vocab is None:
        raise InputError("--corpus is what --draft-vocab counts tokens in; name --draft-vocab too.")
    if draft_vocab is not None:
        if loaded is None or not corpus:
            raise InputError("--draft-vocab counts tokens, so it needs --target and --corpus (recorded responses).")
        if draft_vocab > loaded.vocab_size:
            raise InputError(f"--draft-vocab {draft_vocab} is more than the target's {loaded.vocab_size} tokens.")
        longest = loaded.max_length
        data = DataConfig(template=_template(template), max_length=longest, sequence_length=longest)
        dataset = load_corpus(corpus, loaded, data, quiet=True)
        drafter = drafter.restricted(frequent_tokens(dataset, loaded.vocab_size, draft_vocab, loaded.stop_ids))
    save_drafter(drafter, out, to, loaded)
    typer.echo(f"{out} holds the drafter in the {to} format")


# ---- shared --------------------------------------------------------------------------------------------------------
def _quiet() -> None:
    """No progress bars or advice of transformers on stderr."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _target(name: str, dtype: str = "auto", device: str = "cpu") -> Target:
    from .target import Target

    return Target.load(name, dtype, device)


def _drafter(path: str, target: Target) -> Drafter:
    """In the target's dtype and place, as it will be served."""
    from .formats import load_drafter

    return load_drafter(path, target, target.dtype, target.device)


def _template(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError as error:
        raise InputError(f"--template must be JSON, such as '{{\"enable_thinking\": false}}', got {text!r}.") from error
    if not isinstance(options, dict):
        raise InputError(f"--template must be a JSON object, got {text!r}.")
    return options


def _online(
    server: str, target: str, prompts: Any, out: Path, concurrency: str, plan: Any, python: str | None, as_json: bool
) -> None:
    from .vllm.online import FILE, measure

    try:
        levels = [int(level) for level in concurrency.split(",")]
    except ValueError as error:
        raise InputError(f"--concurrency must be whole numbers with commas between, got {concurrency!r}.") from error
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

    from .report import cautions
    from .report.tables import gains_table, terminal_table, to_rich

    console = Console()
    console.print(terminal_table(results))
    gains = gains_table(results, overall_only=True)
    if gains.rows:
        console.print(to_rich(gains))
    for caution in cautions(results):
        console.print(f"note: {caution}", markup=False, highlight=False)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
