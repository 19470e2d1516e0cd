"""The drafter's forward: against the slow version, many anchors against one, dense against flex masks, and no leak."""

from __future__ import annotations

import pytest
import torch
from drafters import noise, random_drafter, slow_block

from carryover.drafter.backbone import DraftRotaryEmbedding, RowKeyValues
from carryover.drafter.modeling import Drafter
from carryover.rows import block_rows, carry_rows, concat, context_rows

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
LAYERS = {
    "full": {},
    "biased": {"attention_bias": True},
    "sliding": SLIDING,
    "sliding causal": {**SLIDING, "sliding_causal": True},
    "from anchor": {**SLIDING, "sliding_window_from_anchor": True, "sliding_causal": True},
}
S, B, P = 20, 5, 4
ANCHORS = [9, 10, 12, 17]  # blocks overlap
ACCEPTED = [0, 3, 4, 1]  # of the round before; 4 of 4 leaves no carry


def train_inputs(drafter: Drafter, carry: bool, seed: int = 0) -> dict:
    """All anchors in one packed row of one document, as training lays them out. Carry rows come from the round
    before."""
    anchors = torch.tensor([ANCHORS])
    document, accepted = torch.zeros_like(anchors), torch.tensor([ACCEPTED])
    context = torch.arange(S)[None]
    block = block_rows(anchors, document, B)
    carried = carry_rows(anchors - accepted - 1, document, accepted, P)
    parts = [context_rows(context, torch.zeros_like(context)), *([carried] if carry else []), block]
    inputs = {
        "block": noise(1, len(ANCHORS) * B, 32, seed=seed + 1),
        "block_positions": block.position,
        "masks": drafter.masks(block, concat(*parts)),
        "features": noise(1, S, 96, seed=seed + 2),
        "positions": context,
    }
    if carry:
        inputs |= {
            "carry_features": noise(1, len(ANCHORS) * P, 96, seed=seed + 3),
            "carry_positions": carried.position,
        }
    return inputs


def single_anchor(drafter: Drafter, inputs: dict, i: int, carry: bool) -> torch.Tensor:
    """Anchor i alone, as decoding does it: its context, its carry rows, its block and nothing else, so no mask."""
    anchor, n = ANCHORS[i], ACCEPTED[i]
    rows, at = drafter.context(inputs["features"][:, :anchor]), torch.arange(anchor)[None]
    if carry and n < P:
        mine = inputs["carry_features"][:, i * P + n : (i + 1) * P]
        rows = torch.cat((rows, drafter.carried(mine)), dim=1)
        at = torch.cat(
            (at, torch.arange(anchor, anchor + P - n)[None]), dim=1
        )  # the first carried row sits on the anchor
    block = inputs["block"][:, i * B : (i + 1) * B]
    return drafter.block(block, torch.arange(anchor, anchor + B)[None], RowKeyValues(drafter.key_values(rows, at)))


@pytest.mark.parametrize("carry", [False, True])
@pytest.mark.parametrize("layers", LAYERS)
@torch.no_grad()
def test_forward_of_all_anchors_is_the_slow_block_of_each(layers, carry):
    drafter = random_drafter(carry="embedding" if carry else "none", **LAYERS[layers])
    inputs = train_inputs(drafter, carry)
    hidden = drafter(**inputs)
    for i, (anchor, n) in enumerate(zip(ANCHORS, ACCEPTED, strict=True)):
        rows = drafter.carried(inputs["carry_features"][0, i * P + n : (i + 1) * P]) if carry else None
        expected = slow_block(
            drafter,
            inputs["features"][0],
            list(range(S)),
            inputs["block"][0, i * B : (i + 1) * B],
            anchor,
            rows,
            list(range(anchor, anchor + P - n)),
        )
        torch.testing.assert_close(hidden[0, i * B : (i + 1) * B], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("carry", [False, True])
@torch.no_grad()
def test_many_anchors_with_a_mask_equal_each_alone_without(carry):
    drafter = random_drafter(carry="embedding" if carry else "none")
    inputs = train_inputs(drafter, carry)
    hidden = drafter(**inputs)
    for i in range(len(ANCHORS)):
        alone = single_anchor(drafter, inputs, i, carry)
        assert (hidden[:, i * B : (i + 1) * B] - alone).abs().max() < 1e-5


@pytest.mark.parametrize("layers", LAYERS)
@torch.no_grad()
def test_nothing_at_or_after_an_anchor_matters_to_it(layers):
    drafter = random_drafter(carry="embedding", **LAYERS[layers])
    inputs = train_inputs(drafter, carry=True)
    before = drafter(**inputs)
    for i, (anchor, n) in enumerate(zip(ANCHORS, ACCEPTED, strict=True)):
        changed = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        changed["features"][:, anchor:] += 10
        mine = torch.zeros(len(ANCHORS) * P, dtype=torch.bool)
        mine[i * P + n : (i + 1) * P] = True  # its own rejected rows; not those of others, nor its accepted ones
        changed["carry_features"][:, ~mine] += 10
        others = torch.ones(len(ANCHORS) * B, dtype=torch.bool)
        others[i * B : (i + 1) * B] = False
        changed["block"][:, others] += 10
        after = drafter(**changed)
        assert torch.equal(before[:, ~others], after[:, ~others])
        assert not torch.equal(before[:, others], after[:, others])
        own = {**inputs, "carry_features": inputs["carry_features"].clone()}
        own["carry_features"][:, mine] += 10
        assert torch.equal(drafter(**own)[:, ~others], before[:, ~others]) == (n == P)  # its own carry does matter
        last = {**inputs, "features": inputs["features"].clone()}
        last["features"][:, anchor - 1] += 10
        assert not torch.equal(drafter(**last)[:, ~others], before[:, ~others])


@pytest.mark.parametrize("layers", ["full", "sliding", "from anchor"])
@torch.no_grad()
def test_flex_attention_equals_dense(layers):
    drafter = random_drafter(carry="embedding", **LAYERS[layers])
    inputs = train_inputs(drafter, carry=True)
    anchors = torch.tensor([ANCHORS])
    document, accepted = torch.zeros_like(anchors), torch.tensor([ACCEPTED])
    block, context = (
        block_rows(anchors, document, B),
        context_rows(inputs["positions"], torch.zeros(1, S, dtype=torch.long)),
    )
    keys = concat(context, carry_rows(anchors - accepted - 1, document, accepted, P), block)
    flexed = drafter(**{**inputs, "masks": drafter.masks(block, keys, use_flex=True)})
    torch.testing.assert_close(flexed, drafter(**inputs), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_carry_rows_keep_their_own_positions():
    """RoPE is relative: moving context, carry and block together changes nothing, moving carry rows alone does."""
    drafter = random_drafter(carry="embedding")
    features, carried, block = noise(1, 6, 96), noise(1, 3, 96, seed=2), noise(1, B, 32, seed=3)

    def run(context_at: int, carry_at: int, block_at: int) -> torch.Tensor:
        rows = torch.cat((drafter.context(features), drafter.carried(carried)), dim=1)
        at = torch.cat((torch.arange(6) + context_at, torch.arange(3) + carry_at))[None]
        kv = RowKeyValues(drafter.key_values(rows, at))
        return drafter.block(block, torch.arange(block_at, block_at + B)[None], kv)

    torch.testing.assert_close(run(0, 6, 6), run(50, 56, 56), atol=1e-5, rtol=1e-4)
    assert (run(0, 6, 6) - run(0, 7, 6)).abs().max() > 1e-3


def test_gradient_reaches_everything_the_carry_pass_uses():
    drafter = random_drafter(carry="embedding").train()
    drafter(**train_inputs(drafter, carry=True)).square().sum().backward()
    assert [n for n, p in drafter.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_block_tokens_are_the_anchor_and_masks():
    drafter = random_drafter()
    assert drafter.block_tokens(torch.tensor([[3, 4]])).tolist() == [[[3, 7, 7, 7, 7], [4, 7, 7, 7, 7]]]


def test_proposing_rows_in_both_conventions():
    hidden = noise(1, 5, 32)
    assert torch.equal(random_drafter(slots="fill_in").proposing(hidden), hidden[:, 1:])
    assert torch.equal(random_drafter(slots="next_token").proposing(hidden), hidden)


def test_rope_frequencies_survive_a_cast():
    exact = random_drafter()
    cast = random_drafter().to(torch.bfloat16)
    assert isinstance(cast.rotary, DraftRotaryEmbedding)
    assert cast.dtype == torch.bfloat16
    assert torch.equal(cast.rotary.inv_freq, exact.rotary.inv_freq)
    assert cast.rotary.inv_freq.dtype == torch.float32
    expected = torch.tensor([10000.0 ** (-2 * i / 8) for i in range(4)])
    torch.testing.assert_close(exact.rotary.inv_freq, expected)
