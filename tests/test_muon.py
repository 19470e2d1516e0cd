"""Muon's update is nearly the polar factor, and exactly what its polynomial makes of the singular values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from carryover import muon
from carryover.muon import EPSILON, STEPS, A, B, C, Muon, nearly_polar


def test_only_singular_values_change_and_as_the_polynomial_says():
    torch.manual_seed(0)
    matrices = torch.randn(4, 24, 56, dtype=torch.float64) * torch.tensor([1e-3, 1.0, 7.0, 1e4])[:, None, None]
    found = nearly_polar(matrices.float(), torch.float32)
    left, values, right = torch.linalg.svd(matrices / matrices.norm(dim=(1, 2), keepdim=True), full_matrices=False)
    for _ in range(STEPS):
        values = A * values + B * values**3 + C * values**5
    assert torch.allclose(found.double(), left * values[:, None] @ right, atol=2e-6)
    assert values.min() > 0.65 and values.max() < 1.22
    polar = left @ right  # the exact factor: what the update would be with all singular values one
    cosine = (found * polar).sum((1, 2)) / found.double().norm(dim=(1, 2)) / polar.norm(dim=(1, 2))
    assert cosine.min() > 0.98


def test_a_matrix_of_zeros_stays_zero():
    assert nearly_polar(torch.zeros(1, 3, 5), torch.float32).abs().max() == 0
    assert EPSILON > 0


SHAPES = [(8, 24), (24, 8), (8, 24), (16, 16), (5, 3), (3, 5), (16, 16)]


def grown(make: Any, steps: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = make(parameters)
    for _ in range(steps):
        for i, p in enumerate(parameters):
            p.grad = None if i == 6 else torch.randn_like(p)  # one of them is not trained in this run
        optimizer.step()
    return [p.detach() for p in parameters]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-2), (torch.bfloat16, 2e-2)])
def test_batched_updates_follow_torch_one_by_one(dtype: Any, tolerance: float, monkeypatch: pytest.MonkeyPatch):
    """torch iterates in bf16, so the two agree within its rounding; with the same iteration they agree closely."""
    monkeypatch.setattr(muon, "fast_dtype", lambda device: dtype)

    def theirs(p: Any) -> Any:
        return torch.optim.Muon(p, lr=0.1, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")

    ours, reference = grown(lambda p: Muon(p, lr=0.1, weight_decay=0.2)), grown(theirs)
    for mine, torchs in zip(ours, reference, strict=True):
        assert (mine - torchs).abs().max() < tolerance
    exact = "torch.optim._muon._zeropower_via_newtonschulz"
    monkeypatch.setattr(exact, lambda g, *_: polar_of(g, dtype))
    for mine, torchs in zip(ours, grown(theirs), strict=True):
        assert torch.allclose(mine, torchs, atol=1e-6 if dtype == torch.float32 else 1e-2)


def polar_of(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    lying = grad if grad.shape[0] <= grad.shape[1] else grad.T
    polar = nearly_polar(lying[None], dtype)[0]
    return polar if grad.shape[0] <= grad.shape[1] else polar.T


def test_momentum_of_torch_is_gone_on_with():
    torch.manual_seed(2)
    p = torch.nn.Parameter(torch.randn(6, 9))
    before = torch.optim.Muon([p], lr=0.1)
    p.grad = torch.randn_like(p)
    before.step()
    now = Muon([p], lr=0.1, weight_decay=0.0)
    now.load_state_dict({**now.state_dict(), "state": before.state_dict()["state"]})
    assert torch.equal(now.state[p]["momentum_buffer"], before.state[p]["momentum_buffer"])
