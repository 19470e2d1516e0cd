"""The compiled path of decoding: `torch.compile` with static shapes, or the same functions uncompiled.

What is compiled are a decoder layer of the target, once for all layers of a kind, and the draft up to its last norm.
Shapes are few: as many requests as there are slots, one token or a block of them, and caches whose capacity is a power
of two (`bucket`), read whole. Rows behind a request's last one are hidden by its mask, places in the cache are index
tensors, and nothing that changes from round to round is a number that a compiled function reads.

With a GPU the kernels are replayed as CUDA graphs. That is not run by the tests of this project, which need no GPU.

Letters: `b` slots, `Q` new tokens, `K` rows of the cache, `P` proposals, `B` block rows, `M` captured layers, `D`
target hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .drafter.modeling import Drafter
from .notes import note
from .slots import SlotCache, Window

SMALLEST = 256  # rows of a cache
LIMIT = 256  # compilations of one function


def bucket(rows: int) -> int:
    """The capacity of caches that are to hold `rows` rows: one of few, so that few shapes are compiled."""
    return max(SMALLEST, 1 << (rows - 1).bit_length())


class Compiled:
    """A function that `torch.compile` makes fast where it can, and that otherwise runs as it is, after one note."""

    possible = True  # on this machine, as far as is known

    def __init__(self, function: Callable[..., Any], cuda: bool) -> None:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, LIMIT)
        options: dict[str, Any] = {"triton.cudagraphs": cuda, "guard_filter_fn": _any_layer}
        self.function = function
        self.fast = torch.compile(function, dynamic=False, fullgraph=True, options=options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if Compiled.possible:
            note("compiling; this takes a minute or two when it is new to this machine, else some seconds.")
            try:
                return self.fast(*args, **kwargs)
            except Exception as error:
                # Whatever it is: what was written so far is written again, and a fault of the function itself returns.
                Compiled.possible = False
                reason = " ".join((str(error) or type(error).__name__).split())[:200]
                note(f"torch.compile does not work here, so decoding goes on uncompiled ({reason}).")
        return self.function(*args, **kwargs)


def _any_layer(guards: Any) -> list[bool]:
    """A layer's number only says where its rows are, and `SlotCache.layer` has found them: one layer's code serves
    all layers that are built alike."""
    return [not guard.name.endswith(".layer_idx") for guard in guards]


# ---- the target ----------------------------------------------------------------------------------------------------
def _run_layer(forward: Callable[..., Any], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return forward(layer, *args, **kwargs)


def compile_layers(layers: nn.ModuleList, cuda: bool) -> None:
    """Lets layers run compiled wherever the cache is read whole; hooks and everything else stay as they were."""
    run = Compiled(_run_layer, cuda)
    for i, layer in enumerate(layers):
        if "forward" not in vars(layer):
            layer.forward = _dispatch(run, i, layer)  # type: ignore[method-assign]


def _dispatch(run: Compiled, i: int, layer: nn.Module) -> Callable[..., Any]:
    forward = type(layer).forward

    def either(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        if isinstance(cache, SlotCache) and cache.window.whole and i in cache.buffers:
            return run(forward, layer, *args, **{**kwargs, "past_key_values": cache.layer(i)})
        return forward(layer, *args, **kwargs)

    return either


# ---- the drafter ---------------------------------------------------------------------------------------------------
def draft_block(
    drafter: Drafter,
    features: Tensor,
    rejected: Tensor | None,
    positions: Tensor,
    rows: Window,
    embeds: Tensor,
    block_positions: Tensor,
    masks: Any,
    cache: Any,
) -> Tensor:
    """Takes in the rows of a verification, then runs the block.

    features `[b, P+1, M*D]` at positions `[b, P+1]`, carry rows where `rejected` is True (None: the drafter carries
    nothing), go where `rows` says; embeds `[b, B, D]` at block_positions `[b, B]` where the cache is aimed. Returns
    `[b, B, D]`.
    """
    fused = drafter.context(features) if rejected is None else drafter.carried(features, rejected)
    for stored, new in zip(cache.layers, drafter.key_values(fused, positions), strict=True):
        rows.write(stored, new)
    return drafter.block(embeds, block_positions, cache, masks)
