"""How weights lie in memory changes no value, no checkpoint and no product, and the fastest way is chosen once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decode.decode_helpers import make_drafter
from drafters import random_drafter
from tiny import TEXT_FAMILIES, tiny_target
from torch import nn

from carryover import weights as module
from carryover.decode.engine import Engine
from carryover.errors import InputError
from carryover.formats import decoding_drafter, save_drafter
from carryover.target import Target
from carryover.weights import (
    INPUT,
    OF_DRAFTER,
    OUTPUT,
    PACKED,
    PACKED_ALWAYS,
    PLAIN,
    STEPS,
    TIMED,
    ArrangedLinear,
    Plan,
    Products,
    Way,
    arrange,
    chosen,
    described,
    planned,
    products_of,
    restore,
    ways,
)

PLANS: list[Plan] = [
    PLAIN,
    PACKED_ALWAYS,
    (INPUT, INPUT, INPUT),
    (INPUT, Way("packed", 4), PACKED),
    (OUTPUT, PACKED, INPUT),
]


@pytest.fixture
def everything_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights as well."""
    monkeypatch.setenv(module.FORCED, "packed")
    monkeypatch.setattr(module, "SMALL", 0)


# ---- products ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_every_way_is_the_product(plan: Plan, bias: bool) -> None:
    """For all numbers of rows, whatever the shape and strides of the rows."""
    torch.manual_seed(0)
    weight, offset = torch.randn(50, 24), torch.randn(50) if bias else None
    products = Products(weight, offset, plan)
    assert torch.equal(products.weight, weight)
    for rows in range(1, 20):
        block = torch.randn(2, rows + 1, 24)
        expected = torch.einsum("bri,oi->bro", block, weight) + (0 if offset is None else offset)
        for x, y in (
            (block, expected),
            (block[:, 1:], expected[:, 1:]),
            (block[0, 1:], expected[0, 1:]),
            (block[:1, :1], expected[:1, :1]),
            (block[1, 0], expected[1, 0]),
        ):
            assert torch.allclose(products(x), y, atol=1e-5) and products(x).shape == y.shape
    assert products(torch.randn(0, 24)).shape == (0, 50)
    assert products(torch.randn(1, 0, 24)).shape == (1, 0, 50)


def test_gradient_reaches_the_rows_of_a_head() -> None:
    x, weight = torch.randn(1, 9, 6, requires_grad=True), torch.randn(50, 6)
    head = products_of(weight, None)
    head.with_gradient(x[:, 1:]).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad[:, 1:], weight.sum(0).expand(1, 8, 6), atol=1e-5)
    assert head.plain is not None and head.plain.data_ptr() == weight.data_ptr()  # not copied


@pytest.mark.usefixtures("everything_packed")
def test_rows_of_another_precision_are_computed_in_the_weights() -> None:
    """As under autocast: a frozen target computes as it would without."""
    weight, x = torch.randn(8, 16), torch.randn(3, 16).bfloat16()
    assert torch.allclose(products_of(weight, None)(x), x.float() @ weight.T, atol=1e-5)


# ---- networks ------------------------------------------------------------------------------------------------------
def states(target: Target, drafter: Any = None) -> list[list[int]]:
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]
    return [Engine(target, drafter).generate(ids, 20).tokens for ids in prompts]


@pytest.mark.usefixtures("everything_packed")
@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_a_packed_network_computes_the_same(family: str) -> None:
    """Every supported family: hidden states, plain decoding, and decoding with a packed drafter."""
    target, packed = tiny_target(family), tiny_target(family)
    arrange(packed.decoder)
    names = [n for n, m in packed.decoder.named_modules() if isinstance(m, ArrangedLinear)]
    assert len(names) == len([m for m in target.decoder.modules() if isinstance(m, nn.Linear)])
    tokens = torch.randint(10, 90, (2, 30), generator=torch.Generator().manual_seed(0))
    expected, found = (t.forward(tokens, layer_ids=(0, 2)) for t in (target, packed))  # type: ignore[arg-type]
    assert torch.allclose(expected.hidden, found.hidden, atol=3e-5)
    assert found.features is not None and expected.features is not None
    assert torch.allclose(expected.features, found.features, atol=3e-4, rtol=1e-5)
    drafter, other = make_drafter(target, carry="embedding"), make_drafter(packed, carry="embedding")
    digest = other.digest()
    arrange(other, OF_DRAFTER)
    assert other.digest() == digest
    assert states(target) == states(packed) == states(packed, other) == states(target, drafter)


@pytest.mark.usefixtures("everything_packed")
def test_what_was_arranged_is_restored_and_saved_as_it_was() -> None:
    torch.manual_seed(0)
    layers = nn.ModuleDict({
        "attention": nn.ModuleDict({n: nn.Linear(8, o) for n, o in (("q_proj", 8), ("k_proj", 4), ("v_proj", 4))}),
        "odd": nn.ModuleDict({"q_proj": nn.Linear(8, 8), "k_proj": nn.Linear(6, 4), "v_proj": nn.Linear(8, 4)}),
        "short": nn.Linear(4, 4).half(), "b": nn.Linear(6, 3, bias=False),
    }).requires_grad_(False)  # fmt: skip
    before = {name: weight.clone() for name, weight in layers.state_dict().items()}
    arrange(layers)
    kinds = {name: type(layer) for name, layer in layers.named_modules()}
    assert kinds["attention.k_proj"] is ArrangedLinear and kinds["short"] is nn.Linear
    assert layers["attention"]["q_proj"].together is layers["attention"]["v_proj"].together
    assert layers["odd"]["q_proj"].together is not layers["odd"]["v_proj"].together  # they cannot read the same rows
    for x in (torch.randn(1, 8), torch.randn(3, 8)):
        for name in ("q_proj", "k_proj", "v_proj"):
            expected = x @ before[f"attention.{name}.weight"].T + before[f"attention.{name}.bias"]
            assert torch.allclose(layers["attention"][name](x), expected, atol=1e-6)
    for _ in range(2):
        state = layers.state_dict()
        assert state.keys() == before.keys() and all(torch.equal(state[name], before[name]) for name in before)
        restore(layers)
    assert {type(layer) for layer in layers.modules() if hasattr(layer, "weight")} == {nn.Linear}


@pytest.mark.usefixtures("everything_packed")
def test_layers_together_never_answer_for_other_rows() -> None:
    """In any order, when some are not asked, and when rows are asked about twice."""
    torch.manual_seed(1)
    owner = nn.ModuleDict({n: nn.Linear(8, o, bias=False) for n, o in (("q_proj", 8), ("k_proj", 4), ("v_proj", 5))})
    owner.requires_grad_(False)
    weights = {name: layer.weight.clone() for name, layer in owner.items()}
    arrange(owner)
    rows, generator = [torch.randn(2, 8) for _ in range(3)], torch.Generator().manual_seed(0)
    for _ in range(200):
        x = rows[int(torch.randint(3, (), generator=generator))]
        name = list(owner)[int(torch.randint(3, (), generator=generator))]
        assert torch.allclose(owner[name](x), x @ weights[name].T, atol=1e-6)


@pytest.mark.usefixtures("everything_packed")
def test_a_packed_drafter_is_saved_as_it_was(tmp_path: Path) -> None:
    target = tiny_target("llama")
    drafter = make_drafter(target, carry="projector", markov_rank=4)
    save_drafter(drafter, tmp_path / "a")
    loaded = decoding_drafter(tmp_path / "a", target)
    assert isinstance(loaded.fc, ArrangedLinear)
    save_drafter(loaded, tmp_path / "b")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


@pytest.mark.usefixtures("everything_packed")
def test_a_loaded_target_is_packed_and_still_itself(tmp_path: Path) -> None:
    """Its fingerprint is of the weights, its head is read by training, and its layers can start a drafter."""
    target = tiny_target("qwen3")
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    loaded = Target.load(tmp_path)
    layer = loaded.decoder.layers[0].mlp.down_proj
    assert isinstance(layer, ArrangedLinear) and loaded.fingerprint() == target.fingerprint()
    assert "32 to 96" in loaded.weights()["ways"]  # the head too: its shape is not timed within the first token
    assert torch.equal(layer.weight, target.decoder.layers[0].mlp.down_proj.weight)
    hidden = torch.randn(2, 5, 32, requires_grad=True)
    loaded.head(hidden).sum().backward()
    assert hidden.grad is not None and hidden.grad.abs().sum() > 0
    assert torch.allclose(loaded.head(hidden.detach()), target.head(hidden.detach()), atol=1e-5)
    some = torch.tensor([3, 50, 90])
    assert torch.allclose(loaded.head_of(some)(hidden), target.head(hidden)[..., some], atol=1e-5)
    assert loaded.weights()["forced"] == "packed" and loaded.weights()["ways"]


# ---- choosing ------------------------------------------------------------------------------------------------------
def timings(**seconds: tuple[float, float, float]) -> list[dict[Way, float]]:
    return [{Way(name): values[step] for name, values in seconds.items()} for step in range(len(STEPS))]


def test_the_fastest_storage_is_chosen_and_a_second_one_where_it_pays() -> None:
    one = timings(output=(2.0, 3.0, 3.0), input=(1.5, 2.5, 3.0), packed=(1.4, 1.6, 2.0))
    assert chosen(one) == (PACKED, PACKED, PACKED)
    slightly = timings(output=(2.0, 3.0, 3.0), input=(1.3, 2.5, 3.0), packed=(1.4, 1.6, 2.0))
    assert chosen(slightly) == (PACKED, PACKED, PACKED)  # 3 % for twice the memory
    clearly = timings(output=(2.0, 3.0, 3.0), input=(1.0, 2.5, 3.0), packed=(1.4, 1.6, 2.0))
    assert chosen(clearly) == (INPUT, PACKED, PACKED)
    filled = [{**found, Way("packed", 4): 1.0} if i < 2 else found for i, found in enumerate(slightly)]
    assert chosen(filled) == (Way("packed", 4), Way("packed", 4), PACKED)
    assert chosen(timings(output=(1.0, 1.0, 1.0), packed=(2.0, 2.0, 2.0))) == PLAIN


def test_a_machine_times_each_shape_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(module.FORCED)
    monkeypatch.setenv("CARRYOVER_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "SMALL", 0)
    asked: list[Any] = []

    def timed(shape: Any, budget: float) -> list[dict[Way, float]]:
        asked.append(shape)
        return timings(output=(2.0, 2.0, 2.0), packed=(1.0, 1.0, 1.0))

    monkeypatch.setattr(module, "seconds_of", timed)
    a, b = (8, 24, torch.float32), (24, 8, torch.float32)
    packed = (PACKED, PACKED, PACKED)
    assert planned([a, a]) == [packed, packed] and asked == [a]
    assert planned([b, a]) == [packed, packed] and asked == [a, b]
    torch.set_num_threads(2)  # another machine, as far as timings go
    try:
        planned([a])
    finally:
        torch.set_num_threads(1)
    assert asked == [a, b, a]
    assert planned([a, b]) == [packed, packed] and len(asked) == 3
    for damage in ("{", "[]", json.dumps({module._machine(): {"8 24 float32": [["packed"]]}})):
        (tmp_path / "weights.json").write_text(damage)
        assert planned([a]) == [packed]
    assert len(asked) == 6
    monkeypatch.setenv("CARRYOVER_CACHE", "/proc/nowhere")  # nothing can be kept there
    assert planned([a]) == [packed] and len(asked) == 7
    assert planned([(8, 24, torch.float16)]) == [PLAIN] and planned([a], "cuda") == [PLAIN]


def test_real_timings_have_every_way() -> None:
    found = module.seconds_of((64, 96, torch.float32), 0.01)
    assert [set(times) for times in found] == [set(ways(step, torch.float32)) for step in range(len(TIMED))]
    assert all(seconds > 0 for times in found for seconds in times.values())


def test_a_forced_way_is_taken_and_a_mistyped_one_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "seconds_of", lambda *_: pytest.fail("timed"))
    big, small = (512, 512, torch.float32), (8, 8, torch.float32)
    for value, plan in (("plain", PLAIN), ("packed", PACKED_ALWAYS)):
        monkeypatch.setenv(module.FORCED, value)
        assert planned([big, small]) == [plan, PLAIN]
    monkeypatch.setenv(module.FORCED, "Packed")
    with pytest.raises(InputError, match="CARRYOVER_WEIGHTS must be plain or packed"):
        planned([big])


def test_what_is_kept_is_stated() -> None:
    """Megabytes of second copies, beside a head that is kept as it is anyway."""
    layer = nn.Linear(1000, 1000, bias=False).requires_grad_(False)
    both: Plan = (INPUT, PACKED, PACKED)
    owner = nn.ModuleDict({"a": ArrangedLinear(layer, module.Together(Products(layer.weight, None, both), [1000]), 0)})
    head = Products(layer.weight, None, both, keep_plain=True)
    assert described(owner)["extra_megabytes"] == 4 and described(owner, head)["extra_megabytes"] == 12
    assert described(owner)["ways"] == {"1000 to 1000": "from 1: input; from 2: packed"}
    assert random_drafter().fc.weight.is_contiguous()
