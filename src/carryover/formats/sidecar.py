"""What a published format cannot say about one of our drafters, in a subfolder of the same checkpoint.

`carryover/config.json` holds the carry interface and the target's identity, `carryover/carry.safetensors` the carry
weights. Loaders of other projects read only the folder's top level, so they find a plain drafter. Source: SPEC 4.4.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from ..drafter.config import DrafterConfig
from ..errors import InputError
from .files import read_json, read_safetensors, write_json, write_safetensors

FOLDER, WEIGHTS, PREFIX = "carryover", "carry.safetensors", "carry."
HINT = "carry_hint"  # a field of drafters with token hints only
FIELDS = ("carry", "carry_site", "carry_projector", "target_name", "target_fingerprint", "num_target_layers")


def _fields(carry: Any) -> tuple[str, ...]:
    return (*FIELDS, HINT) if carry == "hint" else FIELDS


def read(folder: Path, config: DrafterConfig) -> dict[str, Tensor]:
    """Completes `config` from the sidecar in `folder`, if there is one, and returns the carry weights.

    Raises InputError when the sidecar is damaged or contradicts the checkpoint it lies in.
    """
    side = folder / FOLDER
    if not side.is_dir():
        return {}
    settings = read_json(side / "config.json")
    fields = _fields(settings.get("carry"))
    if set(settings) != set(fields):
        odd = sorted(set(settings) ^ set(fields))[0]
        raise InputError(f"{side / 'config.json'} must hold exactly {', '.join(fields)}; the difference is {odd!r}.")
    layers, stated = settings["num_target_layers"], config.num_target_layers
    if stated and layers != stated:
        raise InputError(
            f"{side / 'config.json'} says num_target_layers {layers}, the checkpoint around it says {stated}."
        )
    for field in fields:
        setattr(config, field, settings[field])
    tensors = read_safetensors(side / WEIGHTS) if (side / WEIGHTS).exists() else {}
    for name in tensors:
        if not name.startswith(PREFIX):
            raise InputError(f"{side / WEIGHTS} holds the tensor {name!r}, which is no carry weight.")
    return tensors


def write(folder: Path, config: DrafterConfig, tensors: dict[str, Tensor]) -> None:
    """Writes the sidecar of a checkpoint in `folder`; tensors: the carry weights, maybe none."""
    side = folder / FOLDER
    side.mkdir()
    settings: dict[str, Any] = {field: getattr(config, field) for field in _fields(config.carry)}
    write_json(side / "config.json", settings)
    if tensors:
        write_safetensors(side / WEIGHTS, tensors)
