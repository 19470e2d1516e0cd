"""The Qwen3-shaped part that all published drafter configs share: sizes, RoPE, layer types.

Reading goes through transformers' own `Qwen3Config`, so that keys a file leaves out mean what they mean elsewhere, old
RoPE spellings included. What would change the drafter's function and has no field here is refused by name.
Source: SPEC 1.1, 1.4, 4.1.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import Qwen3Config

from ..drafter.config import DrafterConfig
from ..errors import InputError

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads")  # fmt: skip
OTHERS = ("head_dim", "hidden_act", "rms_norm_eps", "attention_bias", "max_position_embeddings", "initializer_range",
          "rope_parameters", "layer_types", "sliding_window")  # fmt: skip
ONLY_READ = ("rope_theta", "rope_scaling", "use_sliding_window", "max_window_layers")

# key -> the values that change nothing; any other value of it is a function this drafter does not have
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "model_type": ("qwen3",),
    "partial_rotary_factor": (None, 1, 1.0),
    "attention_sink_bias": (None, False),
    "add_swa_attention_sink_bias": (None, False),
    "attention_sinks": (None, False),
    "final_logit_softcapping": (None, 0, 0.0),
    "attn_logit_softcapping": (None, 0, 0.0),
    "input_embedding_scale": (None, 1, 1.0),
    "output_multiplier": (None, 1, 1.0),
    "query_pre_attn_scalar": (None,),
    "use_qk_norm": (None, True),
    "mlp_bias": (None, False),
    "num_experts": (None, 0),
    "quantization_config": (None,),
}


def refuse_foreign(raw: dict[str, Any]) -> None:
    """Raises InputError naming the first key whose value asks for something a block drafter here cannot do."""
    for key, neutral in NEUTRAL.items():
        if key in raw and raw[key] not in neutral:
            raise InputError(f"the drafter config asks for {key} = {raw[key]!r}, which is not supported.")


def read_backbone(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of `DrafterConfig` that describe the backbone. Raises InputError naming what is missing or foreign."""
    refuse_foreign(raw)
    for key in SIZES:
        if key not in raw:
            raise InputError(f"the drafter config lacks {key!r}.")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    thetas = {raw["rope_theta"]} if "rope_theta" in raw else set()
    thetas |= {rope["rope_theta"]} if "rope_theta" in rope else set()
    if len(thetas) != 1:
        found = f"gives two ({sorted(thetas)})" if thetas else "gives none"
        raise InputError(f"the drafter config must give one rope_theta, but it {found}.")
    try:
        parsed = Qwen3Config(**deepcopy({k: raw[k] for k in (*SIZES, *OTHERS, *ONLY_READ) if k in raw}))
    except (TypeError, ValueError, KeyError, AttributeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"the drafter config is not a Qwen3 configuration: {reason}") from error
    return {key: getattr(parsed, key) for key in (*SIZES, *OTHERS)}


def write_backbone(config: DrafterConfig) -> dict[str, Any]:
    """A Qwen3 configuration, with RoPE in the spelling of transformers 5 and in the older one."""
    sliding = "sliding_attention" in (config.layer_types or ())
    rope = dict(config.rope_parameters or {})
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    return {
        "model_type": "qwen3",
        **{key: getattr(config, key) for key in (*SIZES, *OTHERS)},
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "use_sliding_window": sliding,
        "sliding_window": config.sliding_window if sliding else None,
        "max_window_layers": config.num_hidden_layers,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    }
