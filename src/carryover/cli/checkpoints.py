"""Commands about checkpoints: whether they fit, whether they compute what others recorded, other formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError
from .shared import (
    DebugOption,
    DtypeOption,
    Format,
    JsonOption,
    TargetOption,
    TemplateOption,
    app,
    loaded_target,
    quiet,
    template_options,
)


@app.command()
def check(
    drafter: Annotated[str, typer.Argument(help="Folder, hub id or packaged drafter.")],
    target: TargetOption,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Name everything in which a drafter does not fit a target; exit 1 if there is anything."""
    from ..formats import load_drafter, mismatches

    quiet()
    loaded = loaded_target(target)
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

    from ..formats.parity import run_case
    from ..report.tables import Table, to_rich

    quiet()
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

    from ..config import DataConfig
    from ..data.corpus import frequent_tokens, load_corpus
    from ..formats import load_drafter, save_drafter

    quiet()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists already and nothing is overwritten; name a new folder.")
    loaded = loaded_target(target) if target else None
    drafter = load_drafter(source, loaded, None if dtype == "auto" else getattr(torch, dtype))
    if corpus and draft_vocab is None:
        raise InputError("--corpus is what --draft-vocab counts tokens in; name --draft-vocab too.")
    if draft_vocab is not None:
        if loaded is None or not corpus:
            raise InputError("--draft-vocab counts tokens, so it needs --target and --corpus (recorded responses).")
        if draft_vocab > loaded.vocab_size:
            raise InputError(f"--draft-vocab {draft_vocab} is more than the target's {loaded.vocab_size} tokens.")
        longest = loaded.max_length
        data = DataConfig(template=template_options(template), max_length=longest, sequence_length=longest)
        dataset = load_corpus(corpus, loaded, data, quiet=True)
        drafter = drafter.restricted(frequent_tokens(dataset, loaded.vocab_size, draft_vocab, loaded.stop_ids))
    save_drafter(drafter, out, to, loaded)
    typer.echo(f"{out} holds the drafter in the {to} format")
