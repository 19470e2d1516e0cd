"""A drafter that starts with the target's last layers reads and writes what they do."""

from __future__ import annotations

import pytest
import torch
from helpers import tiny_drafter
from tiny import tiny_target

from carryover.errors import InputError
from carryover.train.warm_start import start_from_drafter, start_from_target


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_context_values_and_block_layers_are_those_of_the_target(family: str) -> None:
    target = tiny_target(family, layers=6)
    drafter = tiny_drafter(target, intermediate_size=48, target_layer_ids=[1, 3])  # 3 feeds layer 4, the first copied
    start_from_target(drafter, target)
    seen: dict[str, torch.Tensor] = {}
    source = target.decoder.layers[4]
    hooks = [
        source.self_attn.v_proj.register_forward_hook(lambda m, a, out: seen.update(v=out)),
        source.self_attn.k_proj.register_forward_hook(lambda m, a, out: seen.update(k=out)),
    ]
    tokens = torch.randint(6, 90, (1, 12), generator=torch.Generator().manual_seed(0))
    features = target.forward(tokens, layer_ids=drafter.config.layer_ids).features
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        context, attention = drafter.context(features), drafter.layers[0].self_attn
        assert torch.allclose(attention.v_proj(context), seen["v"], atol=1e-4)
        assert torch.allclose(attention.k_proj(context), seen["k"], atol=1e-4)
        x = torch.randn(1, 3, target.hidden_size, generator=torch.Generator().manual_seed(1))
        for layer, theirs in zip(drafter.layers, target.decoder.layers[4:], strict=True):
            mine = layer.mlp(layer.post_attention_layernorm(x))
            assert torch.allclose(mine, theirs.mlp(theirs.post_attention_layernorm(x)), atol=1e-4)
            queries = layer.self_attn.q_proj(layer.input_layernorm(x))
            assert torch.allclose(queries, theirs.self_attn.q_proj(theirs.input_layernorm(x)), atol=1e-4)
        assert torch.allclose(drafter.norm(x), target.decoder.norm(x), atol=1e-5)
        if family == "qwen3":
            heads = queries.unflatten(-1, (-1, drafter.config.head_dim))
            mine = drafter.layers[1].self_attn.q_norm(heads)
            assert torch.allclose(mine, target.decoder.layers[5].self_attn.q_norm(heads), atol=1e-5)


def test_other_shapes_are_refused_in_one_sentence() -> None:
    target = tiny_target("llama")
    with pytest.raises(InputError, match=r"mlp\.gate_proj is \[40, 32\] in the drafter and \[48, 32\] in the target"):
        start_from_target(tiny_drafter(target), target)
    with pytest.raises(InputError, match="as many layers"):
        start_from_target(tiny_drafter(target, num_hidden_layers=7), target)


def test_a_drafter_begins_where_another_of_other_slots_and_heads_ended() -> None:
    target = tiny_target("qwen3")
    markov = tiny_drafter(target, block_size=4, slots="next_token", markov_rank=8, draft_vocab_size=40)
    markov.draft_vocab = torch.arange(50)[10:]
    dflash = tiny_drafter(target, block_size=5, draft_vocab_size=40)
    start_from_drafter(dflash, markov, "there")
    theirs = markov.state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in dflash.state_dict().items())
    assert dflash.draft_vocab.tolist() == list(range(10, 50))
    assert set(theirs) - set(dflash.state_dict()) == {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({"block_size": 6}, True),
        ({"markov_rank": 4}, False),
        ({"markov_kind": "gated"}, False),
        ({"slots": "fill_in"}, False),  # the token before a position is another there
    ],
)
def test_a_markov_head_is_taken_whole_or_not_at_all(change: dict, taken: bool) -> None:
    target = tiny_target("qwen3")
    shape = {"block_size": 4, "slots": "next_token", "markov_rank": 8}
    other, drafter = tiny_drafter(target, **shape), tiny_drafter(target, **{**shape, **change})
    before = {key: value.clone() for key, value in drafter.state_dict().items()}
    start_from_drafter(drafter, other, "there")
    theirs = other.state_dict()
    for key, value in drafter.state_dict().items():
        kept = key.startswith("markov_head") and not taken
        assert torch.equal(value, before[key] if kept else theirs[key]), key


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"intermediate_size": 56}, r"layers\.0\.mlp\.down_proj\.weight is \[32, 40\] there and \[32, 56\]"),
        ({"head_dim": 4, "num_attention_heads": 8, "num_key_value_heads": 4}, "has other layers"),
        ({"attention_bias": True}, r"layers\.0\.self_attn\.k_proj\.bias is missing there"),
        ({"num_hidden_layers": 3}, "has num_hidden_layers 2, and the recipe 3"),
        ({"target_layer_ids": [0, 3]}, r"has target_layer_ids \[1, 3\], and the recipe \[0, 3\]"),
        ({"hidden_act": "gelu"}, "hidden_act silu"),
        ({"mask_token_id": 7}, "has mask_token_id"),
        ({"draft_vocab_size": 40}, "has draft_vocab_size 0, and the recipe 40"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "has rope_parameters"),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_drafter_whose_weights_mean_something_else_is_no_start(change: dict, message: str, swapped: bool) -> None:
    target = tiny_target("qwen3")
    one = tiny_drafter(target, target_layer_ids=[1, 3])
    other = tiny_drafter(target, **{"target_layer_ids": [1, 3], **change})
    with pytest.raises(InputError, match=r"drafter\.start: there has" if swapped else message):
        start_from_drafter(*((one, other) if swapped else (other, one)), "there")
