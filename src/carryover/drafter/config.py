"""Everything that defines a drafter's function, stored in its checkpoint and nowhere left to a silent default.

Letters: `B` block rows, `P` proposals, `D` hidden size, `M` captured target layers, `L` target layers, `V` vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, Literal, get_args

from transformers import PretrainedConfig
from transformers.activations import ACT2FN

from ..errors import InputError
from ..layer_ids import LayerIds

Slots = Literal["fill_in", "next_token"]
MarkovKind = Literal["vanilla", "gated", "rnn"]
Carry = Literal["none", "plain", "embedding", "projector", "hint"]
Hint = Literal["rejected_tokens", "target_top1"]
CarrySite = Literal["pre_norm", "post_norm"]
Projector = Literal["fc_copy", "bottleneck"]

# Keys that transformers writes or passes besides the fields; anything else is a mistake or another version's setting.
FRAMEWORK_KEYS = {"model_type", "auto_map", "_name_or_path", "name_or_path", "torch_dtype", "output_attentions",
                  "attn_implementation", "use_cache", "experts_implementation", "_commit_hash"}  # fmt: skip
ROPE_TYPES = ("default", "linear", "yarn", "llama3")  # those whose angles depend on nothing but the position
COUNTS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "head_dim", "block_size", "max_position_embeddings", "target_hidden_size")  # fmt: skip


class DrafterConfig(PretrainedConfig):
    """A block drafter: a Qwen3-shaped backbone over fused target features, an optional Markov head, a carry interface.

    slots: which proposal slot k of the query block makes (SPEC 1.3). `fill_in`: slot k >= 1 predicts position
        anchor + k, slot 0 (the anchor's own) predicts nothing, so P = B - 1. `next_token`: slot k predicts
        anchor + k + 1, so P = B.
    rope_parameters: in the form of transformers 5 (`rope_type`, `rope_theta`, ...); heads rotate whole (SPEC 1.4).
    target_layer_ids: captured target layers, z-lab numbering (see `LayerIds`). num_target_layers: of how many; 0
        where the checkpoint's format does not say (speculators), and then only `formats.check_fits` can tell whether
        they exist.
    mask_token_id: the input of every slot but the first; an existing row of the target's embedding.
    draft_vocab_size: 0 if any token can be proposed, else how many can; the tensor `draft_vocab` says which.
    markov_rank: 0 for DFlash (slots independent given the context), else the rank of the first-order head (SPEC 3.1).
    carry: how rejected rows enter the context. `none`: never; `plain`: as they are; `embedding`: marked by one learned
        vector; `projector`: through their own fusion instead of `fc`; `hint`: never, but tokens of the last
        verification enter the embeddings of the block (SPEC 7).
    carry_hint: which tokens: the rejected ones themselves, or the target's first choice behind each.
    carry_site: where that vector is added: after `fc` and before the norm (the same function as before `fc`), or after
        the norm.
    layer_types, sliding_window, sliding_window_from_anchor, sliding_causal: `full_attention` layers see all context
        and the whole block; `sliding_attention` layers see a window, and only earlier slots where sliding_causal
        (SPEC 1.5).
    target_name, target_fingerprint: the target it was trained for; empty in converted public checkpoints.
    """

    model_type = "carryover_drafter"
    default_theta = 1e6

    vocab_size: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rope_parameters: dict | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    sliding_window_from_anchor: bool = False
    sliding_causal: bool = False
    tie_word_embeddings: bool = False

    target_hidden_size: int | None = None
    num_target_layers: int = 0
    target_layer_ids: list[int] | None = None
    target_name: str = ""
    target_fingerprint: str = ""

    block_size: int = 0
    slots: str = ""
    mask_token_id: int = -1
    draft_vocab_size: int = 0
    markov_rank: int = 0
    markov_kind: str = "vanilla"
    confidence: bool = False
    confidence_with_markov: bool = True

    carry: str = "none"
    carry_site: str = "pre_norm"
    carry_projector: str = "fc_copy"
    carry_hint: str = "rejected_tokens"

    def __post_init__(self, **kwargs: Any) -> None:
        unknown = sorted(set(kwargs) - FRAMEWORK_KEYS)
        if unknown:
            raise InputError(
                f"drafter config: unknown key {unknown[0]!r}; it would be ignored, so remove or rename it."
            )
        self.layer_types = list(self.layer_types or ["full_attention"] * self.num_hidden_layers)
        self.rope_parameters = dict(self.rope_parameters or {"rope_type": "default", "rope_theta": 1e6})
        self.target_hidden_size = self.target_hidden_size or self.hidden_size
        self.target_layer_ids = list(self.target_layer_ids or [])
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Without the attributes that others hang on a config, which a reader would refuse, and without `carry_hint`
        where there are no hints, so that other drafters are stored and digested as before it existed."""
        known = {field.name for field in fields(self)} | FRAMEWORK_KEYS  # type: ignore[arg-type]
        known -= set() if self.hints else {"carry_hint"}
        return {key: value for key, value in super().to_dict().items() if key in known}

    def checked(self) -> DrafterConfig:
        """Returns itself, or raises InputError naming the first field that cannot work.

        Not run on construction: transformers builds empty configurations to compare defaults.
        """
        zero_based = ("num_target_layers", "markov_rank", "mask_token_id", "draft_vocab_size")
        for field, least in [*((f, 1) for f in COUNTS), *((f, 0) for f in zero_based)]:
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"drafter config: {field} must be a whole number of at least {least}, got {value!r}.")
        for field, choices in (("slots", Slots), ("markov_kind", MarkovKind), ("carry", Carry),
                               ("carry_site", CarrySite), ("carry_projector", Projector),
                               ("carry_hint", Hint)):  # fmt: skip
            if getattr(self, field) not in get_args(choices):
                raise InputError(
                    f"drafter config: {field} must be one of {', '.join(get_args(choices))}, "
                    f"got {getattr(self, field)!r}."
                )
        if self.num_proposals < 1:
            raise InputError("drafter config: a fill_in block of 1 proposes nothing; block_size must be at least 2.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"drafter config: {self.num_attention_heads} attention heads cannot share {self.num_key_value_heads} "
                "key/value heads."
            )
        if self.head_dim % 2:
            raise InputError(f"drafter config: head_dim must be even, because RoPE rotates pairs, got {self.head_dim}.")
        if self.hidden_act not in ACT2FN:
            raise InputError(
                f"drafter config: hidden_act {self.hidden_act!r} is no activation that transformers knows."
            )
        if self.mask_token_id >= self.vocab_size:
            raise InputError(
                f"drafter config: mask_token_id {self.mask_token_id} is no row of the target's embedding "
                f"(0 to {self.vocab_size - 1})."
            )
        if self.draft_vocab_size > self.vocab_size:
            raise InputError(
                f"drafter config: draft_vocab_size {self.draft_vocab_size} is more than the target's {self.vocab_size} "
                "tokens; 0 proposes any of them."
            )
        rope = self.rope_parameters or {}
        if rope.get("rope_type") not in ROPE_TYPES or "rope_theta" not in rope:
            raise InputError(
                f"drafter config: rope_parameters must give rope_theta and a rope_type out of {', '.join(ROPE_TYPES)}, "
                f"got {rope}."
            )
        factor = rope.get("factor")
        if rope["rope_type"] != "default" and (not isinstance(factor, int | float) or not 0 < factor < math.inf):
            raise InputError(
                f"drafter config: rope_parameters of type {rope['rope_type']} need a factor above 0, got {factor!r}."
            )
        for field, value in (("rms_norm_eps", self.rms_norm_eps), ("rope_theta", rope["rope_theta"])):
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
                raise InputError(f"drafter config: {field} must be a number above 0, got {value!r}.")
        if rope.get("partial_rotary_factor", 1.0) != 1.0 or "mrope_section" in rope:
            raise InputError(
                "drafter config: partial or multi-axis rotary embeddings are not supported; heads rotate whole."
            )
        unknown = set(self.layer_types or ()) - {"full_attention", "sliding_attention"}
        if unknown or len(self.layer_types or ()) != self.num_hidden_layers:
            raise InputError(
                f"drafter config: layer_types must name full_attention or sliding_attention for each of "
                f"{self.num_hidden_layers} layers, got {self.layer_types}."
            )
        window = self.sliding_window if isinstance(self.sliding_window, int) else 0
        if "sliding_attention" in (self.layer_types or ()) and window < 1:
            raise InputError(
                "drafter config: layer_types names sliding_attention, so sliding_window must be a number of rows, got "
                f"{self.sliding_window!r}."
            )
        if self.confidence and self.confidence_with_markov and not self.markov_rank:
            raise InputError("drafter config: confidence_with_markov needs a Markov head (markov_rank above 0).")
        if self.num_target_layers:
            self.layer_ids.checked(self.num_target_layers)
        return self

    @property
    def layer_ids(self) -> LayerIds:
        return LayerIds(self.target_layer_ids or ())

    @property
    def hints(self) -> bool:
        """Whether carry means tokens in the block's embeddings instead of rows."""
        return self.carry == "hint"

    @property
    def num_proposals(self) -> int:
        """P, proposals per round."""
        return self.block_size - self.first_slot

    @property
    def first_slot(self) -> int:
        """The first slot that makes a proposal. In both conventions slot `first_slot + i` proposes anchor + 1 + i."""
        return 1 if self.slots == "fill_in" else 0
