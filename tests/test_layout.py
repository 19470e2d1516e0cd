"""How weights lie in memory changes no value, no checkpoint and no product."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drafters import random_drafter
from torch import nn

from carryover.formats import load_drafter, save_drafter
from carryover.layout import store_by_input, tall_product


def test_weights_are_stored_by_input_with_the_same_values_where_it_pays() -> None:
    layers = nn.ModuleDict({"a": nn.Linear(5, 7), "b": nn.Linear(6, 3, bias=False), "c": nn.Linear(4, 4).bfloat16()})
    before = {name: weight.clone() for name, weight in layers.state_dict().items()}
    x = torch.randn(3, 5)
    out = layers["a"](x)
    store_by_input(layers)
    assert layers["a"].weight.t().is_contiguous() and layers["b"].weight.t().is_contiguous()
    assert layers["c"].weight.is_contiguous()
    assert all(torch.equal(before[name], weight) for name, weight in layers.state_dict().items())
    assert torch.allclose(layers["a"](x), out, atol=1e-6)


def test_a_loaded_drafter_is_saved_as_it_was(tmp_path: Path) -> None:
    save_drafter(random_drafter(carry="projector", markov_rank=4), tmp_path / "a")
    loaded = load_drafter(tmp_path / "a")
    assert loaded.fc.weight.t().is_contiguous()
    save_drafter(loaded, tmp_path / "b")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 8, 15, 16, 17])
def test_filled_up_products_are_products(rows: int, bias: bool) -> None:
    weight, offset = torch.randn(50, 6), torch.randn(50) if bias else None
    block = torch.randn(2, rows + 1, 6)
    expected = torch.einsum("bri,oi->bro", block[:, 1:], weight) + (offset if offset is not None else 0)
    for x, y in ((block[:, 1:], expected), (block[:1, 1:], expected[:1]), (block[0, 1:], expected[0])):
        assert torch.allclose(tall_product(x, weight, offset), y, atol=1e-5)


def test_gradient_reaches_the_rows() -> None:
    x, weight = torch.randn(1, 9, 6, requires_grad=True), torch.randn(50, 6)
    tall_product(x, weight).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, weight.sum(0).expand(1, 9, 6), atol=1e-5)
