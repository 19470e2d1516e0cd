"""The draft layers: Qwen3-shaped, but only block rows are queries; context and carry rows enter as keys and values.

Context rows are fused features and go straight into `k_proj`/`v_proj` of every layer (no `input_layernorm`, never
updated); block rows are normed first. Keys of all rows get the layer's `k_norm` and RoPE at the row's own position.

Letters: `b` batch, `B` block rows (of all anchors), `K` key rows, `H` heads, `G` key/value heads, `hd` head size,
`D` hidden. Source: SPEC 1.1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
)

from ..attention import grouped_attention
from .config import DrafterConfig

Rope = tuple[Tensor, Tensor]
Mask = Tensor | BlockMask | None


class KeyValues(Protocol):
    """Where the keys and values of rows before the block live: plain tensors in training, a cache in decoding."""

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Puts the block's keys and values `[b, G, B, hd]` behind the stored ones; returns all, `[b, G, K, hd]`."""
        ...


class RowKeyValues:
    """Keys and values of context and carry rows for one forward, with gradient: a pair `[b, G, K, hd]` per layer."""

    def __init__(self, rows: list[tuple[Tensor, Tensor]]) -> None:
        self.rows = rows

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        stored_keys, stored_values = self.rows[layer]
        return torch.cat((stored_keys, keys), dim=2), torch.cat((stored_values, values), dim=2)


@cache
def _fused_flex_attention() -> Callable[..., Any]:
    """flex_attention as one kernel. Without `torch.compile` it stores all scores, and on a CPU it has no backward, so
    CPUs train with dense masks. Not run by the tests of this project, which need no GPU; they run the unfused
    forward."""
    return torch.compile(flex_attention)


class DraftRotaryEmbedding(Qwen3RotaryEmbedding):
    """RoPE angles of any rows by position. The frequencies stay in single precision when the drafter is cast: in bf16
    they are off by up to 0.2 %, which turns position 1,000 into position 1,002."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DraftRotaryEmbedding:
        exact: Tensor = self.inv_freq
        super()._apply(fn, recurse)
        if not exact.is_meta:
            self.register_buffer("inv_freq", exact.to(self.inv_freq.device), persistent=False)
        return self


def rotate(heads: Tensor, rope: Rope) -> Tensor:
    """`[b, heads, rows, hd]` turned by the angles `[b, rows, hd]`: dimension i together with dimension i + hd/2."""
    cos, sin = (angles[:, None] for angles in rope)
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        d, hd, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = hd
        self.q_proj = nn.Linear(d, config.num_attention_heads * hd, bias=bias)
        self.k_proj = nn.Linear(d, config.num_key_value_heads * hd, bias=bias)
        self.v_proj = nn.Linear(d, config.num_key_value_heads * hd, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * hd, d, bias=bias)
        self.q_norm = Qwen3RMSNorm(hd, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(hd, eps=config.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [b, rows, H*hd] -> [b, H, rows, hd]

    def key_values(self, rows: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Rows `[b, K, D]` to their keys and values `[b, G, K, hd]`."""
        keys = self.k_norm(self.k_proj(rows).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        keys = rotate(keys, rope)
        return keys, self._heads(self.v_proj(rows))

    def queries(self, block: Tensor, rope: Rope) -> Tensor:
        """Block rows `[b, B, D]` to their queries `[b, H, B, hd]`."""
        queries = self.q_norm(self.q_proj(block).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        return rotate(queries, rope)

    def forward(self, block: Tensor, rope: Rope, layer: int, kv: KeyValues, mask: Mask) -> Tensor:
        queries = self.queries(block, rope)
        keys, values = kv.extend(layer, *self.key_values(block, rope))
        gqa = queries.shape[1] != keys.shape[1]
        if isinstance(mask, BlockMask):
            attend: Any = _fused_flex_attention() if queries.is_cuda else flex_attention
            out = attend(queries, keys, values, block_mask=mask, enable_gqa=gqa)
        elif gqa and mask is not None:
            out = grouped_attention(queries, keys, values, mask)
        else:
            out = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=gqa)
        assert isinstance(out, Tensor)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DraftLayer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, block: Tensor, rope: Rope, layer: int, kv: KeyValues, mask: Mask) -> Tensor:
        """Block rows `[b, B, D]` to `[b, B, D]`."""
        block = block + self.self_attn(self.input_layernorm(block), rope, layer, kv, mask)
        return block + self.mlp(self.post_attention_layernorm(block))
