"""speculators checkpoints (0.5 to 0.9): `dflash` and `dspark`. Source: SPEC 1.2, 1.3, 1.5, 4.2.

The backbone is nested in `transformer_layer_config`; layer ids count `hidden_states`, one more than here. Sliding
windows count back from the anchor. The number of target layers is not stored, so only `check_fits` can test the layer
ids. A reduced draft vocabulary is two tensors, `d2t` (target id minus draft id, of each draft token) and `t2d` (which
target tokens are in it), and a copy of the LM head's rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ..drafter.config import DrafterConfig
from ..errors import InputError
from ..layer_ids import LayerIds
from .qwen3 import read_backbone, write_backbone

REQUIRED = ("transformer_layer_config", "aux_hidden_state_layer_ids", "block_size", "mask_token_id")
UNDERSTOOD = {*REQUIRED, "speculators_model_type", "speculators_version", "speculators_config", "draft_vocab_size",
              "sample_from_anchor", "sliding_window_non_causal", "target_hidden_size", "markov_rank",
              "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"}  # fmt: skip
HARMLESS = {*PretrainedConfig().to_dict(), "architectures", "auto_map", "dtype", "torch_dtype", "model_type",
            "transformers_version", "tie_word_embeddings", "has_no_defaults_at_init", "initializer_range",
            "max_anchors", "proposal_speculative_tokens"}  # fmt: skip


def read_config(raw: dict[str, Any]) -> DrafterConfig:
    """From the parsed `config.json`. Raises InputError naming what is missing, unknown or not supported."""
    kind = raw.get("speculators_model_type")
    if kind not in ("dflash", "dspark"):
        raise InputError(f"speculators drafts of the type {kind!r} are not supported, only dflash and dspark.")
    for key in REQUIRED:
        if raw.get(key) is None:
            raise InputError(f"the speculators config lacks {key!r}; add it as the drafter was trained.")
    for key in sorted(raw.keys() - UNDERSTOOD - HARMLESS):
        raise InputError(
            f"the speculators config holds the key {key!r}, which is not understood and may change the drafter."
        )
    backbone = read_backbone(raw["transformer_layer_config"])
    draft_vocab_size = raw.get("draft_vocab_size") or backbone["vocab_size"]
    if kind == "dspark" and raw.get("sample_from_anchor") is None:
        raise InputError(
            "the speculators config lacks 'sample_from_anchor', and a dspark drafter read in the wrong slot convention "
            "accepts almost nothing; add true if slot 0 proposes (the training default) or false if only mask slots do."
        )
    sliding, dspark = "sliding_attention" in backbone["layer_types"], kind == "dspark"
    return DrafterConfig(
        **backbone,
        sliding_causal=sliding and not raw.get("sliding_window_non_causal", False),
        sliding_window_from_anchor=sliding,
        target_hidden_size=raw.get("target_hidden_size"),
        target_layer_ids=list(LayerIds.from_hidden_states(raw["aux_hidden_state_layer_ids"])),
        target_name=_verifier(raw) or "",
        block_size=raw["block_size"],
        mask_token_id=raw["mask_token_id"],
        draft_vocab_size=draft_vocab_size if draft_vocab_size != backbone["vocab_size"] else 0,
        slots="next_token" if raw.get("sample_from_anchor") else "fill_in",
        # a dspark key left out has the value 256, vanilla or true there (SPEC 4.2); the tensors must agree in any case
        markov_rank=raw.get("markov_rank", 256) if dspark else 0,
        markov_kind=raw.get("markov_head_type", "vanilla") if dspark else "vanilla",
        confidence=raw.get("enable_confidence_head", True) if dspark else False,
        confidence_with_markov=raw.get("confidence_head_with_markov", True) if dspark else True,
    )


def write_config(config: DrafterConfig) -> dict[str, Any]:
    """The config of a speculators 0.9 checkpoint: `dspark` with a head on top, else `dflash`."""
    dspark = bool(config.markov_rank or config.confidence)
    algorithm = "dspark" if dspark else "dflash"
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.num_proposals, "accept_tolerance": 0.0,
                "verifier_accept_k": 1}  # fmt: skip
    heads = {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_kind,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_with_markov,
    }
    same_width = config.target_hidden_size == config.hidden_size
    return {
        "architectures": ["DSparkDraftModel" if dspark else "DFlashDraftModel"],
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": config.target_name or None, "architectures": []},
        },
        "transformer_layer_config": write_backbone(config),
        "aux_hidden_state_layer_ids": config.layer_ids.to_hidden_states(),
        "target_hidden_size": None if same_width else config.target_hidden_size,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "mask_token_id": config.mask_token_id,
        "block_size": config.block_size,
        "sample_from_anchor": config.slots == "next_token",
        "sliding_window_non_causal": "sliding_attention" in (config.layer_types or ()) and not config.sliding_causal,
        "tie_word_embeddings": False,
        **(heads if dspark else {}),
    }


def read_vocabulary(tensors: dict[str, Tensor], config: DrafterConfig) -> None:
    """Replaces `d2t` and `t2d` by `draft_vocab`. Raises InputError when they are missing, not needed or disagree."""
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if not config.draft_vocab_size:
        if d2t is not None or t2d is not None:
            raise InputError("the drafter holds d2t or t2d, but its draft_vocab_size is the whole vocabulary.")
        return
    if d2t is None or d2t.shape != (config.draft_vocab_size,) or d2t.is_floating_point():
        raise InputError(
            f"the drafter's draft vocabulary of {config.draft_vocab_size} tokens needs a tensor d2t of that size."
        )
    vocabulary = torch.arange(len(d2t)) + d2t.long()
    if t2d is not None and t2d.nonzero().flatten().tolist() != vocabulary.tolist():
        raise InputError("the drafter's d2t and t2d name different tokens; the checkpoint is damaged.")
    tensors["draft_vocab"] = vocabulary


def write_vocabulary(tensors: dict[str, Tensor], config: DrafterConfig) -> None:
    """The reverse: `draft_vocab` becomes `d2t` and `t2d`."""
    vocabulary = tensors.pop("draft_vocab", None)
    if vocabulary is not None:
        tensors["d2t"] = vocabulary - torch.arange(len(vocabulary))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, vocabulary, True)


def _verifier(raw: dict[str, Any]) -> str | None:
    return ((raw.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
