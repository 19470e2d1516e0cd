"""Muon, an optimizer for the matrices inside a network's layers.

It replaces the momentum of a matrix by nearly its polar factor, the nearest matrix whose singular values are all one,
scaled to AdamW's root mean square. The rule is that of `torch.optim.Muon` (`match_rms_adamw`), which iterates in bf16,
one matrix at a time: on a CPU without bf16 units that took three quarters of a training step (docs/speed.md). Here the
iteration runs in the precision that the device computes, and matrices of one shape together.

Letters: `m` matrices of one shape, `r` the smaller of their sides, `c` the larger one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .precision import fast_dtype

# One step maps every singular value s to A s + B s^3 + C s^5; five of them take what is above 0.02 into 0.66 to 1.21
# (Keller Jordan's coefficients, those of torch.optim.Muon).
A, B, C = 3.4445, -4.7750, 2.0315
STEPS = 5
EPSILON = 1e-7


def nearly_polar(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """`[m, r, c]`, r <= c, to matrices of the same singular vectors whose singular values are about one, in `dtype`."""
    x = matrices.to(dtype)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay.

    The momentum is kept under torch.optim.Muon's name, so a run that was begun with that one can be gone on with.
    """

    def __init__(self, matrices: list[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike: dict[Any, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(momentum, group["momentum"])  # Nesterov's
                alike[tuple(sorted(p.shape)), p.device].append((p, update))
            for (_, device), members in alike.items():
                # Every matrix lies on its longer side: r^2 numbers are squared in an iteration, not c^2.
                lying = torch.stack([u if u.shape[0] <= u.shape[1] else u.mT for _, u in members])
                for (p, u), polar in zip(members, nearly_polar(lying, fast_dtype(device)), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    scale = 0.2 * max(p.shape) ** 0.5
                    p.add_(polar if u.shape[0] <= u.shape[1] else polar.mT, alpha=-group["lr"] * scale)
