"""Tiny random drafters, and the drafter's forward written the slow and obvious way."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from carryover.drafter.config import DrafterConfig
from carryover.drafter.modeling import Drafter

SETTINGS: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "num_target_layers": 6,
    "target_layer_ids": [1, 3, 4],
    "block_size": 5,
    "slots": "fill_in",
    "mask_token_id": 7,
}


def config(**overrides: Any) -> DrafterConfig:
    return DrafterConfig(**{**SETTINGS, **overrides})


def random_drafter(seed: int = 0, **overrides: Any) -> Drafter:
    """Every weight random, norms, biases and the carry mark too."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drafter = Drafter(config(**overrides))
        with torch.no_grad():
            for parameter in drafter.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
            if drafter.config.carry != "none":
                for parameter in drafter.carry.parameters():
                    parameter.copy_(torch.randn_like(parameter) * 0.3)
    return drafter.eval()


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean() + eps)


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """One head `[hd]`: dimension i turns together with dimension i + hd/2 by position * theta^(-2i/hd)."""
    half, out = len(x) // 2, torch.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


@torch.no_grad()
def slow_block(
    drafter: Drafter,
    features: Tensor,
    positions: list[int],
    embeds: Tensor,
    anchor: int,
    carry_rows: Tensor | None = None,
    carry_positions: list[int] | None = None,
) -> Tensor:
    """One block of one anchor, row by row and head by head.

    features `[S, M*Dt]` at `positions`; only those before the anchor are seen. embeds `[B, D]` at anchor, anchor + 1,
    ...; carry_rows `[R, D]`, fused already, seen by every slot. Returns `[B, D]`.
    """
    c, w = drafter.config, drafter.state_dict()
    theta, eps, groups = c.rope_parameters["rope_theta"], c.rms_norm_eps, c.num_attention_heads // c.num_key_value_heads
    fused = [
        (p, rms_norm(w["fc.weight"] @ h, w["hidden_norm.weight"], eps))
        for p, h in zip(positions, features, strict=True)
    ]
    fused = [(p, row) for p, row in fused if p < anchor]
    carried = [] if carry_rows is None else list(zip(carry_positions or [], carry_rows, strict=True))
    x = embeds.clone()
    for layer, kind in enumerate(c.layer_types):
        at = f"layers.{layer}."
        normed = torch.stack([rms_norm(row, w[at + "input_layernorm.weight"], eps) for row in x])
        block = [(anchor + k, row) for k, row in enumerate(normed)]

        def project(name: str, row: Tensor, head: int, at: str = at) -> Tensor:
            out = w[f"{at}self_attn.{name}_proj.weight"] @ row
            if c.attention_bias:
                out = out + w[f"{at}self_attn.{name}_proj.bias"]
            return out[head * c.head_dim : (head + 1) * c.head_dim]

        attended = []
        for k, (slot, row) in enumerate(block):
            seen_context = fused
            if kind == "sliding_attention":
                first = anchor - c.sliding_window if c.sliding_window_from_anchor else slot - c.sliding_window + 1
                seen_context = [(p, r) for p, r in fused if p >= first]
            seen_block = block[: k + 1] if kind == "sliding_attention" and c.sliding_causal else block
            heads = []
            for head in range(c.num_attention_heads):
                q = rotate(rms_norm(project("q", row, head), w[at + "self_attn.q_norm.weight"], eps), slot, theta)
                scores, values = [], []
                for p, r in [*seen_context, *carried, *seen_block]:
                    key = rms_norm(project("k", r, head // groups), w[at + "self_attn.k_norm.weight"], eps)
                    scores.append(q @ rotate(key, p, theta) / math.sqrt(c.head_dim))
                    values.append(project("v", r, head // groups))
                heads.append(torch.softmax(torch.stack(scores), dim=0) @ torch.stack(values))
            out = w[at + "self_attn.o_proj.weight"] @ torch.cat(heads)
            attended.append(out + w[at + "self_attn.o_proj.bias"] if c.attention_bias else out)
        x = x + torch.stack(attended)
        normed = torch.stack([rms_norm(row, w[at + "post_attention_layernorm.weight"], eps) for row in x])
        gate, up = normed @ w[at + "mlp.gate_proj.weight"].T, normed @ w[at + "mlp.up_proj.weight"].T
        x = x + (silu(gate) * up) @ w[at + "mlp.down_proj.weight"].T
    return torch.stack([rms_norm(row, w["norm.weight"], eps) for row in x])
