"""The carry interface: what tells the rows of rejected tokens apart from the context rows of committed ones.

Both are target features fused by `hidden_norm(fc(h))`, once per row, read unchanged by every draft layer; carry rows
get a mark on the way. The interface without rows, token hints, is here too.

Letters: `M` captured layers, `Dt` target hidden size, `D` drafter hidden size, `P` proposals, `B` block rows. Source:
SPEC 1.1, 6.4-E and 7, paper 2.1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .config import DrafterConfig


class CarryMark(nn.Module):
    """What distinguishes carry rows from context rows; fresh, nothing: a new Carryover drafter is its baseline.

    `embedding` holds one vector of size D, zero at the start; `projector` holds a second fusion, a copy of `fc` at the
    start (`fc_copy`) or a zero-initialised bottleneck correction through D/2 that is added to it (`bottleneck`).
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width, d = len(config.layer_ids) * (config.target_hidden_size or 0), config.hidden_size
        self.kind, self.site = config.carry, config.carry_site
        self.bottleneck = config.carry == "projector" and config.carry_projector == "bottleneck"
        if config.carry == "embedding":
            self.embedding = nn.Parameter(torch.zeros(d))
        elif self.bottleneck:
            self.down = nn.Linear(width, d // 2, bias=False)
            self.up = nn.Linear(d // 2, d, bias=False)
        elif config.carry == "projector":
            self.fc = nn.Linear(width, d, bias=False)

    @torch.no_grad()
    def start_from(self, fc: nn.Linear) -> None:
        """Initialises the mark so that carry rows are fused exactly like context rows."""
        if self.kind == "embedding":
            self.embedding.zero_()
        elif self.bottleneck:
            self.up.weight.zero_()
        elif self.kind == "projector":
            self.fc.weight.copy_(fc.weight)

    def fuse(self, features: Tensor, fc: nn.Linear, norm: nn.Module, carried: Tensor) -> Tensor:
        """`[..., M*Dt]` features to fused rows `[..., D]`, marked where `carried [..., 1]` (bool)."""
        fused = fc(features)
        if self.bottleneck:
            return norm(torch.where(carried, fused + self.up(self.down(features)), fused))
        if self.kind == "projector":
            return norm(torch.where(carried, self.fc(features), fused))
        if self.kind == "plain":
            return norm(fused)
        mark = torch.where(carried, self.embedding, 0)
        return norm(fused) + mark if self.site == "post_norm" else norm(fused + mark)


class TokenHints(nn.Module):
    """Rejected tokens instead of rejected states: a masked slot gets `scale` times the embedding of the token that the
    last verification offers for the slot's position. `scale` is one number, zero at the start: a fresh one is nothing.

    The row of proposal p_j, verified at anchor a, offers p_j itself for position a + j (`rejected_tokens`), or the
    target's first choice behind it for position a + j + 1 (`target_top1`).
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.block_size = config.block_size
        self.ahead = 1 if config.carry_hint == "target_top1" else 0
        self.scale = nn.Parameter(torch.zeros(1))

    @torch.no_grad()
    def start_from(self, fc: nn.Linear) -> None:
        """As `CarryMark` does."""
        self.scale.zero_()

    def aligned(self, tokens: Tensor, accepted: Tensor, seen: Tensor) -> Tensor:
        """What rows 1..P of a verification offer, `[..., P]`, to what each slot of the next block gets, `[..., B]`, -1
        for nothing.

        accepted, seen: `[...]`, n, and how many rejected rows are read, from row n + 1 on. The next anchor is
        a + n + 1, so slot k has the position that row n + 1 + k offers a token for, or n + k where it is one ahead;
        slot 0 holds the anchor and keeps it.
        """
        slot = torch.arange(self.block_size, device=tokens.device)
        rejected = slot - self.ahead
        there = (slot > 0) & (rejected < seen[..., None])
        row = (accepted[..., None] + rejected).clamp(0, tokens.shape[-1] - 1)
        return torch.where(there, tokens.gather(-1, row), -1)

    def forward(self, block: Tensor, hints: Tensor) -> Tensor:
        """Embedded slots and embedded hints, `[..., B, D]` both, the latter zero where there is none."""
        return block + self.scale * hints
