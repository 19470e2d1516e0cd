"""The block drafter: DFlash, or Markov with a first-order head, with or without carry rows.

It owns no embedding and no LM head: the target's are passed in, never copied. One round is `add context rows`, `add
carry rows`, `run the block`, `propose`; training does the same for many anchors at once with a mask from `rows.py`.

Letters: `b` batch, `S` context rows, `R` carry rows, `B` block rows, `P` proposals, `M` captured layers, `Dt` target
hidden size, `D` hidden, `V` vocabulary, of logits the draft vocabulary, `G` key/value heads, `hd` head size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from ..errors import InputError
from ..files import let_others_read
from ..rows import DrafterRule, Rows, dense, flex
from .backbone import DraftLayer, DraftRotaryEmbedding, KeyValues, Mask, RowKeyValues
from .config import DrafterConfig
from .context import CarryMark, TokenHints
from .heads import Choose, ConfidenceHead, MarkovHead

Embed = Callable[[Tensor], Tensor]  # the target's embedding: token ids [...] -> [..., D]
Head = Callable[[Tensor], Tensor]  # the target's LM head, its rows of the draft vocabulary: hidden [..., D] -> [..., V]


class Proposals(NamedTuple):
    """tokens `[b, P]`, and the (corrected) logits each was chosen from, `[b, P, V]`."""

    tokens: Tensor
    logits: Tensor


class Drafter(PreTrainedModel):
    """A block drafter for one frozen target. Weights have the public names (`fc`, `hidden_norm`, `layers.0...`)."""

    config_class = DrafterConfig
    config: DrafterConfig
    base_model_prefix = ""
    main_input_name = "block"
    _no_split_modules = ["DraftLayer"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flex_attn = True

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config.checked())
        self.fc = nn.Linear(len(config.layer_ids) * (config.target_hidden_size or 0), config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = DraftRotaryEmbedding(config)  # type: ignore[arg-type]  # reads rope_parameters and head_dim only
        if config.markov_rank:
            self.markov_head = MarkovHead(config)
        if config.confidence:
            self.confidence_head = ConfidenceHead(config)
        if config.carry != "none":
            self.carry: Any = TokenHints(config) if config.hints else CarryMark(config)
        # Ids of the tokens that can be proposed, ascending; None: all of them.
        self.draft_vocab: Tensor | None
        self.register_buffer("draft_vocab", torch.arange(config.draft_vocab_size) if config.draft_vocab_size else None)
        self.post_init()
        if config.carry != "none":
            self.carry.start_from(self.fc)

    def digest(self) -> str:
        """Of configuration and weights, to tell drafters apart."""
        digest = hashlib.sha256(json.dumps(self.config.to_dict(), sort_keys=True, default=str).encode())
        for name, tensor in self.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().float().cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    # ---- rows ------------------------------------------------------------------------------------------------------
    def masks(self, queries: Rows, keys: Rows, use_flex: bool = False) -> dict[str, Mask]:
        """One mask per kind of layer this drafter has, from the rule in `rows.py`."""
        lower = flex if use_flex else dense
        return {kind: lower(self.rule(kind), queries, keys) for kind in set(self.config.layer_types or ())}

    def rule(self, layer_type: str) -> DrafterRule:
        c = self.config
        if layer_type == "full_attention":
            return DrafterRule()
        return DrafterRule(c.sliding_causal, c.sliding_window, c.sliding_window_from_anchor)

    def key_values(self, rows: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Fused rows `[b, K, D]` at `positions [b, K]` to each layer's keys and values, pairs of `[b, G, K, hd]`."""
        rope = self.rotary(rows, positions)
        return [layer.self_attn.key_values(rows, rope) for layer in self.layers]  # type: ignore[operator, union-attr]

    def context(self, features: Tensor) -> Tensor:
        """Features of committed tokens `[b, S, M*Dt]` to context rows `[b, S, D]`."""
        return self.hidden_norm(self.fc(features))

    def carried(self, features: Tensor, rejected: Tensor | None = None) -> Tensor:
        """Features `[b, R, M*Dt]` to rows `[b, R, D]`: carry rows, or where `rejected [b, R]` is False context rows."""
        where = features.new_ones(1, dtype=torch.bool) if rejected is None else rejected[..., None]
        return self.carry.fuse(features, self.fc, self.hidden_norm, where)

    # ---- one pass --------------------------------------------------------------------------------------------------
    def block(self, embeds: Tensor, positions: Tensor, kv: KeyValues, masks: dict[str, Mask] | None = None) -> Tensor:
        """Runs query rows `embeds [b, B, D]` at `positions [b, B]`; returns `[b, B, D]` after the final norm.

        kv holds the rows before the block. masks: one per layer type; None lets every query see every row.
        """
        rope, x = self.rotary(embeds, positions), embeds
        for i, layer in enumerate(self.layers):
            x = layer(x, rope, i, kv, masks[self.config.layer_types[i]] if masks else None)  # type: ignore[index]
        return self.norm(x)

    def forward(
        self,
        block: Tensor,
        block_positions: Tensor,
        masks: dict[str, Mask],
        features: Tensor,
        positions: Tensor,
        carry_features: Tensor | None = None,
        carry_positions: Tensor | None = None,
        hints: Tensor | None = None,
    ) -> Tensor:
        """The training pass, many anchors in one forward: keys are [context | carry | block] rows, in this order.

        Either all anchors of a sequence share its rows, `n = b` and every block sees N*B block rows through its mask,
        or each anchor has an entry of its own, `n = b*N`, with a copy of its sequence's context keys.

        block: embedded query tokens `[n, rows, D]`; features `[b, S, M*Dt]` at positions `[b, S]`; carry_features
        `[n, carry rows, M*Dt]` at their original positions. masks: from `self.masks`. hints `[n, rows, D]`: from
        `self.hints`. Returns states `[n, rows, D]`.
        """
        if hints is not None:
            block = self.carry(block, hints)
        copies = block.shape[0] // features.shape[0]
        kv = self.key_values(self.context(features), positions)
        if copies > 1:
            kv = [(k.repeat_interleave(copies, 0), v.repeat_interleave(copies, 0)) for k, v in kv]
        if carry_features is not None:
            assert carry_positions is not None
            carried = self.key_values(self.carried(carry_features), carry_positions)
            kv = [(torch.cat((k, ck), 2), torch.cat((v, cv), 2)) for (k, v), (ck, cv) in zip(kv, carried, strict=True)]
        return self.block(block, block_positions, RowKeyValues(kv), masks)

    def block_tokens(self, anchor_token: Tensor) -> Tensor:
        """Query tokens `[..., B]` of blocks that start with `anchor_token [...]`: the anchor, then masks."""
        tokens = anchor_token[..., None].repeat_interleave(self.config.block_size, dim=-1)
        tokens[..., 1:] = self.config.mask_token_id
        return tokens

    def hints(self, tokens: Tensor, accepted: Tensor, seen: Tensor, embed: Embed) -> Tensor:
        """Embedded token hints `[..., B, D]` of the blocks that follow verifications, see `TokenHints.aligned`."""
        hints = self.carry.aligned(tokens, accepted, seen)
        return torch.where(hints[..., None] >= 0, embed(hints.clamp(min=0)), 0)

    # ---- proposals -------------------------------------------------------------------------------------------------
    def token_ids(self, index: Tensor) -> Tensor:
        """Indices `[...]` into the draft vocabulary to token ids of the target."""
        return index if self.draft_vocab is None else self.draft_vocab[index]

    def restricted(self, vocabulary: Tensor) -> Drafter:
        """The same drafter proposing only these tokens (ids, ascending): the LM head is read for them alone.

        Raises InputError where one of them is not in the draft vocabulary there is.
        """
        index = self.vocabulary_index(vocabulary)
        if (index < 0).any():
            raise InputError(
                f"the new draft vocabulary of {len(vocabulary)} tokens holds some that the drafter cannot propose "
                f"(it proposes {self.config.draft_vocab_size}); start from the drafter that proposes all."
            )
        config = DrafterConfig.from_dict({**self.config.to_dict(), "draft_vocab_size": len(vocabulary)})
        weights = {**self.state_dict(), "draft_vocab": vocabulary}
        if config.markov_rank:
            weights["markov_head.markov_w2.weight"] = weights["markov_head.markov_w2.weight"][index]
        return Drafter.from_tensors(config, weights)

    def without_carry(self) -> Drafter:
        """The same drafter with no carry interface."""
        config = DrafterConfig.from_dict({**self.config.to_dict(), "carry": "none"})
        return Drafter.from_tensors(config, {n: t for n, t in self.state_dict().items() if not n.startswith("carry.")})

    def vocabulary_index(self, tokens: Tensor) -> Tensor:
        """Token ids `[...]` to indices into the draft vocabulary, -1 for a token that is not in it."""
        if self.draft_vocab is None:
            return tokens
        index = torch.searchsorted(self.draft_vocab, tokens.contiguous()).clamp(max=len(self.draft_vocab) - 1)
        return torch.where(self.draft_vocab[index] == tokens, index, -1)

    def proposing(self, hidden: Tensor) -> Tensor:
        """The rows of a block that make proposals: `[b, B, D]` to `[b, P, D]`, in both slot conventions."""
        return hidden[:, self.config.first_slot :]

    def propose(self, hidden: Tensor, anchor_token: Tensor, head: Head, choose: Choose) -> Proposals:
        """P proposals from block states `[b, B, D]`; `choose` maps logits to token ids (argmax, or sampling)."""
        hidden = self.proposing(hidden)
        logits = head(hidden)
        if self.config.markov_rank:
            return Proposals(*self.markov_head.walk(logits, hidden, anchor_token, choose))
        return Proposals(choose(logits), logits)

    def logits(self, hidden: Tensor, previous: Tensor, head: Head) -> Tensor:
        """Teacher-forced logits `[b, P, V]` of proposing rows `[b, P, D]`, given the token before each, `[b, P]`."""
        logits = head(hidden)
        return logits + self.markov_head.bias(previous, hidden) if self.config.markov_rank else logits

    def confidence_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """`[b, P]` acceptance logits of proposing rows `[b, P, D]`, given the token before each, `[b, P]`."""
        with_markov = self.config.confidence_with_markov
        return self.confidence_head(hidden, self.markov_head.markov_w1(previous) if with_markov else None)

    # ---- checkpoints -----------------------------------------------------------------------------------------------
    def save_pretrained(  # type: ignore[override]
        self, folder: Any, is_main_process: bool = True, state_dict: dict[str, Tensor] | None = None, **kwargs: Any
    ) -> None:
        """As transformers does, however the weights lie in memory."""
        tensors = {name: tensor.contiguous() for name, tensor in (state_dict or self.state_dict()).items()}
        super().save_pretrained(folder, is_main_process, tensors, **kwargs)
        if is_main_process:
            let_others_read(Path(folder))

    @classmethod
    def from_tensors(cls, config: DrafterConfig, tensors: dict[str, Tensor]) -> Drafter:
        """A drafter made of exactly these tensors, in their dtype and in evaluation mode.

        Raises InputError naming a tensor that is missing, not understood, misshapen or not in floating point.
        """
        with torch.device("meta"):
            drafter = cls(config)
        wanted = drafter.state_dict()
        for name in sorted(wanted.keys() - tensors.keys()):
            raise InputError(f"the drafter checkpoint lacks the tensor {name!r}, which its config calls for.")
        for name in sorted(tensors.keys() - wanted.keys()):
            raise InputError(f"the drafter checkpoint holds the tensor {name!r}, which its config does not explain.")
        for name, tensor in tensors.items():
            if tensor.shape != wanted[name].shape:
                found, expected = list(tensor.shape), list(wanted[name].shape)
                raise InputError(
                    f"the drafter's tensor {name!r} has shape {found}, but its config calls for {expected}."
                )
            if name == "draft_vocab":
                ids = tensor.tolist() if tensor.dtype == torch.int64 else [-1]
                if ids != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] < config.vocab_size:
                    raise InputError("the drafter's draft_vocab must be ascending token ids of the target, as int64.")
            elif tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise InputError(
                    f"the drafter's tensor {name!r} is stored as {tensor.dtype}; convert it to bfloat16 or float32."
                )
        drafter.load_state_dict(tensors, assign=True)
        drafter.rotary = DraftRotaryEmbedding(config)  # type: ignore[arg-type]  # its buffers are computed, not stored
        return drafter.eval()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Drafter:  # type: ignore[override]
        """Loads this project's own format; a missing, extra or misshapen tensor is an InputError, not a warning."""
        kwargs.update(output_loading_info=True, ignore_mismatched_sizes=True)  # so that they can be named here
        loaded: Any = super().from_pretrained(*args, **kwargs)
        drafter, info = loaded
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info[problem]:
                names = ", ".join(sorted(map(str, info[problem]))[:3])
                raise InputError(
                    f"the drafter checkpoint has {problem.replace('_', ' ')} ({names}); it does not fit its config."
                )
        return drafter
