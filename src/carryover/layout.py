"""How weights lie in memory, for products with few rows on a CPU. Values and their number do not change.

On Intel processors MKL multiplies 2 to 64 rows with a float32 weight up to twice as fast when the weight is stored by
input instead of by output, and is not slower otherwise; in bfloat16 it makes no difference (docs/speed.md).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

FEW, ENOUGH = 8, 16  # rows


def store_by_input(module: nn.Module) -> None:
    """Lays out float32 weights `[out, in]` of linear layers on the CPU so that their transpose is contiguous."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32:
            layer.weight.data = layer.weight.data.t().contiguous().t()


def tall_product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`[..., in]` times a weight `[out, in]` of very many outputs, an LM head: `[..., out]`.

    Rows are one matrix, because a batch with the strides of a slice becomes a batched product, which copies the weight
    first. 8 to 15 rows in float32 on a CPU take up to twice as long as 16, so they are filled up.
    """
    flat = rows.reshape(-1, rows.shape[-1])
    count = len(flat)
    if FEW <= count < ENOUGH and flat.device.type == "cpu" and flat.dtype == torch.float32:
        flat = nn.functional.pad(flat, (0, 0, 0, ENOUGH - count))
    return nn.functional.linear(flat, weight, bias)[:count].view(*rows.shape[:-1], -1)
