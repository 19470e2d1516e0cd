"""DeepSpec checkpoints (DSpark, and DFlash as a DSpark of rank 0). Source: SPEC 1.3, 3.1, 4.3.

A flat copy of the target's config with the drafter's own keys in it; slot k always predicts the next token. The tensors
include copies of the target's embedding and LM head. Drafts for Gemma are Gemma-shaped and refused.
"""

from __future__ import annotations

from typing import Any

from ..drafter.config import DrafterConfig
from ..errors import InputError
from .qwen3 import read_backbone, write_backbone

ARCHITECTURE = "Qwen3DSparkModel"
KEYS = {"num_target_layers": "num_target_layers", "target_layer_ids": "target_layer_ids", "block_size": "block_size",
        "mask_token_id": "mask_token_id", "markov_rank": "markov_rank"}  # fmt: skip


def read_config(raw: dict[str, Any]) -> DrafterConfig:
    """From the parsed `config.json`. Raises InputError naming what is missing or not supported."""
    architecture = (raw.get("architectures") or [None])[0]
    if architecture != ARCHITECTURE:
        raise InputError(
            f"DeepSpec drafts of the architecture {architecture!r} are not supported, only {ARCHITECTURE}."
        )
    for key in KEYS:
        if key not in raw:
            raise InputError(f"the DeepSpec config lacks {key!r}.")
    backbone = read_backbone(raw)
    if "sliding_attention" in backbone["layer_types"]:
        raise InputError("the DeepSpec config asks for sliding_attention layers, which DeepSpec drafts do not have.")
    return DrafterConfig(
        **backbone,
        **{ours: raw[theirs] for theirs, ours in KEYS.items()},
        slots="next_token",
        markov_kind=raw.get("markov_head_type") or "vanilla",
        confidence=bool(raw.get("enable_confidence_head")),
        confidence_with_markov=raw.get("confidence_head_with_markov") is not False,
    )


def write_config(config: DrafterConfig) -> dict[str, Any]:
    """The config of a DeepSpec checkpoint. Raises InputError for a drafter that fills in."""
    if config.slots != "next_token":
        raise InputError(
            "DeepSpec drafts predict the next token in every slot; this drafter fills in, so it cannot be one."
        )
    if "sliding_attention" in (config.layer_types or ()):
        raise InputError("DeepSpec drafts have no sliding_attention layers; convert to zlab or speculators instead.")
    return {
        **write_backbone(config),
        "architectures": [ARCHITECTURE],
        **{theirs: getattr(config, ours) for theirs, ours in KEYS.items()},
        **({"markov_head_type": config.markov_kind} if config.markov_rank else {}),
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence and config.confidence_with_markov,
    }
