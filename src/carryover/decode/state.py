"""What one request keeps between rounds: the drafter's keys and values, and the rejected rows of the last round.

Only the committed rows of the draft cache survive a round; carry and block rows are written behind them and forgotten.
Rejected rows survive as target features until the next draft, which reads them once.

Letters: `R` carry rows, `B` block rows, `K` all rows, `M` captured layers, `Dt` target hidden size, `G` key/value
heads, `hd` head size. Source: SPEC 1.6 and 6.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..drafter.config import DrafterConfig
from ..rows import Rows, carry_rows

LayerKeyValues = list[tuple[Tensor, Tensor]]  # keys and values [1, G, rows, hd] of every layer


class DraftCache:
    """One preallocated buffer of keys and one of values per layer, `[1, G, capacity, hd]`, in the order
    committed | carry | block rows.

    Rows are written in place and read as views. Implements `KeyValues` for `Drafter.block`.
    """

    def __init__(self, config: DrafterConfig, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (1, config.num_key_value_heads, capacity, config.head_dim)
        self._layers = [
            (torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
            for _ in range(config.num_hidden_layers)
        ]
        self.committed = 0
        self.carried = 0

    def commit(self, kv: LayerKeyValues, count: int) -> None:
        """Appends the first `count` rows of `kv` for good, over any carry rows of the round before."""
        for layer, (keys, values) in enumerate(kv):
            self._write(layer, self.committed, keys[:, :, :count], values[:, :, :count])
        self.committed += count
        self.carried = 0

    def put_carry(self, kv: LayerKeyValues | None) -> None:
        """Writes carry rows behind the committed ones, in place of those put before; None leaves none."""
        for layer, (keys, values) in enumerate(kv or ()):
            self._write(layer, self.committed, keys, values)
        self.carried = kv[0][0].shape[2] if kv else 0

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the block's `[1, G, B, hd]` behind the stored rows; returns views of all rows, `[1, G, K, hd]`."""
        return self._write(layer, self.committed + self.carried, keys, values)

    def _write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        end = start + keys.shape[2]
        all_keys, all_values = self._layers[layer]
        all_keys[:, :, start:end] = keys
        all_values[:, :, start:end] = values
        return all_keys[:, :, :end], all_values[:, :, :end]


@dataclass(frozen=True)
class CarryState:
    """The rejected proposals `accepted + 1 .. proposals` of the round at `anchor`; never empty.

    features: `[1, R, M*Dt]`, the target's states with the rejected tokens as input.
    """

    features: Tensor
    anchor: int
    accepted: int
    proposals: int

    @property
    def count(self) -> int:
        return self.proposals - self.accepted

    @property
    def positions(self) -> Tensor:
        """`[1, R]`, the positions at which the target computed them."""
        first = self.anchor + self.accepted + 1
        return torch.arange(first, first + self.count, device=self.features.device)[None]

    def rows(self) -> Rows:
        """Their row attributes, `[1, R]`."""
        one = torch.zeros(1, 1, dtype=torch.long, device=self.features.device)
        rows = carry_rows(one + self.anchor, one, one + self.accepted, self.proposals)
        return rows.map(lambda field: field[:, self.accepted :])
