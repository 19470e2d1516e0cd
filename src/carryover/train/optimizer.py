"""Muon for the matrices of the draft layers, AdamW for everything else, as one optimizer with one learning rate.

Muon's update is scaled to AdamW's root mean square, so the same peak learning rate serves both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..muon import Muon


class MuonAdamW(torch.optim.Optimizer):
    """`matrices` go to Muon, `others` (norms, embeddings, vectors, vocabulary-sized matrices) to AdamW."""

    def __init__(
        self, matrices: list[nn.Parameter], others: list[nn.Parameter], lr: float, weight_decay: float
    ) -> None:
        self.muon = Muon(matrices, lr=lr, weight_decay=weight_decay)
        self.adamw = torch.optim.AdamW(others, lr=lr, weight_decay=0.0, betas=(0.9, 0.95))
        super().__init__(
            self.muon.param_groups + self.adamw.param_groups, {}
        )  # shares the group dicts, so one lr rules

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
        self.muon.step(closure)
        self.adamw.step()

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.muon.load_state_dict(state_dict["muon"])
        self.adamw.load_state_dict(state_dict["adamw"])
        self.param_groups = self.muon.param_groups + self.adamw.param_groups


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices for Muon, others): the weights of linear layers inside the backbone, and the rest."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        inner = parameter.ndim == 2 and not name.startswith("markov_head") and not name.startswith("confidence_head")
        (matrices if inner else others).append(parameter)
    return matrices, others
