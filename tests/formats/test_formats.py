"""Published formats: what they mean here, round trips through each, exports that other loaders find plain."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from drafters import config, random_drafter
from safetensors.torch import load_file, save_file
from tiny import tiny_target
from transformers import Qwen3Config

from carryover.drafter.config import DrafterConfig
from carryover.errors import InputError
from carryover.formats import detect_format, load_drafter, read_checkpoint, save_drafter, speculators, zlab

GOLDEN = Path(__file__).parent.parent / "golden"
MARKOV = {"markov_rank": 6, "slots": "next_token"}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
ANCHORED = {**SLIDING, "sliding_window_from_anchor": True}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
DRAFTERS = {
    "dflash": {},
    "dflash next_token": {"slots": "next_token"},
    "vanilla": MARKOV,
    "vanilla fill_in": {"markov_rank": 6},
    "gated": {**MARKOV, "markov_kind": "gated"},
    "rnn": {**MARKOV, "markov_kind": "rnn"},
    "confidence": {**MARKOV, "confidence": True},
    "confidence without markov": {**MARKOV, "confidence": True, "confidence_with_markov": False},
    "biased yarn": {"attention_bias": True, "rope_parameters": YARN, "rms_norm_eps": 1e-5, "hidden_act": "gelu"},
    "sliding": SLIDING,
    "sliding causal": {**SLIDING, "sliding_causal": True},
    "all sliding causal": {**SLIDING, "layer_types": ["sliding_attention"] * 2, "sliding_causal": True},
    "from anchor": ANCHORED,
    "from anchor causal": {**ANCHORED, "sliding_causal": True},
    "embedding": {"carry": "embedding"},
    "embedding post": {"carry": "embedding", "carry_site": "post_norm", **MARKOV},
    "plain": {"carry": "plain", "slots": "next_token"},
    "fc_copy": {"carry": "projector", "slots": "next_token"},
    "bottleneck": {"carry": "projector", "carry_projector": "bottleneck"},
    "hint": {"carry": "hint", "slots": "next_token"},
    "hint top1": {"carry": "hint", "carry_hint": "target_top1", "slots": "next_token"},
    "few tokens": {"draft_vocab_size": 11, "slots": "next_token"},
    "few tokens vanilla": {"draft_vocab_size": 11, "carry": "embedding", **MARKOV},
}
HEADS = {"vanilla", "vanilla fill_in", "gated", "rnn", "confidence", "confidence without markov", "embedding post"}
FEW = {"few tokens", "few tokens vanilla"}
FILLS = {"dflash", "vanilla fill_in", "biased yarn", "embedding", "bottleneck"}
KERNEL = {"sliding", "sliding causal", "all sliding causal"}
FROM_ANCHOR = {"from anchor", "from anchor causal"}
CANNOT = {
    "carryover": set(),
    "zlab": HEADS | FROM_ANCHOR | FEW,
    "speculators": KERNEL,
    "deepspec": FILLS | KERNEL | FROM_ANCHOR | FEW,
}
IDENTITY = {"target_name": "some/target", "target_fingerprint": "0123456789abcdef"}


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def used(c: DrafterConfig) -> dict:
    """The fields that matter to a drafter: not the window of one without sliding layers, nor the kind of a missing
    head."""
    fields = {f: getattr(c, f) for f in DrafterConfig.__annotations__}
    if "sliding_attention" not in c.layer_types:
        for field in ("sliding_window", "sliding_causal", "sliding_window_from_anchor"):
            del fields[field]
    if not c.confidence:
        del fields["confidence_with_markov"]
    return fields


@pytest.mark.parametrize("form", CANNOT)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_round_trip_or_refusal(kind, form, tmp_path, target):
    drafter = random_drafter(**DRAFTERS[kind])
    if drafter.draft_vocab is not None:
        drafter = drafter.restricted(drafter.draft_vocab[::2])
    drafter.config.target_name, drafter.config.target_fingerprint = target.name, target.fingerprint()
    if kind in CANNOT[form]:
        with pytest.raises(InputError, match=r"convert to|cannot express|cannot be one"):
            save_drafter(drafter, tmp_path / "d", form, target)
        assert not (tmp_path / "d").exists()
        return
    save_drafter(drafter, tmp_path / "d", form, target)
    assert read_checkpoint(tmp_path / "d").format == form
    again = load_drafter(tmp_path / "d")
    assert used(again.config) == used(drafter.config)
    ours, theirs = drafter.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    load_drafter(tmp_path / "d", target)  # and it fits


@pytest.mark.parametrize(
    "path", [("zlab", "speculators"), ("speculators", "zlab"), ("deepspec", "speculators"), ("carryover", "zlab")]
)
def test_chains_of_conversions_are_bit_equal(path, tmp_path, target):
    drafter = random_drafter(carry="embedding", slots="next_token")
    first = drafter
    for step, form in enumerate((*path, "carryover")):
        save_drafter(drafter, tmp_path / str(step), form, target)
        drafter = load_drafter(tmp_path / str(step))
    assert used(drafter.config) == used(first.config)
    assert all(torch.equal(first.state_dict()[n], t) for n, t in drafter.state_dict().items())


def test_bf16_stays_bf16(tmp_path, target):
    drafter = random_drafter(carry="embedding", slots="next_token").to(torch.bfloat16)
    for form in CANNOT:
        save_drafter(drafter, tmp_path / form, form, target)
        again = load_drafter(tmp_path / form)
        assert again.dtype == torch.bfloat16
        assert json.loads((tmp_path / form / "config.json").read_text())["dtype"] == "bfloat16"
        assert all(torch.equal(t, drafter.state_dict()[n]) for n, t in again.state_dict().items())
        assert load_drafter(tmp_path / form, dtype=torch.float32).dtype == torch.float32


# ---- what the published files mean -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("case", "form", "expected"),
    [
        (
            "zlab_dflash",
            "zlab",
            {"slots": "fill_in", "num_proposals": 7, "target_layer_ids": [1, 5, 9], "mask_token_id": 96},
        ),
        ("speculators_dflash", "speculators", {"slots": "fill_in", "num_proposals": 7, "target_layer_ids": [1, 5, 8]}),
        (
            "speculators_dspark",
            "speculators",
            {
                "slots": "next_token",
                "num_proposals": 8,
                "target_layer_ids": [1, 5, 8],
                "markov_rank": 8,
                "markov_kind": "vanilla",
                "confidence": False,
            },
        ),
        ("deepspec_dflash", "deepspec", {"slots": "next_token", "num_proposals": 7, "markov_rank": 0}),
        ("deepspec_dspark_gated", "deepspec", {"markov_kind": "gated", "markov_rank": 8, "confidence": False}),
        ("deepspec_dspark_rnn", "deepspec", {"markov_kind": "rnn"}),
        (
            "deepspec_dspark_vanilla",
            "deepspec",
            {
                "markov_kind": "vanilla",
                "confidence": True,
                "confidence_with_markov": True,
                "target_layer_ids": [1, 5, 9],
                "num_target_layers": 12,
            },
        ),
    ],
)
def test_recorded_checkpoints_are_understood(case, form, expected, tmp_path):
    raw = json.loads((GOLDEN / case / "config.json").read_text())
    assert detect_format(raw) == form
    c = read_checkpoint(GOLDEN / case).config
    assert {key: getattr(c, key) for key in expected} == expected
    assert (c.hidden_size, c.num_hidden_layers, c.rope_parameters["rope_theta"]) == (64, 2, 1e6)


@pytest.mark.parametrize("case", sorted(p.name for p in GOLDEN.iterdir() if p.is_dir()))
def test_recorded_checkpoints_survive_conversion_to_ours_and_back(case, tmp_path):
    checkpoint = read_checkpoint(GOLDEN / case)
    drafter = load_drafter(GOLDEN / case)
    save_drafter(drafter, tmp_path / "ours")
    back = load_drafter(tmp_path / "ours")
    if checkpoint.format == "deepspec":
        assert {
            n for n, t in checkpoint.tensors.items() if torch.equal(t, back.state_dict()[n])
        } == back.state_dict().keys()
        return
    save_drafter(back, tmp_path / "back", checkpoint.format)
    theirs, again = load_file(GOLDEN / case / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert theirs.keys() == again.keys()
    assert all(torch.equal(theirs[n], again[n]) for n in theirs)
    recorded = json.loads((GOLDEN / case / "config.json").read_text())
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    for key in ("block_size", "mask_token_id", "aux_hidden_state_layer_ids", "sample_from_anchor", "markov_rank",
                "speculators_model_type", "markov_head_type", "enable_confidence_head", "draft_vocab_size", "head_dim",
                "architectures", "num_target_layers", "layer_types", "rope_parameters", "dtype",
                "target_hidden_size"):  # fmt: skip
        assert written.get(key) == recorded.get(key), key
    for key in recorded.get("dflash_config", {}):
        assert written["dflash_config"][key] == recorded["dflash_config"][key]


def test_layer_ids_shift_by_one_in_speculators():
    written = speculators.write_config(config(target_layer_ids=[-1, 1, 4]))
    assert written["aux_hidden_state_layer_ids"] == [0, 2, 5]
    assert speculators.read_config(written).target_layer_ids == [-1, 1, 4]
    assert zlab.write_config(config(target_layer_ids=[1, 3, 4]))["dflash_config"]["target_layer_ids"] == [1, 3, 4]


def test_written_backbones_are_qwen3_configs_for_transformers():
    c = config(rope_parameters=YARN, **SLIDING)
    theirs = Qwen3Config(**zlab.write_config(c))
    for field in (
        "hidden_size",
        "head_dim",
        "num_key_value_heads",
        "layer_types",
        "sliding_window",
        "max_position_embeddings",
    ):
        assert getattr(theirs, field) == getattr(c, field)
    assert theirs.rope_parameters == YARN
    assert Qwen3Config(**zlab.write_config(config())).rope_parameters["rope_theta"] == 10000.0


# ---- spellings -------------------------------------------------------------------------------------------------------
def zlab_raw(**changes) -> dict:
    raw = json.loads((GOLDEN / "zlab_dflash" / "config.json").read_text())
    raw["dflash_config"] |= changes.pop("dflash", {})
    raw |= changes
    return {k: v for k, v in raw.items() if v != "gone"}


def test_rope_in_all_spellings():
    def rope(**changes):
        return zlab.read_config(zlab_raw(rope_parameters="gone", **changes)).rope_parameters

    assert rope(rope_theta=5e5, rope_scaling=None) == {"rope_theta": 5e5, "rope_type": "default"}
    yarn = {"factor": 4.0, "original_max_position_embeddings": 512}
    for spelling in ("type", "rope_type"):
        got = rope(rope_theta=5e5, rope_scaling={spelling: "yarn", **yarn})
        assert got | {"type": None} == {"rope_theta": 5e5, "rope_type": "yarn", **yarn, "type": None}
    with pytest.raises(InputError, match="one rope_theta, but it gives none"):
        rope()
    with pytest.raises(InputError, match="gives two"):
        zlab.read_config(zlab_raw(rope_theta=5e5))
    with pytest.raises(InputError, match="rope_type out of"):
        dynamic = {"rope_type": "dynamic", "factor": 2.0}
        zlab.read_config(zlab_raw(rope_parameters="gone", rope_theta=5e5, rope_scaling=dynamic)).checked()


def test_newer_zlab_files_keep_everything_in_dflash_config():
    old = zlab.read_config(zlab_raw())
    new = zlab.read_config(zlab_raw(block_size="gone", dflash={"block_size": 8}))
    flat = zlab_raw(mask_token_id=96, target_layer_ids=[1, 5, 9])
    flat["dflash_config"] = {}
    assert used(old) == used(new) == used(zlab.read_config(flat))
    with pytest.raises(InputError, match="block_size twice and differently"):
        zlab.read_config(zlab_raw(dflash={"block_size": 16}))
    with pytest.raises(InputError, match="lacks 'block_size'"):
        zlab.read_config(zlab_raw(block_size="gone"))


@pytest.mark.parametrize(
    ("dflash", "slots"),
    [
        ({}, "fill_in"),
        ({"sample_from_anchor": False}, "fill_in"),
        ({"sample_from_anchor": True}, "next_token"),
        ({"projector_type": "dspark", "markov_rank": 8}, "next_token"),
        ({"shift_label": True}, "next_token"),
        ({"projector_type": "dspark", "markov_rank": 8, "sample_from_anchor": False}, "fill_in"),
    ],
)
def test_slots_of_the_zlab_layout(dflash, slots):
    assert zlab.read_config(zlab_raw(dflash=dflash)).slots == slots


def test_specforge_dspark_is_read():
    c = zlab.read_config(
        zlab_raw(architectures=["DSparkDraftModel"], dflash={
            "projector_type": "dspark", "markov_rank": 8, "markov_head_type": "gated", "enable_confidence_head": True,
            "confidence_head_with_markov": False, "confidence_head_alpha": 1.0, "attention_mode": "gqa"})
    )  # fmt: skip
    assert (c.markov_rank, c.markov_kind, c.confidence, c.confidence_with_markov) == (8, "gated", True, False)
    with pytest.raises(InputError, match="lacks 'markov_rank'"):
        zlab.read_config(zlab_raw(dflash={"projector_type": "dspark"}))


@pytest.mark.parametrize(
    ("changes", "causal"),
    [({}, True), ({"is_causal": False}, False), ({"dflash": {"causal": False}}, False), ({"is_causal": True}, True)],
)
def test_sliding_zlab_layers_are_causal_unless_told(changes, causal):
    sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64, "use_sliding_window": True}
    assert zlab.read_config(zlab_raw(**sliding, **changes)).sliding_causal is causal


def test_speculators_slots_are_never_guessed():
    raw = json.loads((GOLDEN / "speculators_dspark" / "config.json").read_text())
    assert speculators.read_config({**raw, "sample_from_anchor": False}).slots == "fill_in"
    del raw["sample_from_anchor"]
    with pytest.raises(InputError, match="lacks 'sample_from_anchor'"):
        speculators.read_config(raw)
    dflash = json.loads((GOLDEN / "speculators_dflash" / "config.json").read_text())
    del dflash["sample_from_anchor"]  # older files; their dflash has only the one convention
    assert speculators.read_config(dflash).slots == "fill_in"


# ---- exports ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("form", ["zlab", "speculators", "deepspec"])
def test_an_export_is_a_plain_drafter_with_a_sidecar(form, tmp_path, target):
    drafter = random_drafter(carry="embedding", slots="next_token")
    drafter.config.target_name = "some/target"
    save_drafter(drafter, tmp_path / "d", form, target)
    top = load_file(tmp_path / "d" / "model.safetensors")
    copies = {"embed_tokens.weight", "lm_head.weight"} if form == "deepspec" else set()
    assert top.keys() == {n for n in drafter.state_dict() if not n.startswith("carry.")} | copies
    assert load_file(tmp_path / "d" / "carryover" / "carry.safetensors").keys() == {"carry.embedding"}
    assert "carry" not in json.loads((tmp_path / "d" / "config.json").read_text())
    assert load_drafter(tmp_path / "d").config.carry == "embedding"
    shutil.rmtree(tmp_path / "d" / "carryover")
    plain = load_drafter(tmp_path / "d")
    assert plain.config.carry == "none"
    assert not any(n.startswith("carry.") for n in plain.state_dict())


def test_deepspec_export_holds_the_targets_embedding_and_head(tmp_path, target):
    drafter = random_drafter(slots="next_token")
    save_drafter(drafter, tmp_path / "d", "deepspec", target)
    checkpoint = read_checkpoint(tmp_path / "d")
    assert torch.equal(checkpoint.embed, target.model.get_input_embeddings().weight)
    assert torch.equal(checkpoint.head, target.model.get_output_embeddings().weight)
    with pytest.raises(InputError, match="name the target too"):
        save_drafter(drafter, tmp_path / "e", "deepspec")
    gemma = tiny_target("gemma3_text")
    with pytest.raises(InputError, match="capped head of targets like"):
        save_drafter(drafter, tmp_path / "e", "deepspec", gemma)


def test_speculators_checkpoints_of_few_tokens_hold_the_maps_and_the_heads_rows(tmp_path, target):
    kept = torch.tensor([2, 7, 50, 95])
    drafter = random_drafter(slots="next_token", **{"markov_rank": 6}).restricted(kept)
    save_drafter(drafter, tmp_path / "d", "speculators", target)
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    assert tensors["d2t"].tolist() == [2, 6, 48, 92]  # target id minus draft id
    assert tensors["t2d"].dtype == torch.bool and tensors["t2d"].nonzero().flatten().tolist() == kept.tolist()
    assert torch.equal(tensors["lm_head.weight"], target.model.get_output_embeddings().weight[kept])
    assert json.loads((tmp_path / "d" / "config.json").read_text())["draft_vocab_size"] == 4
    with pytest.raises(InputError, match="name the target too"):
        save_drafter(drafter, tmp_path / "e", "speculators")
    with pytest.raises(InputError, match="LM head stored with the drafter is not that of"):
        load_drafter(tmp_path / "d", tiny_target("llama", seed=5))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"d2t": None}, "needs a tensor d2t"),
        ({"d2t": torch.zeros(3, dtype=torch.int64)}, "needs a tensor d2t"),
        ({"d2t": torch.tensor([2, 6, 48, 91])}, "name different tokens"),
        ({"t2d": torch.zeros(96, dtype=torch.bool)}, "name different tokens"),
        ({"d2t": torch.tensor([2, 0, 48, 92]), "t2d": None}, "ascending token ids"),
    ],
)
def test_a_damaged_vocabulary_map_is_named(change, words, tmp_path, target):
    drafter = random_drafter(slots="next_token").restricted(torch.tensor([2, 7, 50, 95]))
    save_drafter(drafter, tmp_path / "d", "speculators", target)
    tensors = {**load_file(tmp_path / "d" / "model.safetensors"), **change}
    save_file({n: t for n, t in tensors.items() if t is not None}, tmp_path / "d" / "model.safetensors")
    with pytest.raises(InputError, match=words):
        load_drafter(tmp_path / "d")


def test_exports_never_mix_with_other_files(tmp_path, target):
    (tmp_path / "d").mkdir()
    save_drafter(random_drafter(), tmp_path / "d", "zlab")
    with pytest.raises(InputError, match="not an empty folder"):
        save_drafter(random_drafter(), tmp_path / "d", "zlab")
    with pytest.raises(InputError, match="no drafter format 'eagle3'"):
        save_drafter(random_drafter(), tmp_path / "e", "eagle3")
