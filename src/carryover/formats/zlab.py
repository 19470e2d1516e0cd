"""z-lab checkpoints (DFlash), and SpecForge's DSpark in the same layout (read only). Source: SPEC 1.3, 1.5, 4.1, 4.3.

Flat Qwen3 config with `block_size`, `num_target_layers` and a `dflash_config`; newer files move keys between the two
places, so both are read and must agree. Layer ids are this project's own. Slots fill in unless `sample_from_anchor`.
"""

from __future__ import annotations

from typing import Any

from ..drafter.config import DrafterConfig
from ..errors import InputError
from .qwen3 import read_backbone, refuse_foreign, write_backbone

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "projector_type": (None, "dflash", "dspark"),
    "use_aux_hidden_state": (None, True),
    "attention_mode": (None, "gqa"),
}
READ = {"target_layer_ids", "mask_token_id", "block_size", "num_target_layers", "sample_from_anchor", "shift_label",
        "is_causal", "causal", "use_swa", "swa_window_size", "sliding_window", "markov_rank", "markov_head_type",
        "enable_confidence_head", "use_confidence_head", "confidence_head_with_markov", "input_embedding_scale",
        "output_multiplier", "final_logit_softcapping", "attention_sink_bias"}  # fmt: skip
TRAINING_ONLY = {"confidence_head_alpha", "num_anchors"}


def read_config(raw: dict[str, Any]) -> DrafterConfig:
    """From the parsed `config.json`. Raises InputError naming what is missing, contradictory or not supported."""
    dflash = _dflash_config(raw)
    backbone = read_backbone(raw)
    dspark = dflash.get("projector_type") == "dspark"
    sampled = _value(raw, dflash, "sample_from_anchor", "shift_label")
    return DrafterConfig(
        **backbone,
        **_window(raw, dflash, backbone),
        num_target_layers=raw.get("num_target_layers", 0),
        target_layer_ids=_value(raw, dflash, "target_layer_ids"),
        mask_token_id=_required(raw, dflash, "mask_token_id"),
        block_size=_required(raw, dflash, "block_size"),
        slots="next_token" if (dspark if sampled is None else sampled) else "fill_in",
        markov_rank=_required(raw, dflash, "markov_rank") if dspark else 0,
        markov_kind=_value(raw, dflash, "markov_head_type") or "vanilla",
        confidence=bool(_value(raw, dflash, "enable_confidence_head", "use_confidence_head")),
        confidence_with_markov=_value(raw, dflash, "confidence_head_with_markov") is not False,
    )


def write_config(config: DrafterConfig) -> dict[str, Any]:
    """The config of a z-lab DFlash checkpoint. Raises InputError for a drafter with heads that this layout lacks."""
    if config.markov_rank or config.confidence:
        raise InputError(
            "the z-lab format has no Markov or confidence head; convert to speculators or deepspec instead."
        )
    sliding = "sliding_attention" in (config.layer_types or ())
    # Sliding layers are causal inside the block unless told otherwise, full layers are not; there is no key per layer.
    causal = {"is_causal": False} if sliding and not config.sliding_causal else {}
    dflash = {
        "target_layer_ids": list(config.layer_ids),
        "mask_token_id": config.mask_token_id,
        "block_size": config.block_size,
        "sample_from_anchor": config.slots == "next_token",
        **({"causal": False} if causal else {}),
    }
    written = {
        "architectures": ["DFlashDraftModel"],
        "block_size": config.block_size,
        "dflash_config": dflash,
        **causal,
    }
    if config.num_target_layers:
        written["num_target_layers"] = config.num_target_layers
    return {**write_backbone(config), **written}


def _dflash_config(raw: dict[str, Any]) -> dict[str, Any]:
    architecture = (raw.get("architectures") or [None])[0]
    if architecture not in (None, "DFlashDraftModel", "DSparkDraftModel"):
        raise InputError(f"the drafter architecture {architecture!r} is not supported.")
    dflash = raw.get("dflash_config") or {}
    if not isinstance(dflash, dict):
        raise InputError(f"dflash_config must be an object, got {dflash!r}.")
    for key in sorted(dflash.keys() - READ - NEUTRAL.keys() - TRAINING_ONLY):
        raise InputError(f"dflash_config holds the key {key!r}, which is not understood and may change the drafter.")
    for key, neutral in NEUTRAL.items():
        if dflash.get(key) not in neutral:
            raise InputError(f"dflash_config asks for {key} = {dflash[key]!r}, which is not supported.")
    refuse_foreign(dflash)
    return dflash


def _value(raw: dict[str, Any], dflash: dict[str, Any], *names: str) -> Any:
    """The one value that these keys have in `dflash_config` and at the top level, or None."""
    found = [place[name] for place in (dflash, raw) for name in names if place.get(name) is not None]
    if any(value != found[0] for value in found):
        raise InputError(f"the drafter config gives {' / '.join(names)} twice and differently: {found}.")
    return found[0] if found else None


def _required(raw: dict[str, Any], dflash: dict[str, Any], name: str) -> Any:
    value = _value(raw, dflash, name)
    if value is None:
        raise InputError(f"the drafter config lacks {name!r} (it belongs into dflash_config).")
    return value


def _window(raw: dict[str, Any], dflash: dict[str, Any], backbone: dict[str, Any]) -> dict[str, Any]:
    """What sliding layers see: the window counts rows back from each slot, and ahead where it is not causal."""
    kinds = set(backbone["layer_types"])
    causal = _value(raw, dflash, "is_causal", "causal")
    if causal and "full_attention" in kinds:
        raise InputError("the drafter config asks for causal full-attention layers, which are not supported.")
    sliding, window = "sliding_attention" in kinds, backbone["sliding_window"]
    asked = [dflash[key] for key in ("swa_window_size", "sliding_window") if dflash.get(key)]
    if (dflash.get("use_swa") and not sliding) or (sliding and any(size != window for size in asked)):
        raise InputError(
            f"dflash_config and layer_types / sliding_window disagree about the attention window ({asked or 'use_swa'} "
            f"against {window if sliding else 'no sliding layer'})."
        )
    if sliding and window is not None and window < _required(raw, dflash, "block_size"):
        raise InputError(f"a sliding_window of {window} is narrower than the block, which is not supported.")
    return {"sliding_causal": sliding and causal is not False}
