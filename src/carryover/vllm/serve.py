"""The command that serves a target with a drafter, and what of it can be checked before anything is loaded.

The server is vLLM's own OpenAI-compatible one. Its module is started instead of the `vllm` command, which the CPU build
of vLLM lacks (that distribution is not called `vllm`, and the command asks for the version of one that is).
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoConfig

from ..embedded import located
from ..errors import InputError
from ..formats import load_drafter
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
    kv_gib: int | None = None,
    python: str | None = None,
    extra: Sequence[str] = (),
) -> Server:
    """The server of a target, plain or with a drafter. Raises InputError for a pair that vLLM cannot serve.

    device: cpu, cuda, or auto. proposals: of one round; None: as many as the drafter was trained for. kv_gib: size of
    the cache on a CPU; None: what the environment says, else 4. python: that of an environment with vLLM; None: this
    one. extra: goes to vLLM as it is.
    """
    if drafter is not None and any(part.split("=")[0] in ("--speculative-config", "-sc") for part in extra):
        raise InputError("--drafter makes the --speculative-config of vLLM; give one of the two.")
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"there is no device {device!r} for vLLM; name cpu, cuda or auto.")
    on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    path = located(target)
    command = [python or this_python(), "-m", MODULE, "--model", path, "--served-model-name", target]
    command += ["--host", host, "--port", str(port), "--dtype", dtype]
    if on_cpu:
        command.append("--enforce-eager")  # compiling takes minutes and gains nothing for small models
    if drafter is not None:
        command += ["--speculative-config", json.dumps(speculation(path, drafter, proposals, draft_sampling))]
    return Server([*command, *extra], environment(on_cpu, kv_gib))


def environment(on_cpu: bool, kv_gib: int | None = None, default_gib: int = 4) -> dict[str, str]:
    """Variables for vLLM, those that are set already left as they are unless kv_gib asks for another cache.

    On a GPU the model runner is V1, unless V2 is asked for by its variable: V1 is what was measured.
    """
    wanted = {"VLLM_CPU_KVCACHE_SPACE": str(kv_gib or default_gib)} if on_cpu else {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    chosen = {name: value for name, value in wanted.items() if name not in os.environ or (on_cpu and kv_gib)}
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and PLUGIN not in plugins.split(","):
        chosen["VLLM_PLUGINS"] = ",".join([*filter(None, plugins.split(",")), PLUGIN])
    return chosen


def speculation(target: str, drafter: str, proposals: int | None, draft_sampling: str) -> dict[str, object]:
    """vLLM's speculative config for a drafter, ours or a stock DFlash. Raises InputError where they do not fit."""
    folder = locate(drafter)
    config = load_drafter(folder).config  # its tensors as well: vLLM would find out late what is missing
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


def vllm_python(python: str | None) -> str:
    """A Python that has vLLM and this package: `python`, or this one. Raises InputError where it has not."""
    if python is None:
        return this_python()
    if shutil.which(python) is None:
        raise InputError(f"there is no Python {python!r}; name that of an environment with vLLM (`make vllm`).")
    names = ("vllm.engine", "carryover.vllm")  # in a folder above a checkout `vllm` alone would be found as well
    looked = subprocess.run(
        [python, "-c", f"from importlib.util import find_spec\nfor name in {names}: assert find_spec(name), name"],
        capture_output=True,
    )
    if looked.returncode:
        raise InputError(f"the Python {python!r} lacks vLLM or this package; `make vllm` installs both.")
    return python


def run(server: Server, host: str, port: int) -> None:
    """Becomes the server: this process is replaced, so that signals reach vLLM. Raises InputError for a taken port."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError as error:
            raise InputError(f"cannot listen at {host}:{port} ({error.strerror}); name another --port.") from error
    os.execvpe(server.command[0], server.command, {**os.environ, **server.environment})
