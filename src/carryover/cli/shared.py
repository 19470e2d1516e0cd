"""What the commands share: how errors end, options that several take, loading what they name."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import InputError

if TYPE_CHECKING:
    from ..drafter.modeling import Drafter
    from ..target import Target

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


def _version(value: bool) -> None:
    if value:
        typer.echo(f"carryover {__version__}")
        raise typer.Exit


@app.callback()
def everywhere(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version.")
    ] = False,
) -> None:
    pass


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
    Literal["auto", "float32", "bfloat16"],
    typer.Option("--dtype", help="Of target and drafter; auto: as stored, but float32 on a CPU without bf16 units."),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, cuda:1, ...; default: a GPU where there is one.")
]
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
ProposalsOption = Annotated[
    int | None,
    typer.Option("--proposals", min=1, help="Tokens proposed in a round; default: as many as it was trained for."),
]
DraftedOption = Annotated[
    str | None,
    typer.Option(
        "--proposals",
        help="Tokens proposed in a round; auto: as many as pay, none at all if need be; default: as trained.",
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1)]


# ---- loading what options name ----
def quiet() -> None:
    """No progress bars or advice of transformers on stderr."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def loaded_target(name: str, dtype: str = "auto", device: str | None = None) -> Target:
    from ..target import Target, default_device

    return Target.load(name, dtype, device or default_device())


def loaded_drafter(path: str, target: Target) -> Drafter:
    """In the target's dtype and place, as it will be served."""
    from ..formats import decoding_drafter

    return decoding_drafter(path, target)


def proposals_of(value: str) -> Any:
    """`auto` or a number of proposals, as an `Engine` takes it. Raises InputError for anything else."""
    if value == "auto":
        return value
    if not value.isdecimal() or int(value) < 1:
        raise InputError(f"--proposals must be auto or a number of at least 1, got {value!r}.")
    return int(value)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def template_options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise InputError(f"--template must be JSON, such as '{{\"enable_thinking\": false}}', got {text!r}.") from error
    if not isinstance(options, dict):
        raise InputError(f"--template must be a JSON object, got {text!r}.")
    return options
