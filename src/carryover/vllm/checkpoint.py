"""Which drafters the plugin serves, how vLLM sees their configuration, and the settings it cannot serve them with.

A folder in this project's own format is the plugin's in any case, because nobody else can read it. A folder in a
published format is the plugin's when its sidecar names a carry interface; without one, stock vLLM serves it exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import Qwen3Config

from ..drafter.config import DrafterConfig
from ..errors import InputError
from ..formats import read_checkpoint, shape_mismatches, sidecar
from ..formats.files import locate
from ..formats.qwen3 import write_backbone

ARCHITECTURE = "DFlashCarryover"  # vLLM puts DFlash before any other name of a drafter of the method `dflash`
STORED_ARCHITECTURE = "Drafter"  # what checkpoints of this project's own format say
METHOD = "dflash"
KEY = "carryover"  # the attribute of vLLM's configuration that holds ours


class Shape(NamedTuple):
    """The target as far as a drafter must fit it; see `formats.Shape`."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    max_length: int


def is_ours(read: Callable[[str], dict[str, Any] | None]) -> bool:
    """Whether the plugin serves a drafter. read: its JSON files by name, None for one that is not there."""
    if (read("config.json") or {}).get("model_type") == DrafterConfig.model_type:
        return True
    return (read(f"{sidecar.FOLDER}/config.json") or {"carry": "none"}).get("carry") != "none"


def served_config(config: DrafterConfig) -> Qwen3Config:
    """The drafter as vLLM's DFlash code reads it: a Qwen3 with the z-lab keys, and all of it under `carryover`."""
    raw = {
        **write_backbone(config),
        "architectures": [ARCHITECTURE],
        "dflash_config": {"target_layer_ids": list(config.layer_ids), "mask_token_id": config.mask_token_id},
        "block_size": config.block_size,
        KEY: config.to_dict(),
    }
    return Qwen3Config.from_dict(raw)


def drafter_config(hf_config: Any) -> DrafterConfig | None:
    """The drafter's own configuration out of vLLM's; None for anybody else's drafter."""
    stored = getattr(hf_config, KEY, None)
    return None if stored is None else DrafterConfig.from_dict(dict(stored)).checked()


def load(model: str) -> DrafterConfig:
    """Reads the configuration of a drafter that `is_ours`. Raises InputError."""
    return read_checkpoint(locate(model)).config


def check_servable(config: DrafterConfig, target: Shape, family: str, proposals: int) -> None:
    """Raises InputError naming the first reason why vLLM cannot run this drafter as it was trained.

    target, family: the target's shape and transformers model type. proposals: `num_speculative_tokens`.
    """
    found = shape_mismatches(config, target)
    if found:
        raise InputError(f"the drafter does not fit the target: {'; '.join(found)}.")
    if proposals > config.num_proposals:
        raise InputError(
            f"num_speculative_tokens is {proposals}, but the drafter was trained to propose {config.num_proposals}."
        )
    if config.carry == "hint":
        raise InputError("the drafter takes token hints instead of carry rows, which vLLM's proposer does not give.")
    if "sliding_attention" in (config.layer_types or ()):
        raise InputError(
            "the drafter has sliding_attention layers, whose window vLLM counts in cache rows and not in positions, so "
            "carry rows would shift it; only full_attention drafters can be served with the plugin."
        )
    if family.startswith("gemma"):
        raise InputError(
            f"targets of the family {family!r} scale their embedding or cap their logits, which vLLM's DFlash does not "
            "do for its drafter; they are not supported in vLLM yet."
        )
