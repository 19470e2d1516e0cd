"""What requests that decode together keep between rounds: the drafter's keys and values, and the last verification.

In every slot, row index is position: a verification at anchor `a` computes the states of `a .. a + P`, and their rows
are written there, whether they turn out committed or rejected. The next draft reads the rejected ones as carry rows;
the verification after it writes over them. The rows of the block lie behind and never survive.

Letters: `b` requests, `P` proposals, `B` block rows, `K` all rows, `M` captured layers, `Dt` target hidden size, `G`
key/value heads, `hd` head size. Source: SPEC 1.6 and 6.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..drafter.config import DrafterConfig
from ..slots import Window, grown

LayerKeyValues = list[tuple[Tensor, Tensor]]  # keys and values [b, G, rows, hd] of every layer


class DraftCache:
    """One preallocated buffer of keys and one of values per layer, `[slots, G, capacity, hd]`, written in place.

    Implements `KeyValues` for `Drafter.block`: `aim` says where the block's rows of each request go.
    """

    def __init__(
        self, config: DrafterConfig, slots: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (slots, config.num_key_value_heads, capacity, config.head_dim)
        # Zeros, not `empty`: rows that nobody sees are still multiplied by a weight of zero, and 0 * NaN is NaN.
        self.layers = [
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(config.num_hidden_layers)
        ]
        self.window = Window(0, [0], 0)

    def rows(self, starts: list[int], rows: int, whole: bool = False) -> Window:
        """Rows `starts[i] ..` of slots 0, 1, ...; whole: of which all are read, as the compiled path does."""
        keys = self.layers[0][0]
        return Window(0, starts, rows, keys.device, keys.shape[2] if whole else None)

    def write(self, kv: LayerKeyValues, first: int, starts: list[int]) -> None:
        """Writes rows `[b, G, rows, hd]` of each layer into slots `first..`, from row `starts[i]` on."""
        window = Window(first, starts, kv[0][0].shape[2], kv[0][0].device)
        for stored, new in zip(self.layers, kv, strict=True):
            window.write(stored, new)

    def aim(self, starts: list[int], rows: int, whole: bool = False) -> int:
        """Where the block's rows of slots 0, 1, ... go; returns how many rows of a slot the block reads."""
        self.window = self.rows(starts, rows, whole)
        return self.window.length

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the block's rows `[b, G, B, hd]` where `aim` said; returns views of all rows, `[b, G, K, hd]`."""
        self.window.write(self.layers[layer], (keys, values))
        return self.window.read(self.layers[layer])

    def grow(self, capacity: int) -> None:
        self.layers = [grown(buffers, capacity) for buffers in self.layers]

    def move(self, source: int, slot: int, rows: int) -> None:
        """Copies the first `rows` rows of one slot to another."""
        for buffers in self.layers:
            for buffer in buffers:
                buffer[slot, :, :rows] = buffer[source, :, :rows]
