"""The command that serves a target with a drafter, and what of it can be checked before anything is loaded.

The server is vLLM's own OpenAI-compatible one. Its module is started instead of the `vllm` command, which the CPU build
of vLLM lacks (that distribution is not called `vllm`, and the command asks for the version of one that is).
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoConfig

from ..embedded import EMBEDDED
from ..errors import InputError
from ..formats import read_checkpoint
from ..formats.files import locate, packaged, read_json
from .checkpoint import METHOD, Shape, check_servable, is_ours

MODULE = "vllm.entrypoints.openai.api_server"
PLUGIN = "carryover"  # its name among vLLM's plugins


class Server(NamedTuple):
    """A command and what it needs in its environment."""

    command: list[str]
    environment: dict[str, str]

    def __str__(self) -> str:
        """As one types it into a shell."""
        return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in self.environment.items()), shlex.join(self.command)])


def server(
    target: str,
    drafter: str | None,
    device: str = "auto",
    proposals: int | None = None,
    draft_sampling: str = "greedy",
    host: str = "127.0.0.1",
    port: int = 8000,
    dtype: str = "auto",
    kv_gib: int = 4,
    python: str | None = None,
    extra: Sequence[str] = (),
) -> Server:
    """The server of a target, plain or with a drafter. Raises InputError for a pair that vLLM cannot serve.

    device: cpu, cuda, or auto. proposals: of one round; None: as many as the drafter was trained for. kv_gib: size of
    the cache on a CPU. python: that of an environment with vLLM; None: this one. extra: goes to vLLM as it is.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"there is no device {device!r} for vLLM; name cpu, cuda or auto.")
    on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    path = str(EMBEDDED[target]()) if target in EMBEDDED else target
    command = [python or this_python(), "-m", MODULE, "--model", path, "--served-model-name", target]
    command += ["--host", host, "--port", str(port), "--dtype", dtype]
    if on_cpu:
        command.append("--enforce-eager")  # compiling takes minutes and gains nothing for small models
    if drafter is not None:
        command += ["--speculative-config", json.dumps(speculation(path, drafter, proposals, draft_sampling))]
    return Server([*command, *extra], environment(on_cpu, kv_gib))


def environment(on_cpu: bool, kv_gib: int) -> dict[str, str]:
    """Variables for vLLM, those that are set already left as they are.

    On a GPU the model runner is V1, unless V2 is asked for by its variable: V1 is what was measured.
    """
    wanted = {"VLLM_CPU_KVCACHE_SPACE": str(kv_gib)} if on_cpu else {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    chosen = {name: value for name, value in wanted.items() if name not in os.environ}
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and PLUGIN not in plugins.split(","):
        chosen["VLLM_PLUGINS"] = ",".join([*filter(None, plugins.split(",")), PLUGIN])
    return chosen


def speculation(target: str, drafter: str, proposals: int | None, draft_sampling: str) -> dict[str, object]:
    """vLLM's speculative config for a drafter, ours or a stock DFlash. Raises InputError where they do not fit."""
    folder = locate(drafter)
    config = read_checkpoint(folder).config
    count = proposals or config.num_proposals
    if is_ours(lambda name: read_json(folder / name) if (folder / name).exists() else None):
        text = AutoConfig.from_pretrained(target).get_text_config()
        shape = Shape(text.hidden_size, text.vocab_size, text.num_hidden_layers, text.max_position_embeddings)
        check_servable(config, shape, str(text.model_type), count)
    elif config.slots != "fill_in" or config.markov_rank:
        raise InputError(
            f"the drafter {drafter!r} is in a published format and has no carry, so stock vLLM would serve it, and its "
            f"method {METHOD!r} cannot; `carryover convert {drafter} OUT --to carryover` makes one that the plugin "
            "serves."
        )
    return {
        "method": METHOD,
        "model": str(folder.resolve()) if Path(drafter).is_dir() or drafter in packaged() else drafter,
        "num_speculative_tokens": count,
        "draft_sample_method": draft_sampling,
    }


def this_python() -> str:
    if find_spec("vllm.engine" if find_spec("vllm") else "vllm") is None:
        raise InputError(
            "vLLM is not installed here; `make vllm` makes an environment with it, whose Python goes behind --python."
        )
    return sys.executable


def run(server: Server) -> None:
    """Becomes the server: this process is replaced, so that signals reach vLLM."""
    os.execvpe(server.command[0], server.command, {**os.environ, **server.environment})
