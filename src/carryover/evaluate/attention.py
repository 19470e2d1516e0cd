"""How much attention a draft pays to its carry rows, by layer, head, slot and row.

Decoding attends with a fused kernel that keeps no weights. Here they are computed beside it, from the very queries and
keys of the draft, by hooks on its attention layers; nothing of the draft changes.

Letters: `L` draft layers, `H` heads, `B` block rows, `K` all rows, `P` proposals, `hd` head size. Source: SPEC 7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..decode.engine import Batch, Engine
from ..drafter.backbone import Attention
from ..drafter.modeling import Drafter
from ..rows import BLOCK, CARRY, CONTEXT, draft_rows
from .results import known
from .stats import divide

RECENT = 16  # context rows that carry rows are compared with, the last before the anchor
Sums = dict[str, Any]  # what `attention_sums` counts, added up over drafts; lists or arrays


def attention_weights(attention: Attention, queries: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
    """Queries `[b, H, B, hd]` and keys `[b, G, K, hd]` of a layer to weights `[b, H, B, K]`, in fp32."""
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    scores = queries.float() @ keys.float().transpose(2, 3) * attention.head_dim**-0.5
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1)


@contextmanager
def watched(drafter: Drafter, see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """While it lasts, every layer of a draft from a cache tells its index and its weights `[b, H, B, K]`."""

    def hook(attention: Any, args: tuple[Any, ...], output: Tensor) -> None:
        block, rope, layer, cache, mask = args
        keys, _ = cache.window.read(cache.layers[layer])
        see(layer, attention_weights(attention, attention.queries(block, rope), keys, mask))

    handles = [layer.self_attn.register_forward_hook(hook) for layer in drafter.layers]  # type: ignore[union-attr]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def attention_sums(engine: Engine, batch: Batch) -> tuple[Tensor, Sums]:
    """Drafts for a single request that has carry; returns the block `[1, B, D]` and what is to be counted.

    `carry`, `recent`, `context`, `block`: mass on these rows, `[L, H, B]`, `recent` being the last 16 of `context`.
    `by_offset`: mass on the r-th carry row, mean over heads and slots, `[L, P]`. `rounds`, `carry_rows`, `recent_rows`,
    `offset_rounds [P]`: how many.
    """
    drafter, request = engine.drafter, batch.requests[0]
    assert drafter is not None and request.carried and len(batch.requests) == 1
    layers: dict[int, Tensor] = {}
    with watched(drafter, lambda layer, weights: layers.update({layer: weights[0]})):
        hidden = engine.draft_states(batch)
    weights = torch.stack([layers[i] for i in range(len(layers))]).double().cpu()  # [L, H, B, K]
    base, anchor, carried = (torch.tensor([x]) for x in (request.base, request.anchor, request.carried))
    kind = draft_rows(weights.shape[-1], base, anchor, carried, drafter.config.block_size).kind[0]
    recent = slice(max(0, request.anchor - RECENT), request.anchor)
    by_offset = torch.zeros(len(weights), engine.proposals, dtype=torch.double)
    by_offset[:, : request.carried] = weights[..., kind == CARRY].mean((1, 2))
    kinds = {"carry": CARRY, "context": CONTEXT, "block": BLOCK}
    sums = {name: weights[..., kind == k].sum(-1) for name, k in kinds.items()}
    counts = {"rounds": 1, "carry_rows": request.carried, "recent_rows": recent.stop - recent.start}
    sums |= {"recent": weights[..., recent].sum(-1), "by_offset": by_offset}
    offset_rounds = (torch.arange(engine.proposals) < request.carried).long()
    return hidden, {**counts, "offset_rounds": offset_rounds.numpy(), **{k: x.numpy() for k, x in sums.items()}}


def add(parts: Sequence[Sums]) -> Sums:
    """Sums over drafts from sums over some of them; empty for none."""
    return {key: sum(np.asarray(part[key]) for part in parts) for key in parts[0]} if parts else {}


def attention(parts: Sequence[Sums]) -> dict[str, Any]:
    """The `attention` of diagnostics.json, from the sums of each prompt (empty for a prompt without any carry)."""
    s = add([part for part in parts if part])
    rounds, carry_rows, recent_rows = int(s["rounds"]), int(s["carry_rows"]), int(s["recent_rows"])
    mass = s["carry"] / rounds
    means = {name: float(s[name].mean()) / rounds for name in ("carry", "context", "block")}
    per_carry = s["carry"].mean((1, 2)) / carry_rows
    per_recent = s["recent"].mean((1, 2)) / recent_rows
    return {
        "rounds": rounds,
        "carry_rows": carry_rows / rounds,
        **means,
        "carry_by_layer": mass.mean((1, 2)).tolist(),
        "carry_by_head": mass.mean(2).tolist(),
        "carry_by_layer_and_slot": mass.mean(1).tolist(),
        "carry_by_layer_head_slot": mass.tolist(),
        "per_carry_row": float(per_carry.mean()),
        "per_recent_row": float(per_recent.mean()),
        "per_carry_row_by_layer": per_carry.tolist(),
        "per_recent_row_by_layer": per_recent.tolist(),
        "by_offset": [[known(float(x)) for x in row] for row in _by_offset(s)],
        "offset_rounds": np.asarray(s["offset_rounds"]).tolist(),
    }


def _by_offset(s: Sums) -> NDArray[np.float64]:
    """Mean mass on the r-th carry row, over the drafts that had one, `[L, P]`."""
    return divide(s["by_offset"], s["offset_rounds"])
