"""Processed distributions equal transformers' own, and draws follow them."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from carryover.decode.sampling import Sampling, draw
from carryover.errors import InputError

SETTINGS = [
    (t, k, p, m) for t in (0.3, 1.0, 1.7) for k in (0, 1, 5, 500) for p in (1.0, 0.8, 0.05) for m in (0.0, 0.1, 1.0)
]


def transformers_probabilities(logits, temperature, top_k, top_p, min_p):
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    return warpers(None, logits).softmax(-1)


@pytest.mark.parametrize("values", ["spread", "tied"])
def test_equal_to_transformers(values):
    torch.manual_seed(0)
    logits = torch.randn(16, 33) * 3 if values == "spread" else torch.randint(0, 4, (16, 33)).float()
    for setting in SETTINGS:
        ours = Sampling(*setting).probabilities(logits)
        assert torch.equal(ours, transformers_probabilities(logits, *setting)), setting
        assert torch.allclose(ours.sum(-1), torch.ones(16))


def test_any_leading_shape_and_dtype():
    sampling = Sampling(0.7, 6, 0.9, 0.05)
    logits = torch.randn(2, 3, 20)
    rows = torch.stack([sampling.probabilities(row) for row in logits.flatten(0, 1)]).view_as(logits)
    assert torch.allclose(sampling.probabilities(logits), rows)
    half = sampling.probabilities(logits.bfloat16())
    assert half.dtype == torch.float32
    assert torch.equal(half, sampling.probabilities(logits.bfloat16().float()))


def test_greedy_is_a_one_hot_argmax():
    logits = torch.randn(3, 4, 9)
    greedy = Sampling(0.0, top_k=3, top_p=0.5, min_p=0.2)
    assert greedy.greedy and not Sampling(0.1).greedy
    assert torch.equal(greedy.probabilities(logits).argmax(-1), logits.argmax(-1))
    assert torch.equal(greedy.probabilities(logits).sum(-1), torch.ones(3, 4))
    assert torch.equal(greedy.choose(logits), logits.argmax(-1))


def test_draws_follow_the_weights():
    weights = torch.tensor([0.0, 1.0, 2.0, 0.0, 5.0])
    drawn = draw(weights.expand(40_000, -1), torch.Generator().manual_seed(1))
    counts = drawn.bincount(minlength=5)
    assert counts[0] == counts[3] == 0
    assert chisquare(counts[weights > 0], weights[weights > 0] / 8 * 40_000).pvalue > 1e-3


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_a_draw_at_the_very_edge_has_weight(u, monkeypatch):
    """Edges of the unit interval, and the edge between two tokens: what is drawn could be drawn."""
    monkeypatch.setattr(torch, "rand", lambda shape, **kw: torch.full(shape, u, dtype=kw["dtype"]))
    weights = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0], [0.0, 0.0, 3.0, 0.0, 3.0]])
    assert draw(weights).tolist() == ([1, 2] if u == 0 else [3, 4])


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000, 49_152])
def test_a_draw_is_the_inverse_of_the_running_sum(size):
    """However many chunks it is computed in, and never a token of weight zero."""
    generator = torch.Generator().manual_seed(2)
    weights = torch.rand(3, 40, size, generator=generator) ** 8
    weights[torch.rand(weights.shape, generator=generator) < 0.7] = 0
    weights[..., size // 2] += 1e-6
    drawn = draw(weights, torch.Generator().manual_seed(3))
    u = torch.rand((3, 40, 1), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    cumulative = weights.double().cumsum(-1)
    assert torch.equal(drawn, (cumulative <= u * cumulative[..., -1:]).sum(-1))
    assert (weights.gather(-1, drawn[..., None]) > 0).all()


def test_choose_depends_on_the_generator_only():
    sampling, logits = Sampling(1.0), torch.randn(64, 50)
    first, again, other = (sampling.choose(logits, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1e-40},
        {"temperature": 0.0009},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"min_p": float("nan")},
    ],
)
def test_settings_out_of_range_are_refused(setting):
    with pytest.raises(InputError, match=next(iter(setting))):
        Sampling(**setting)
