"""Attention with grouped heads under a mask, without copies of the keys; targets call it through transformers.

Letters: `b` batch, `H` heads, `G` key/value heads, `Q` query rows, `K` key rows, `hd` head size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "carryover_grouped"


def grouped_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None = None
) -> Tensor:
    """`[b, H, Q, hd]` over `[b, G, K, hd]` under a mask `[b, 1, Q, K]`: the heads of a group are further rows of it."""
    b, h, q, hd = queries.shape
    groups = h // keys.shape[1]
    rows = queries.reshape(b, keys.shape[1], groups * q, hd)
    masks = mask if q == 1 else mask.repeat(1, 1, groups, 1)  # one row broadcasts
    return scaled_dot_product_attention(rows, keys, values, attn_mask=masks, scale=scale).reshape(b, h, q, -1)


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """`sdpa` of transformers, which copies grouped keys and values wherever there is a mask, but for those copies."""
    if attention_mask is None or query.shape[1] == key.shape[1] or kwargs.get("dropout"):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    out = grouped_attention(query, key, value, attention_mask, kwargs.get("scaling"))
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, attention_forward)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
