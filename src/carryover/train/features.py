"""What the target computed for packed rows, kept on disk, so that later epochs of a stage need no target forward.

Only for drafts without carry: draft-verify-draft asks the target about new branches in every step. A token takes
`(M + 1) * D` numbers of the target's dtype, 7 KB for SmolLM2 with five captured layers and 31 KB for Qwen3-4B, so this
is for small targets or small corpora (SPEC 9.10). The values are those of the forward that first met the row.

Letters: `b` packed rows, `S` tokens, `M` captured layers, `D` target hidden size.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import InputError


class FeatureStore:
    """Final states and features of every row, in one memory-mapped file, filled as rows are first met.

    The file is sparse and survives a kill; a row counts as stored once its flag is written, after its values.
    """

    def __init__(self, path: Path, lengths: list[int], hidden_size: int, width: int, dtype: torch.dtype) -> None:
        """lengths: tokens of each row; width: M*D. Raises InputError where the file cannot be made."""
        self.hidden_size, self.starts = hidden_size, [0]
        for length in lengths:
            self.starts.append(self.starts[-1] + length)
        size = self.starts[-1] * (hidden_size + width)
        try:
            self.values = torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(-1, hidden_size + width)
            flags = str(path.with_suffix(".rows"))
            self.stored = torch.from_file(flags, shared=True, size=len(lengths), dtype=torch.uint8)
        except RuntimeError as error:
            gigabytes = size * dtype.itemsize / 1e9
            raise InputError(f"cannot keep {gigabytes:.1f} GB of features in {path}: {error}.") from error

    def read(self, rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """hidden `[b, S, D]` and features `[b, S, M*D]` of rows `[b]`, zero behind short ones; None if one lacks."""
        if not bool(self.stored[rows].all()):
            return None
        found = pad_sequence([self.values[self.starts[r] : self.starts[r + 1]] for r in rows.tolist()], True).to(device)
        return found[..., : self.hidden_size], found[..., self.hidden_size :]

    def write(self, rows: Tensor, hidden: Tensor, features: Tensor) -> None:
        both = torch.cat((hidden, features), dim=-1).to("cpu", self.values.dtype)
        for i, row in enumerate(rows.tolist()):
            start, end = self.starts[row], self.starts[row + 1]
            self.values[start:end] = both[i, : end - start]
        self.stored[rows] = 1
