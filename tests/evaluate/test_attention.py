"""Attention to carry rows: the explicit weights are those the draft used, and their sums are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from drafters import random_drafter
from tiny import tiny_target
from torch import Tensor

from carryover.decode.engine import Batch, Engine, Request
from carryover.decode.trace import Generation
from carryover.drafter.modeling import Drafter
from carryover.evaluate.attention import RECENT, add, attention, attention_sums, attention_weights, watched
from carryover.target import Target

PROMPT = [3, 1, 4, 1, 5]
SMALL = {"vocab_size": 8, "num_target_layers": 3, "target_layer_ids": [-1, 1], "mask_token_id": 2, "block_size": 4}
LAYERS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5},
    "causal": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "sliding_causal": True},
}


def make_drafter(**overrides: Any) -> Drafter:
    return random_drafter(3, **{**SMALL, "carry": "embedding", **overrides}).requires_grad_(False)


def begin(engine: Engine, ids: list[int]) -> Batch:
    prompt = Request(ids, 20)
    batch = engine.new_batch([prompt], 1)
    assert engine.join(batch, prompt, Generation(len(ids)))
    return batch


@pytest.fixture(scope="module")
def small() -> Target:
    return tiny_target("llama", 8, 3, 16, eos_token_id=None, tie_word_embeddings=False)


@pytest.mark.parametrize("layers", LAYERS)
def test_weights_times_values_are_the_module_s_output(small: Target, layers: str) -> None:
    drafter = make_drafter(attention_bias=True, **LAYERS[layers])
    engine = Engine(small, drafter)
    batch = begin(engine, PROMPT)
    engine.round(batch)
    assert batch.requests[0].carried
    expected, outputs, weights = engine.draft_states(batch), [], {}

    def keep(module: Any, args: Any, output: Tensor) -> None:
        _, _, layer, cache, _ = args
        outputs.append((module, output, cache.window.read(cache.layers[layer])[1]))

    handles = [layer.self_attn.register_forward_hook(keep) for layer in drafter.layers]
    with watched(drafter, lambda layer, w: weights.update({layer: w})):
        assert torch.equal(engine.draft_states(batch), expected)  # watching changes nothing
    for handle in handles:
        handle.remove()
    assert len(outputs) == len(weights) == 2
    for layer, (module, output, values) in enumerate(outputs):
        assert torch.allclose(weights[layer].sum(-1), torch.ones(1, 4, drafter.config.block_size))
        values = values.repeat_interleave(2, dim=1)  # 4 heads share 2
        mixed = (weights[layer] @ values).transpose(1, 2).flatten(2)
        assert torch.allclose(module.o_proj(mixed), output, atol=1e-6)
    engine.draft_states(batch)
    assert len(outputs) == 2  # no hook is left behind


def test_weights_by_hand() -> None:
    module: Any = make_drafter().layers[0].self_attn  # head size 8
    q = torch.zeros(1, 2, 1, 8)
    q[0, 0, 0, 0], q[0, 1, 0, 1] = 8**0.5, 2 * 8**0.5
    k = torch.zeros(1, 1, 3, 8)
    k[0, 0, 0, 0], k[0, 0, 1, 1] = np.log(2), np.log(3)
    found = attention_weights(module, q, k, None)
    assert torch.allclose(found[0, :, 0], torch.tensor([[2 / 4, 1 / 4, 1 / 4], [1 / 11, 9 / 11, 1 / 11]]))
    masked = attention_weights(module, q, k, torch.tensor([True, False, True]))
    assert torch.allclose(masked[0, :, 0], torch.tensor([[2 / 3, 0, 1 / 3], [1 / 2, 0, 1 / 2]]))


def test_sums_row_by_row(small: Target) -> None:
    """Against a loop over layers, heads, slots and rows, at an anchor with more than 16 rows and one with fewer."""
    drafter = make_drafter(block_size=5)
    engine = Engine(small, drafter)
    for prompt in (PROMPT, PROMPT * 5):
        batch = begin(engine, prompt)
        (round_,) = engine.round(batch)
        anchor, carried = batch.requests[0].anchor, batch.requests[0].carried
        assert carried == 4 - round_.accepted > 0
        weights: dict[int, Tensor] = {}
        with watched(drafter, lambda layer, w, weights=weights: weights.update({layer: w})):
            expected = engine.draft_states(batch)
        hidden, s = attention_sums(engine, batch)
        assert torch.equal(hidden, expected)
        assert (s["rounds"], s["carry_rows"], s["recent_rows"]) == (1, carried, min(anchor, RECENT))
        assert s["offset_rounds"].tolist() == [1] * carried + [0] * (4 - carried)
        for layer in range(2):
            for head in range(4):
                for slot in range(5):
                    row = weights[layer][0, head, slot].tolist()
                    assert len(row) == anchor + carried + 5
                    at = (layer, head, slot)
                    assert s["context"][at] == pytest.approx(sum(row[:anchor]))
                    assert s["recent"][at] == pytest.approx(sum(row[max(anchor - 16, 0) : anchor]))
                    assert s["carry"][at] == pytest.approx(sum(row[anchor : anchor + carried]))
                    assert s["block"][at] == pytest.approx(sum(row[anchor + carried :]))
            for r in range(4):
                mean = float(weights[layer][0, :, :, anchor + r].mean()) if r < carried else 0.0
                assert s["by_offset"][layer, r] == pytest.approx(mean)


def test_means_over_drafts() -> None:
    """One layer, one head, two slots; two drafts, of 2 and 1 carry rows."""

    def part(carry: list[float], recent: list[float], rows: int, by_offset: list[float]) -> dict[str, Any]:
        mass = np.array([[carry]])
        return {"rounds": 1, "carry_rows": rows, "recent_rows": 16, "carry": mass, "recent": np.array([[recent]]),
                "context": 0.5 - mass, "block": np.full_like(mass, 0.5), "by_offset": np.array([by_offset]),
                "offset_rounds": np.array([1, int(rows > 1), 0])}  # fmt: skip

    parts = [part([0.2, 0.4], [0.1, 0.3], 2, [0.1, 0.2, 0.0]), part([0.1, 0.1], [0.4, 0.2], 1, [0.1, 0.0, 0.0])]
    found = attention([add(parts[:1]), {}, add(parts[1:])])
    assert found["rounds"] == 2 and found["carry_rows"] == 1.5 and found["offset_rounds"] == [2, 1, 0]
    assert found["carry_by_layer_head_slot"] == [[pytest.approx([0.15, 0.25])]]
    assert found["carry"] == pytest.approx(0.2) and found["carry_by_head"] == [[pytest.approx(0.2)]]
    assert found["carry"] + found["context"] + found["block"] == pytest.approx(1)
    assert found["per_carry_row"] == pytest.approx((0.3 + 0.1) / 3)
    assert found["per_recent_row"] == pytest.approx((0.2 + 0.3) / 32)
    assert found["by_offset"] == [[pytest.approx(0.1), pytest.approx(0.2), None]]
