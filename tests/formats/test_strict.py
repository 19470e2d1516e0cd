"""Damaged, foreign and unfitting checkpoints: each is refused in one sentence that names what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from drafters import config, random_drafter
from safetensors.torch import load_file, save_file
from tiny import tiny_target

from carryover.errors import InputError
from carryover.formats import check_fits, detect_format, files, load_drafter, mismatches, save_drafter

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.fixture
def folder(tmp_path):
    """Copies a recorded checkpoint so that a test may spoil it."""
    return lambda case: Path(shutil.copytree(GOLDEN / case, tmp_path / case))


def refusal(path) -> str:
    with pytest.raises(InputError) as error:
        load_drafter(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def edit(folder: Path, change) -> None:
    raw = json.loads((folder / "config.json").read_text())
    change(raw)
    (folder / "config.json").write_text(json.dumps(raw))


def set_keys(**changes):
    return lambda raw: raw.update(changes)


def in_dflash(**changes):
    return lambda raw: raw["dflash_config"].update(changes)


def in_layers(**changes):
    return lambda raw: raw["transformer_layer_config"].update(changes)


def without(key):
    return lambda raw: raw.pop(key)


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        ("zlab_dflash", set_keys(architectures=["DFlash2DraftModel"]), "'DFlash2DraftModel' is not supported"),
        ("zlab_dflash", set_keys(model_type="gemma3_text"), "model_type = 'gemma3_text'"),
        ("zlab_dflash", set_keys(partial_rotary_factor=0.25), "partial_rotary_factor = 0.25"),
        ("zlab_dflash", set_keys(add_swa_attention_sink_bias=True), "add_swa_attention_sink_bias"),
        ("zlab_dflash", set_keys(quantization_config={"bits": 4}), "quantization_config"),
        ("zlab_dflash", set_keys(is_causal=True), "causal full-attention layers"),
        ("zlab_dflash", without("hidden_size"), "lacks 'hidden_size'"),
        ("zlab_dflash", set_keys(hidden_size="wide"), "hidden_size"),
        ("zlab_dflash", set_keys(dflash_config=[1]), "dflash_config must be an object"),
        ("zlab_dflash", set_keys(rope_parameters=3), "malformed"),
        (
            "zlab_dflash",
            set_keys(rope_parameters={"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.5}),
            "rotate whole",
        ),
        ("zlab_dflash", in_dflash(attention_sink_bias=True), "attention_sink_bias = True"),
        ("zlab_dflash", in_dflash(projector_type="domino"), "projector_type = 'domino'"),
        ("zlab_dflash", in_dflash(selector_rank=256), "'selector_rank', which is not understood"),
        ("zlab_dflash", in_dflash(final_logit_softcapping=20.0), "final_logit_softcapping = 20.0"),
        ("zlab_dflash", in_dflash(input_embedding_scale=8.0), "input_embedding_scale = 8.0"),
        ("zlab_dflash", in_dflash(use_aux_hidden_state=False), "use_aux_hidden_state"),
        ("zlab_dflash", in_dflash(use_swa=True), "disagree about the attention window"),
        ("zlab_dflash", in_dflash(target_layer_ids=None), "target_layer_ids must be a non-empty list"),
        ("zlab_dflash", in_dflash(target_layer_ids=[1, 5, 11]), "target layer id 11 is out of range"),
        ("zlab_dflash", in_dflash(mask_token_id=97), "mask_token_id 97 is no row"),
        ("zlab_dflash", in_dflash(mask_token_id=None), "lacks 'mask_token_id'"),
        ("speculators_dflash", set_keys(speculators_model_type="eagle3"), "'eagle3' are not supported"),
        ("speculators_dflash", set_keys(draft_vocab_size=32), "draft vocabulary of 32 tokens needs a tensor d2t"),
        ("speculators_dflash", set_keys(attention_gate=True), "'attention_gate', which is not understood"),
        ("speculators_dflash", set_keys(aux_hidden_state_layer_ids=None), "lacks 'aux_hidden_state_layer_ids'"),
        ("speculators_dflash", set_keys(mask_token_id=None), "lacks 'mask_token_id'"),
        ("speculators_dflash", in_layers(partial_rotary_factor=0.25), "partial_rotary_factor = 0.25"),
        ("speculators_dflash", in_layers(model_type="gpt_oss"), "model_type = 'gpt_oss'"),
        ("speculators_dflash", set_keys(transformer_layer_config=7), "malformed"),
        ("speculators_dspark", without("sample_from_anchor"), "lacks 'sample_from_anchor'"),
        ("speculators_dspark", set_keys(markov_head_type="gated"), "lacks the tensor 'markov_head.gate_proj"),
        ("speculators_dspark", set_keys(enable_confidence_head=True), "lacks the tensor 'confidence_head"),
        ("deepspec_dspark_rnn", set_keys(architectures=["Gemma4DSparkModel"]), "'Gemma4DSparkModel' are not supported"),
        ("deepspec_dspark_rnn", without("markov_rank"), "lacks 'markov_rank'"),
        ("deepspec_dspark_rnn", set_keys(markov_head_type="vanilla"), "holds the tensor 'markov_head.joint_proj"),
        ("deepspec_dspark_vanilla", set_keys(enable_confidence_head=False), "holds the tensor 'confidence_head"),
        (
            "deepspec_dspark_vanilla",
            set_keys(confidence_head_with_markov=False),
            "'confidence_head.proj.weight' has shape",
        ),
        (
            "deepspec_dflash",
            set_keys(use_sliding_window=True, sliding_window=64, max_window_layers=0, layer_types=None),
            "sliding_attention layers",
        ),
        (
            "deepspec_dflash",
            set_keys(num_hidden_layers=1, layer_types=["full_attention"]),
            "holds the tensor 'layers.1.",
        ),
    ],
)
def test_foreign_configs_are_refused_by_name(case, change, words, folder):
    path = folder(case)
    edit(path, change)
    assert words in refusal(path)


@pytest.mark.parametrize("case", ["zlab_dflash", "speculators_dspark", "deepspec_dspark_gated"])
@pytest.mark.parametrize("damage", ["missing", "extra", "shape", "integer", "d2t"])
def test_tensors_are_all_or_nothing(case, damage, folder):
    path = folder(case)
    tensors = load_file(path / "model.safetensors")
    expected = "layers.1.mlp.up_proj.weight"
    if damage == "missing":
        del tensors[expected]
    elif damage == "extra":
        expected = "layers.0.self_attn.sinks"
        tensors[expected] = torch.zeros(4)
    elif damage == "shape":
        tensors[expected] = tensors[expected][:-1].contiguous()
    elif damage == "integer":
        tensors[expected] = tensors[expected].to(torch.int8)
    else:
        expected = "d2t"
        tensors["d2t"] = torch.zeros(97, dtype=torch.int64)
    save_file(tensors, path / "model.safetensors")
    assert expected in refusal(path)


def test_detecting_formats():
    assert detect_format({"model_type": "carryover_drafter"}) == "carryover"
    assert detect_format({"speculators_config": {}}) == "speculators"
    assert detect_format({"dflash_config": {}, "architectures": ["DSparkDraftModel"]}) == "zlab"
    assert detect_format({"architectures": ["DFlashDraftModel"]}) == "zlab"
    assert detect_format({"architectures": ["Gemma4DSparkModel"]}) == "deepspec"
    for other in ({}, {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, {"architectures": []}):
        with pytest.raises(InputError, match="no block drafter's"):
            detect_format(other)


def test_architectures_of_any_kind_are_read(tmp_path):
    with pytest.raises(InputError, match="no block drafter's"):
        detect_format({"architectures": 5})
    assert detect_format({"architectures": "Gemma4DSparkModel"}) == "deepspec"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(value, folder):
    path = folder("zlab_dflash")
    tensors = load_file(path / "model.safetensors")
    tensors["layers.1.mlp.up_proj.weight"][3, 2] = value
    save_file(tensors, path / "model.safetensors")
    assert "layers.1.mlp.up_proj.weight" in refusal(path) and "are not all numbers" in refusal(path)


# ---- files -----------------------------------------------------------------------------------------------------------
def test_damaged_files(folder, tmp_path):
    path = folder("zlab_dflash")
    whole = (path / "model.safetensors").read_bytes()
    for part in (whole[: len(whole) // 2], whole[:4], b"", b"no tensors at all"):
        (path / "model.safetensors").write_bytes(part)
        assert "model.safetensors cannot be read" in refusal(path)
    (path / "model.safetensors").unlink()
    assert "holds no model.safetensors" in refusal(path)
    text = (path / "config.json").read_text()
    for bad, words in ((text[:-20], "not valid JSON"), ("[1]", "must hold a JSON object"), ("", "not valid JSON")):
        (path / "config.json").write_text(bad)
        assert words in refusal(path)
    (path / "config.json").write_bytes(b"\xff\xfe{}")
    assert "not valid JSON" in refusal(path)
    (path / "config.json").unlink()
    assert "holds no config.json" in refusal(path)
    assert "is a file" in refusal(GOLDEN / "zlab_dflash" / "config.json")
    assert "no drafter folder" in refusal(tmp_path / "nowhere")


def test_shards_are_read_and_must_be_complete(folder):
    path = folder("zlab_dflash")
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    for file, part in parts.items():
        save_file({n: tensors[n] for n in part}, path / file)
    index = {"weight_map": {n: file for file, part in parts.items() for n in part}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = load_drafter(path).state_dict()
    assert loaded.keys() == tensors.keys() and all(torch.equal(loaded[n], tensors[n]) for n in tensors)
    del index["weight_map"][names[0]]
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"disagree about the tensor '{names[0]}'" in refusal(path)
    (path / "b.safetensors").unlink()
    assert "holds no b.safetensors" in refusal(path)
    (path / "model.safetensors.index.json").write_text("{}")
    assert "has no weight_map" in refusal(path)


def test_hub_ids_are_fetched_and_failures_told(monkeypatch):
    asked = []

    def deliver(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(GOLDEN / "zlab_dflash")

    monkeypatch.setattr(files, "snapshot_download", deliver)
    assert load_drafter("z-lab/some-dflash").config.block_size == 8
    assert asked == [("z-lab/some-dflash", ["*.json", "*.safetensors"])]

    def fail(name, allow_patterns):
        raise OSError("no network\nat all")

    monkeypatch.setattr(files, "snapshot_download", fail)
    assert refusal("z-lab/some-dflash").endswith("the hub did not deliver it: no network")
    assert "no hub id" in refusal("some-dflash")


@pytest.mark.parametrize("damage", ["unknown", "missing", "layers", "no weights", "extra weights", "value"])
def test_damaged_sidecars(damage, tmp_path):
    save_drafter(random_drafter(carry="embedding"), tmp_path / "d", "zlab")
    side = tmp_path / "d" / "carryover"
    settings = json.loads((side / "config.json").read_text())
    words = {
        "unknown": "'gate'",
        "missing": "'carry_site'",
        "layers": "num_target_layers 8",
        "value": "carry must be one of",
        "no weights": "lacks the tensor 'carry.embedding'",
        "extra weights": "holds the tensor 'carry.bias'",
    }[damage]
    if damage == "unknown":
        settings["gate"] = 1
    elif damage == "missing":
        del settings["carry_site"]
    elif damage == "layers":
        settings["num_target_layers"] = 8
    elif damage == "value":
        settings["carry"] = "all"
    elif damage == "no weights":
        (side / "carry.safetensors").unlink()
    else:
        save_file({"carry.embedding": torch.zeros(32), "carry.bias": torch.zeros(32)}, side / "carry.safetensors")
    (side / "config.json").write_text(json.dumps(settings))
    assert words in refusal(tmp_path / "d")


def test_a_sidecar_cannot_replace_weights_of_the_drafter(tmp_path):
    save_drafter(random_drafter(carry="embedding"), tmp_path / "d", "zlab")
    save_file(
        {"carry.embedding": torch.zeros(32), "fc.weight": torch.zeros(32, 96)},
        tmp_path / "d/carryover/carry.safetensors",
    )
    assert "holds the tensor 'fc.weight', which is no carry weight" in refusal(tmp_path / "d")


# ---- does it fit the target? -----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 64}, "its hidden_size is 64, the target's hidden size 32"),
        ({"target_hidden_size": 48}, "its target_hidden_size is 48"),
        ({"vocab_size": 100}, "its vocabulary has 100 rows, the target's 96"),
        ({"num_target_layers": 8}, "made for a target of 8 layers, this one has 6"),
        (
            {"num_target_layers": 0, "target_layer_ids": [1, 5]},
            "it reads target layer 5, and of 6 layers the last usable one is 4",
        ),
        ({"vocab_size": 100, "mask_token_id": 98}, "its mask token 98 is no row"),
        ({"max_position_embeddings": 256}, "positions up to 256, the target up to 512"),
        ({"target_fingerprint": "0" * 16, "target_name": "lab"}, "trained for another target (lab)"),
    ],
)
def test_every_mismatch_is_named(change, words, target):
    with pytest.raises(InputError, match="does not fit the target 'tiny-llama-0'") as error:
        check_fits(config(**change), target)
    assert words in str(error.value)


def test_several_mismatches_are_all_named(target):
    assert len(mismatches(config(vocab_size=100, mask_token_id=98, num_target_layers=8), target)) == 3
    assert mismatches(config(target_fingerprint=target.fingerprint()), target) == []
    assert mismatches(config(num_target_layers=0), target) == []


def test_loading_for_a_target_checks_and_completes(tmp_path, target):
    save_drafter(random_drafter(), tmp_path / "d", "speculators")
    shutil.rmtree(tmp_path / "d" / "carryover")
    assert load_drafter(tmp_path / "d").config.num_target_layers == 0
    assert load_drafter(tmp_path / "d", target).config.num_target_layers == 6
    with pytest.raises(InputError, match="does not fit"):
        load_drafter(GOLDEN / "zlab_dflash", target)


def test_stored_embedding_and_head_tell_another_target(tmp_path, target):
    save_drafter(random_drafter(slots="next_token"), tmp_path / "d", "deepspec", target)
    other = tiny_target("llama", seed=1)
    with pytest.raises(InputError, match="the embedding stored with the drafter is not that of 'tiny-llama-1'"):
        load_drafter(tmp_path / "d", other)
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    tensors["lm_head.weight"] += 1
    save_file(tensors, tmp_path / "d" / "model.safetensors")
    with pytest.raises(InputError, match="the LM head stored with the drafter"):
        load_drafter(tmp_path / "d", target)


def test_published_drafters_for_scaled_embeddings_are_refused(tmp_path):
    gemma = tiny_target("gemma3_text")
    drafter = random_drafter()
    save_drafter(drafter, tmp_path / "stranger", "zlab")
    with pytest.raises(InputError, match="scales its embedding"):
        load_drafter(tmp_path / "stranger", gemma)
    drafter.config.target_fingerprint = gemma.fingerprint()
    save_drafter(drafter, tmp_path / "ours", "zlab")
    assert load_drafter(tmp_path / "ours", gemma).config.block_size == 5
