"""Checkpoint folders: where they are, how their JSON and tensors are read and written. Damage is one sentence.

A folder holds `config.json` and its tensors as `model.safetensors`, or as shards with `model.safetensors.index.json`.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import InputError
from ..files import let_others_read, write_text

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PACKAGED = Path(__file__).parents[1] / "drafters"  # those that ship with this package, a folder each
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def locate(name: str | Path) -> Path:
    """The checkpoint's folder: `name` itself, a packaged drafter, or the downloaded snapshot of the hub id `name`.

    Raises InputError.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    if str(name) in packaged():
        return PACKAGED / name
    if folder.exists():
        raise InputError(f"the drafter {str(name)!r} is a file; name the folder that holds its config.json.")
    if not HUB_ID.fullmatch(str(name)):
        raise InputError(
            f"there is no drafter folder {str(name)!r}, and that is no hub id (owner/name) either, nor a packaged "
            f"drafter ({', '.join(packaged())})."
        )
    try:
        return Path(snapshot_download(str(name), allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"there is no drafter folder {str(name)!r}, and the hub did not deliver it: {reason}"
        ) from error


def packaged() -> list[str]:
    """Names of the drafters that ship with this package."""
    return sorted(path.parent.name for path in PACKAGED.glob("*/config.json"))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises InputError when the file is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path.parent} holds no {path.name}; it is no complete drafter checkpoint.") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not valid JSON ({error}); it is damaged.") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} must hold a JSON object, not {type(content).__name__}.")
    return content


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name. Raises InputError when files are missing, truncated or disagree."""
    if (folder / WEIGHTS).exists() or not (folder / INDEX).exists():
        return read_safetensors(folder / WEIGHTS)
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict):
        raise InputError(f"{folder / INDEX} has no weight_map; it is damaged.")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(index.values())):
        tensors.update(read_safetensors(folder / Path(str(shard)).name))
    if tensors.keys() != index.keys():
        name = sorted(tensors.keys() ^ index.keys())[0]
        raise InputError(f"the shards in {folder} and {INDEX} disagree about the tensor {name!r}.")
    return tensors


def read_safetensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise InputError(f"{path.parent} holds no {path.name}; a drafter's tensors must be stored as safetensors.")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}); it is truncated or damaged, so fetch it again.") from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2, sort_keys=True) + "\n")


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    part = path.with_name(path.name + ".part")
    save_file({name: t.detach().contiguous() for name, t in tensors.items()}, part, metadata={"format": "pt"})
    os.replace(part, path)
    let_others_read(path.parent)


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
