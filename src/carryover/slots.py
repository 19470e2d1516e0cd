"""Caches of several requests, a slot each: preallocated, written in place, undone by forgetting.

Row index is position in every slot, and a row is written before it is read, so rejected rows need no cropping: the next
verification begins at the first of them. What lies behind a request's last row is hidden by position (`TargetRule`).

Letters: `b` requests, `Q` new rows, `K` rows that are read, `G` key/value heads, `hd` head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache


class Window:
    """Rows `starts[i] .. starts[i] + rows - 1` of slots `first + i`: where new keys and values go, what is read.

    whole: read this many rows instead of only those up to the last one, so that shapes do not depend on `starts`.
    """

    def __init__(
        self, first: int, starts: list[int], rows: int, device: torch.device | None = None, whole: int | None = None
    ) -> None:
        self.slots = slice(first, first + len(starts))
        self.start = starts[0]
        self.whole = whole is not None
        self.length = max(starts) + rows if whole is None else whole
        self.index = None  # of slots [b, 1] and rows [b, Q]
        if self.whole or any(start != self.start for start in starts):
            slots = torch.arange(first, first + len(starts), device=device)[:, None]
            self.index = slots, torch.tensor(starts, device=device)[:, None] + torch.arange(rows, device=device)

    def write(self, stored: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> None:
        """stored: `[slots, G, capacity, hd]`; new: `[b, G, rows, hd]`."""
        for buffer, rows in zip(stored, new, strict=True):
            if self.index is None:
                buffer[self.slots, :, self.start : self.length] = rows
            else:
                slots, places = self.index  # `index_put`, which a compiled function does in place
                buffer[slots, :, places] = rows.transpose(1, 2)

    def read(self, stored: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        keys, values = stored
        return keys[self.slots, :, : self.length], values[self.slots, :, : self.length]


def grown(buffers: tuple[Tensor, Tensor], capacity: int) -> tuple[Tensor, Tensor]:
    """Larger copies of a layer's buffers, their new rows zero."""
    keys, values = (torch.nn.functional.pad(x, (0, 0, 0, capacity - x.shape[2])) for x in buffers)
    return keys, values


class LayerRows:
    """What one layer needs of a `SlotCache` that is aimed, whichever number the layer has."""

    def __init__(self, stored: tuple[Tensor, Tensor], window: Window) -> None:
        self.stored, self.window = stored, window

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.window.write(self.stored, (keys, values))
        return self.window.read(self.stored)


class SlotCache(Cache):
    """The target's keys and values, buffers `[slots, G, capacity, hd]` per layer; `aim` before every forward.

    A transformers cache as far as the decoders of the supported families use one. Layers differ in their head sizes, so
    a buffer is made when its layer first writes; that is the only allocation.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.slots, self.capacity = slots, capacity
        self.buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self.window = Window(0, [0], 0)

    def aim(self, first: int, starts: list[int], rows: int, device: torch.device, whole: bool = False) -> int:
        """The next forward writes `rows` rows from row `starts[i]` on into slot `first + i`; returns K.

        whole: it reads all rows of the slots, as the compiled path does.
        """
        self.window = Window(first, starts, rows, device, self.capacity if whole else None)
        return self.window.length

    def layer(self, layer: int) -> LayerRows:
        return LayerRows(self.buffers[layer], self.window)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes `[b, G, Q, hd]` where `aim` said; returns views of all rows, `[b, G, K, hd]`."""
        new = key_states, value_states
        if layer_idx not in self.buffers:
            shape = (self.slots, key_states.shape[1], self.capacity)
            # Zeros, not `empty`: rows that nobody sees are still multiplied by a weight of zero, and 0 * NaN is NaN.
            self.buffers[layer_idx] = tuple(x.new_zeros(*shape, x.shape[-1]) for x in new)  # type: ignore[assignment]
        self.window.write(self.buffers[layer_idx], new)
        return self.window.read(self.buffers[layer_idx])

    def move(self, source: int, slot: int, rows: int) -> None:
        """Copies the first `rows` rows of one slot to another."""
        for buffers in self.buffers.values():
            for buffer in buffers:
                buffer[slot, :, :rows] = buffer[source, :, :rows]

    def grow(self, capacity: int) -> None:
        self.capacity = capacity
        self.buffers = {layer: grown(buffers, capacity) for layer, buffers in self.buffers.items()}

    # ---- what transformers asks for where it makes the masks itself (a prompt, one request at a time) ----------------
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.window.start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.window.start + query_length, 0
