"""Drafter checkpoints: bit-equal after a round trip, and nothing dropped or made up in silence."""

from __future__ import annotations

import pytest
import torch
from drafters import config, noise, random_drafter
from safetensors.torch import load_file, save_file

from carryover.drafter.modeling import Drafter
from carryover.errors import InputError

KINDS = [
    {},
    {"markov_rank": 6, "slots": "next_token", "confidence": True},
    {"markov_rank": 6, "markov_kind": "gated", "carry": "embedding"},
    {"markov_rank": 6, "markov_kind": "rnn", "carry": "projector"},
    {"carry": "projector", "carry_projector": "bottleneck", "attention_bias": True},
    {"carry": "hint", "carry_hint": "target_top1"},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_is_bit_equal(kind, dtype, tmp_path):
    drafter = random_drafter(**kind).to(dtype)
    drafter.save_pretrained(tmp_path)
    for again in (Drafter.from_pretrained(tmp_path), Drafter.from_tensors(drafter.config, drafter.state_dict())):
        ours, theirs = drafter.state_dict(), again.state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[n], theirs[n]) and ours[n].dtype == theirs[n].dtype for n in ours)
        assert torch.equal(again.rotary.inv_freq, random_drafter().rotary.inv_freq)
        assert not again.training


@pytest.mark.parametrize("damage", ["missing", "extra", "shape"])
def test_from_pretrained_is_strict(damage, tmp_path):
    random_drafter(carry="embedding").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if damage == "missing":
        del tensors["carry.embedding"]
    elif damage == "extra":
        tensors["sinks.weight"] = torch.zeros(3)
    else:
        tensors["carry.embedding"] = torch.zeros(31)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="sinks.weight" if damage == "extra" else "carry.embedding"):
        Drafter.from_pretrained(tmp_path)


def test_from_tensors_is_strict():
    c, good = config(), random_drafter().state_dict()
    with pytest.raises(InputError, match=r"lacks the tensor 'fc.weight'"):
        Drafter.from_tensors(c, {n: t for n, t in good.items() if n != "fc.weight"})
    with pytest.raises(InputError, match=r"holds the tensor 'layers.2.mlp.up_proj.weight'"):
        Drafter.from_tensors(c, {**good, "layers.2.mlp.up_proj.weight": torch.zeros(1)})
    with pytest.raises(InputError, match=r"'norm.weight' has shape \[31\], but its config calls for \[32\]"):
        Drafter.from_tensors(c, {**good, "norm.weight": torch.zeros(31)})
    with pytest.raises(InputError, match=r"'norm.weight' is stored as torch.int8"):
        Drafter.from_tensors(c, {**good, "norm.weight": torch.zeros(32, dtype=torch.int8)})


def test_tensors_of_a_loaded_drafter_are_trainable():
    drafter = Drafter.from_tensors(config(), random_drafter().state_dict())
    drafter.context(noise(1, 2, 96)).sum().backward()
    assert drafter.fc.weight.grad is not None
