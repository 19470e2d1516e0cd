"""Commands that answer prompts: one conversation here, or a server of vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import InputError
from .shared import (
    CompileOption,
    DebugOption,
    DeviceOption,
    DraftedOption,
    DraftSamplingOption,
    DtypeOption,
    FrequencyOption,
    JsonOption,
    MaxNewTokensOption,
    MinNewTokensOption,
    MinPOption,
    PresenceOption,
    ProposalsOption,
    RepetitionOption,
    SeedOption,
    TargetOption,
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
def generate(
    target: TargetOption,
    prompt: Annotated[list[str], typer.Option(help="The user's message; repeat it for several turns.")],
    drafter: Annotated[
        str | None, typer.Option(help="Folder, hub id or packaged drafter; left out: plain decoding.")
    ] = None,
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
    proposals: DraftedOption = None,
    stream: Annotated[bool, typer.Option(help="Print text as it is decoded.")] = True,
    trace: Annotated[Path | None, typer.Option(help="Write the rounds here, one JSON object a line.")] = None,
    template: TemplateOption = "{}",
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    compile: CompileOption = False,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Answer a prompt, or one turn after another of a conversation, printing the text as it is decoded."""
    from dataclasses import asdict

    from ..data.chat import conversation, render_prompt
    from ..decode.conversation import Conversation
    from ..decode.engine import Engine
    from ..decode.processors import Penalties
    from ..decode.sampling import Sampling
    from ..decode.trace import Generation

    quiet()
    sampling, options = Sampling(temperature, top_k, top_p, min_p), template_options(template)
    penalties = Penalties(repetition_penalty, presence_penalty, frequency_penalty, min_new_tokens)
    if not all(turn.strip() for turn in prompt):
        raise InputError("the prompt is empty.")
    if trace is not None:
        with trace.open("a"):  # a place that cannot be written to is named before anything is decoded
            pass
    loaded = loaded_target(target, dtype, device)
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    draft = loaded_drafter(drafter, loaded) if drafter is not None else None
    if proposals is not None and draft is None:
        raise InputError("--proposals is for a drafter; name one with --drafter.")
    count = None if proposals is None else proposals_of(proposals)
    engine = Engine(
        loaded, draft, sampling, draft_sampling, carry, penalties=penalties, compile=compile, proposals=count
    )
    talk = Conversation(engine)
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
    drafter: Annotated[
        str | None, typer.Option(help="Folder, hub id or packaged drafter; left out: the target alone.")
    ] = None,
    proposals: ProposalsOption = None,
    draft_sampling: DraftSamplingOption = "greedy",
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    dtype: DtypeOption = "auto",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option("--device")] = "auto",
    kv_gib: Annotated[
        int | None,
        typer.Option("--kv-gib", min=1, help="GiB of the cache on a CPU; default: the environment's, or 4."),
    ] = None,
    python: VllmPythonOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command, and do nothing.")] = False,
    debug: DebugOption = False,
) -> None:
    """Start vLLM's OpenAI-compatible server with a drafter, carry included; more options go to vLLM as they are."""
    from ..vllm.serve import run as become
    from ..vllm.serve import server, vllm_python

    quiet()
    made = server(target, drafter, device, proposals, draft_sampling, host, port, dtype, kv_gib, python, ctx.args)
    typer.echo(str(made))
    if not dry_run:
        vllm_python(python)
        become(made, host, port)
