"""DrafterConfig: every error of `checked` is raised and names its field; unknown keys are refused; P in both
conventions."""

from __future__ import annotations

import json

import pytest
from drafters import config

from carryover.drafter.config import DrafterConfig
from carryover.drafter.modeling import Drafter
from carryover.errors import InputError


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 0}, "vocab_size must be a whole number of at least 1"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "32"}, "hidden_size must be a whole number"),
        ({"intermediate_size": -1}, "intermediate_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a number above 0, got 'x'"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be a number above 0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "rope_theta must be a number above 0"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}},
            "rope_theta must be a number above",
        ),
        ({"hidden_act": "swoosh"}, "'swoosh'"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": True}, "block_size"),
        ({"block_size": 1}, "proposes nothing"),
        ({"slots": ""}, "slots must be one of fill_in, next_token"),
        ({"slots": "anchor"}, "slots must be one of"),
        ({"markov_rank": -1}, "markov_rank"),
        ({"markov_kind": "lstm"}, "markov_kind must be one of vanilla, gated, rnn"),
        ({"carry": "kv"}, "carry must be one of"),
        ({"carry_site": "fc"}, "carry_site must be one of"),
        ({"carry_projector": "mlp"}, "carry_projector must be one of"),
        ({"carry": "hint", "carry_hint": "top2"}, "carry_hint must be one of rejected_tokens, target_top1"),
        ({"mask_token_id": -1}, "mask_token_id"),
        ({"mask_token_id": 96}, "mask_token_id 96 is no row of the target's embedding (0 to 95)"),
        ({"layer_types": ["full_attention"]}, "layer_types must name"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types must name"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window must be a number of rows"),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": -4},
            "sliding_window must be a number of rows",
        ),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": "8"}, "must be a number of rows, got '8'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "of type yarn need a factor above 0, got None"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": "2"}}, "factor above 0, got '2'"),
        ({"confidence": True}, "confidence_with_markov needs a Markov head"),
        ({"num_target_layers": -1}, "num_target_layers"),
        ({"target_layer_ids": []}, "target_layer_ids must be a non-empty list"),
        ({"target_layer_ids": [3, 1]}, "strictly increasing"),
        ({"target_layer_ids": [1, 5]}, "target layer id 5 is out of range"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type out of"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
            "rotate whole",
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}, "rotate whole"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
    ],
)
def test_checked_names_the_field(change, words):
    with pytest.raises(InputError) as error:
        config(**change).checked()
    assert words in str(error.value)
    assert str(error.value).count("\n") == 0


def test_a_drafter_is_only_built_from_a_checked_config():
    with pytest.raises(InputError, match="slots"):
        Drafter(config(slots="anchor"))


def test_good_configs_pass():
    assert config().checked().num_proposals == 4
    assert config(confidence=True, confidence_with_markov=False).checked().confidence
    assert config(num_target_layers=0, target_layer_ids=[1, 50]).checked().num_target_layers == 0
    assert config(layer_types=["full_attention", "sliding_attention"], sliding_window=4).checked()


@pytest.mark.parametrize(("slots", "first", "proposals"), [("fill_in", 1, 4), ("next_token", 0, 5)])
def test_proposals_in_both_conventions(slots, first, proposals):
    c = config(slots=slots)
    assert (c.first_slot, c.num_proposals) == (first, proposals)


def test_unknown_keys_are_refused_by_name():
    with pytest.raises(InputError, match="unknown key 'markov_rnak'"):
        DrafterConfig(markov_rnak=8)
    with pytest.raises(InputError, match="unknown key 'rope_theta'"):
        config(rope_theta=5e5)  # belongs into rope_parameters; transformers alone would drop it


def test_unknown_key_in_a_saved_config_is_refused(tmp_path):
    Drafter(config()).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "carry_gate": True}))
    with pytest.raises(InputError, match="unknown key 'carry_gate'"):
        DrafterConfig.from_pretrained(tmp_path)
    with pytest.raises(InputError, match="unknown key 'carry_gate'"):
        Drafter.from_pretrained(tmp_path)


def test_config_survives_its_own_dictionary_and_file(tmp_path):
    c = config(markov_rank=4, slots="next_token", carry="projector", carry_projector="bottleneck", sliding_window=9,
               target_name="t", target_fingerprint="ab",
               rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5})  # fmt: skip
    c.save_pretrained(tmp_path)
    for again in (DrafterConfig.from_dict(c.to_dict()), DrafterConfig.from_pretrained(tmp_path)):
        for field in DrafterConfig.__annotations__:
            assert getattr(again, field) == getattr(c, field), field


def test_only_drafters_with_hints_store_which(tmp_path):
    """What others store, and so their digest, is what it was before hints existed."""
    assert "carry_hint" not in config(carry="embedding").to_dict()
    config(carry="hint", carry_hint="target_top1").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["carry_hint"] == "target_top1"
    assert DrafterConfig.from_pretrained(tmp_path).carry_hint == "target_top1"


def test_attributes_hung_on_a_config_are_not_stored(tmp_path):
    c = config(carry="embedding")
    c.use_cache = False  # as transformers' Trainer does; readers know this one
    c.pretraining_tp = 1
    Drafter(c).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert "pretraining_tp" not in stored
    assert stored["architectures"] == ["Drafter"] and stored["model_type"] == "carryover_drafter"
    assert "transformers_version" in stored and stored["dtype"] == "float32"
    assert Drafter.from_pretrained(tmp_path).config.carry == "embedding"
