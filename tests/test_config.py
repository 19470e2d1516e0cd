"""Recipes: strict keys, resolved defaults, and the drafter configuration they give for real and tiny targets."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from tiny import tiny_target
from transformers import PreTrainedTokenizerFast

from carryover.config import CarryoverConfig, Recipe, default_gamma, drafter_config, resolve_mask_token
from carryover.errors import InputError
from carryover.target import Target

FILES = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))
GRIDS = {  # cells, and how many seeds
    "lab-first-grid": (["markov-b16", "dflash-b16", "markov-b8", "dflash-b8"], 3),
    "lab": (
        [f"{name}-{b}" for b in ("b16", "b8") for name in ("markov", "dflash", "markov-projector", "dflash-projector")],
        3,
    ),
    "lab-dflash-why": (["dflash2-b16", "dflash5-b16", "dflash-next-b16", "markov-fill-b16"], 1),
}  # fmt: skip
RECIPES = [path for path in FILES if path.stem not in GRIDS]
SMALL = """
target: lab
drafter: {algorithm: dflash, layers: 2, mask_token_id: 7}
data: {corpus: c.jsonl}
train:
  learning_rate: 0.001
  baseline: {steps: 100}
  carryover: {steps: 30}
"""


def load(tmp_path: Path, text: str = SMALL, *overrides: str) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return Recipe.load(path, overrides)


def test_temperatures_have_folders_of_their_own(tmp_path: Path) -> None:
    assert load(tmp_path, SMALL, "evaluate.temperatures=[0, 0.7, 1]").evaluate.temperatures == (0, 0.7, 1)
    for several in ("[]", "[1, 1]", "[0.5, 0.50000001]"):
        with pytest.raises(InputError, match=r"evaluate\.temperatures"):
            load(tmp_path, SMALL, f"evaluate.temperatures={several}")


def refused(tmp_path: Path, message: str, *overrides: str, text: str = SMALL) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load(tmp_path, text, *overrides)
    assert "\n" not in str(caught.value)


# ---- what is read ----------------------------------------------------------------------------------------------------
def test_defaults_are_resolved(tmp_path):
    dflash, markov = load(tmp_path), load(tmp_path, SMALL, "drafter.algorithm=markov")
    assert (dflash.drafter.slots, markov.drafter.slots) == ("fill_in", "next_token")
    assert dflash.drafter.markov is None and (markov.drafter.markov.rank, markov.drafter.markov.kind) == (
        256,
        "vanilla",
    )
    for recipe, ce, l1 in ((dflash, 1.0, 0.0), (markov, 0.1, 0.9)):
        for stage in (recipe.train.baseline, recipe.train.continued, recipe.train.carryover):
            assert (stage.loss.ce, stage.loss.l1, stage.loss.weighting, stage.loss.gamma) == (ce, l1, "decay", 7.0)
    assert dflash.carry.interface == "embedding" and dflash.carry.site == "pre_norm"
    carryover = dflash.train.carryover
    assert (carryover.acceptance, carryover.first_pass_loss, carryover.carry_dropout) == ("recorded", 0.0, 0.0)
    assert dflash.data.sequence_length == dflash.data.max_length == 2048
    assert dflash.data.corpus == ("c.jsonl",)


@pytest.mark.parametrize(
    ("block", "gamma"), [(2, 4), (7, 4), (8, 4), (10, 5), (12, 5), (13, 7), (15, 7), (16, 7), (32, 7)]
)
def test_gamma_follows_the_block(tmp_path, block, gamma):
    assert default_gamma(block) == gamma
    assert load(tmp_path, SMALL, f"drafter.block_size={block}").train.baseline.loss.gamma == gamma
    assert load(tmp_path, SMALL, f"drafter.block_size={block}", "train.loss.gamma=3").train.baseline.loss.gamma == 3


def test_shared_keys_reach_every_stage_and_own_keys_win(tmp_path):
    train = load(tmp_path, SMALL, "train.anchors=8", "train.carryover.anchors=4", "train.baseline.loss.weighting=dpace",
                 "train.loss.ce=2", "train.acceptance=target_guarded").train  # fmt: skip
    assert [s.learning_rate for s in (train.baseline, train.continued, train.carryover)] == [0.001] * 3
    assert [s.anchors for s in (train.baseline, train.continued, train.carryover)] == [8, 4, 4]
    assert [s.loss.weighting for s in (train.baseline, train.continued)] == ["dpace", "decay"]
    assert [s.loss.ce for s in (train.baseline, train.continued)] == [2.0, 2.0]
    assert train.carryover.acceptance == "target_guarded"
    assert isinstance(train.carryover, CarryoverConfig) and not isinstance(train.baseline, CarryoverConfig)


def test_continued_is_the_control_of_carryover(tmp_path):
    train = load(tmp_path, SMALL, "train.carryover.learning_rate=0.5", "train.carryover.carry_dropout=0.1").train
    assert train.continued.model_dump() == {
        key: value
        for key, value in train.carryover.model_dump().items()
        if key not in ("acceptance", "first_pass_loss", "carry_dropout", "proposal_temperature", "unroll")
    }
    own = load(tmp_path, SMALL, "train.continued.epochs=2").train.continued
    assert (own.steps, own.epochs) == (None, 2.0)
    shared = load(tmp_path, SMALL.replace("baseline: {steps: 100}", "epochs: 3"), "train.carryover.steps=5").train
    assert (shared.baseline.epochs, shared.baseline.steps) == (3.0, None)
    assert (shared.carryover.epochs, shared.carryover.steps) == (None, 5)


def test_overrides_are_yaml_values(tmp_path):
    recipe = load(
        tmp_path, SMALL, "train.baseline.steps=7", "evaluate.temperatures=[0, 1]", "train.learning_rate=6e-4",
        "data.template.enable_thinking=false", "drafter.mask_token_id=null", "target=smollm2",
    )  # fmt: skip
    assert recipe.train.baseline.steps == 7 and recipe.evaluate.temperatures == (0.0, 1.0)
    assert recipe.train.baseline.learning_rate == 6e-4  # YAML 1.1 reads 6e-4 as text
    assert recipe.data.template == {"enable_thinking": False}
    assert recipe.drafter.mask_token_id is None and recipe.target == "smollm2"


def test_a_saved_recipe_loads_equal(tmp_path):
    for text in (SMALL, *(path.read_text() for path in RECIPES)):
        recipe = load(tmp_path, text, "train.carryover.carry_dropout=0.25")
        assert load(tmp_path, recipe.to_yaml()) == recipe
        assert Recipe.model_validate(yaml.safe_load(recipe.to_yaml())) == recipe


def test_a_recipe_is_frozen(tmp_path):
    with pytest.raises(ValidationError, match="frozen"):
        load(tmp_path).seed = 1


# ---- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.baseline.stepz=1", r"unknown key train\.baseline\.stepz; did you mean train\.baseline\.steps"),
        ("train.lerning_rate=1", r"unknown key train\.lerning_rate; did you mean train\.learning_rate"),
        ("train.loss.gama=1", r"unknown key train\.loss\.gama; did you mean train\.loss\.gamma"),
        ("drafter.markov.ranks=1", r"unknown key drafter\.markov\.ranks; did you mean drafter\.markov\.rank"),
        ("block_size=8", r"unknown key block_size; it belongs in drafter\.block_size"),
        ("drafter.steps=8", r"unknown key drafter\.steps; it belongs in train\.baseline\.steps"),
        (
            "train.baseline.acceptance=recorded",
            r"unknown key train\.baseline\.acceptance; it belongs in train\.carryover",
        ),
        ("carry.zzz=1", r"unknown key carry\.zzz; valid keys there are interface, site, projector"),
        ("trane.steps=1", r"unknown key trane; did you mean train"),
        ("train.baseline.steps=many", r"train\.baseline\.steps: input should be a valid integer.*got 'many'"),
        ("seed=-1", r"recipe\.yaml: seed: .*greater than or equal to 0, got -1"),
        ("seed=4294967296", r"recipe\.yaml: seed: .*less than 4294967296"),
        ("train.learning_rate=.inf", r"train\.learning_rate: .*finite"),
        ("train.max_grad_norm=.nan", r"train\.max_grad_norm: .*finite"),
        ("train.baseline.steps=0", r"train\.baseline\.steps: .*greater than or equal to 1, got 0"),
        ("train.learning_rate=fast", r"recipe\.yaml: train\.learning_rate: input should be a valid number.*'fast'"),
        ("train.baseline.epochs=2", r"train\.baseline: give exactly one of steps and epochs"),
        ("train.carryover=null", r"train\.carryover: input should be a valid dictionary"),
        ("drafter.algorithm=eagle", r"drafter\.algorithm: input should be 'dflash' or 'markov', got 'eagle'"),
        ("drafter.algorithm=null", r"drafter\.algorithm: input should be"),
        ("drafter.markov.rank=4", r"drafter: markov is for algorithm: markov"),
        ("drafter.target_layer_ids=[3, 2]", r"drafter: target_layer_ids must be strictly increasing"),
        ("data.sequence_length=8", r"data: sequence_length must be at least max_length"),
        ("data.corpus=[]", r"recipe\.yaml: data\.corpus and record\.prompts are both empty"),
        ("data.minimum_response_tokens=1", r"data\.minimum_response_tokens"),
        ("data=5", r"data: input should be a valid dictionary"),
        ("train.eval_steps=5", r"train\.baseline: eval_steps is set, so eval_prompts"),
        ("train.loss.ce=0", r"ce, l1 and kl are all 0"),
        ("train.baseline.steps.more=1", r"the override .* goes below steps, which is a value"),
        ("train.baseline.steps", r"the override .* must look like"),
        ("train..steps=1", r"the override .* must look like"),
        ("target=[", r"the value of the override .* is not valid YAML"),
        ("seed=2001-99-99", r"the value of the override .* is not valid YAML"),
        ("seed=" + 5000 * "9", r"the value of the override .* is not valid YAML"),
        ("target=" + 3000 * "[", r"the value of the override .* is not valid YAML"),
        ("drafter.block_size=8.0", r"drafter\.block_size: input should be a valid integer, got 8\.0"),
        ("drafter.block_size='8'", r"drafter\.block_size: input should be a valid integer, got '8'"),
        ("drafter.confidence=true", r"drafter: confidence heads are read .* but not trained; leave it out"),
        ("evaluate.temperatures=[0, 1.0e-5]", r"evaluate\.temperatures\.1: temperature must be 0 .* at least 0\.001"),
        ("train.proposal_temperature=-1", r"train\.proposal_temperature: temperature must be a finite number"),
        ("record.temperature=[0, -1]", r"record\.temperature: .*at least 0"),
        ("record.temperature=[]", r"record\.temperature: must be a number or a list of numbers"),
        ("record.temperature=warm", r"record\.temperature: must be a number or a list of numbers, got 'warm'"),
        ("record.temperature=.nan", r"record\.temperature: .*finite"),
        ("data.template={day: 2024-01-01}", r"data\.template: options of a template must be plain values .*quotes"),
        ("data.template={x: .nan}", r"data\.template: options of a template must be plain values"),
    ],
)
def test_mistakes_are_named(tmp_path, override, message):
    refused(tmp_path, message, override)


def test_unreadable_recipes(tmp_path):
    refused(tmp_path, "not valid YAML", text="a: [")
    refused(tmp_path, "must be a mapping", text="- a")
    refused(tmp_path, "not valid YAML: a key must be a word", text="? [a, b]\n: 1\n")
    (tmp_path / "latin.yaml").write_bytes(b"target: caf\xe9\n")
    with pytest.raises(InputError, match="not valid YAML"):
        Recipe.load(tmp_path / "latin.yaml")
    refused(tmp_path, "not valid YAML: the key layers is repeated", text=SMALL + "record: {layers: 1, layers: 2}\n")
    refused(tmp_path, "target is missing", text=SMALL.replace("target: lab\n", ""))
    refused(tmp_path, r"drafter\.algorithm is missing", text=SMALL.replace("algorithm: dflash, ", ""))
    with pytest.raises(InputError, match="cannot read the recipe"):
        Recipe.load(tmp_path / "none.yaml")


# ---- for a target ----------------------------------------------------------------------------------------------------
def test_drafter_config_takes_the_targets_shape(tmp_path, target):
    config = drafter_config(load(tmp_path), target)
    assert (config.vocab_size, config.hidden_size, config.target_hidden_size) == (96, 32, 32)
    assert (config.intermediate_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (
        48,
        4,
        2,
        8,
    )
    assert (config.num_hidden_layers, config.num_target_layers, config.target_layer_ids) == (2, 6, [1, 3])
    assert (config.block_size, config.slots, config.num_proposals) == (16, "fill_in", 15)
    assert (config.carry, config.markov_rank, config.max_position_embeddings) == ("embedding", 0, 512)
    assert (config.target_name, config.target_fingerprint) == (target.name, target.fingerprint())
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": target.config.rope_parameters["rope_theta"]}
    assert config.layer_types == ["full_attention"] * 2


def test_drafter_config_overrides(tmp_path, target):
    recipe = load(
        tmp_path, SMALL, "drafter.algorithm=markov", "drafter.block_size=5", "drafter.markov={rank: 8, kind: gated}",
        "drafter.intermediate_size=64", "drafter.head_dim=16", "drafter.num_attention_heads=6",
        "drafter.num_key_value_heads=3", "drafter.rope_theta=5000", "drafter.captured=3", "drafter.sliding_window=9",
        "drafter.layer_types=[sliding_attention, full_attention]", "drafter.sliding_causal=true",
        "carry.interface=projector", "carry.projector=bottleneck",
    )  # fmt: skip
    config = drafter_config(recipe, target)
    assert (config.intermediate_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (
        64,
        6,
        3,
        16,
    )
    assert config.rope_parameters["rope_theta"] == 5000 and config.target_layer_ids == [1, 2, 3]
    assert (config.layer_types, config.sliding_window) == (["sliding_attention", "full_attention"], 9)
    assert config.sliding_causal and not config.sliding_window_from_anchor
    assert (config.slots, config.num_proposals, config.markov_rank, config.markov_kind) == ("next_token", 5, 8, "gated")
    assert (config.carry, config.carry_projector) == ("projector", "bottleneck")
    hinting = drafter_config(load(tmp_path, SMALL, "carry={interface: hint, hint: target_top1}"), target)
    assert (hinting.carry, hinting.carry_hint) == ("hint", "target_top1")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("drafter.target_layer_ids=[1, 5]", "target layer id 5 is out of range"),
        ("drafter.captured=4", "no 4 evenly spaced layers"),
        ("drafter.mask_token_id=96", "mask_token_id 96 is no row"),
        ("drafter.layer_types=[full_attention]", "layer_types must name"),
        (
            "drafter.layer_types=[full_attention, sliding_attention]",
            "sliding_window must be a number of rows, got None",
        ),
        ("drafter.num_key_value_heads=3", "cannot share 3 key/value heads"),
        ("drafter.block_size=1", "proposes nothing"),
    ],
)
def test_drafters_that_do_not_fit_the_target(tmp_path, target, override, message):
    with pytest.raises(InputError, match=message):
        drafter_config(load(tmp_path, SMALL, override), target)


def masked(target: Target, **special: str) -> Target:
    """The same target with other special tokens."""
    assert target.tokenizer is not None
    known = {"eos_token": "<end>", "pad_token": "<pad>", "bos_token": "<start>", **special}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=target.tokenizer._tokenizer, **known)
    return Target(target.model, tokenizer, "t")


def test_mask_token_resolution(target):
    """In this order: given, the tokenizer's mask token, the first unused row; never pad or an end token."""
    assert resolve_mask_token(5, target) == 5
    assert resolve_mask_token(None, masked(target, mask_token="w50")) == 50
    padded = tiny_target(vocab=96, vocab_size=128)
    assert len(padded.tokenizer) == 96 and padded.vocab_size == 128
    assert resolve_mask_token(None, padded) == 96
    assert resolve_mask_token(None, masked(padded, mask_token="<end>")) == 96  # aliases the end token: not used
    with pytest.raises(InputError, match=r"no unused embedding row \(96 tokens.*for example a reserved"):
        resolve_mask_token(None, target)
    spare = masked(target, additional_special_tokens=["<user>", "w90", "w91"])
    spare.tokenizer.chat_template = target.tokenizer.chat_template
    with pytest.raises(InputError, match=r"for example 90 \(w90\), 91 \(w91\)\."):
        resolve_mask_token(None, spare)
    with pytest.raises(InputError, match="no tokenizer to find one in"):
        resolve_mask_token(None, Target(target.model))


# ---- the recipes that ship -------------------------------------------------------------------------------------------
TINY = {  # a tiny target of the same family, and what has to shrink with it
    "lab-dflash": ("llama", 5, []),
    "lab-markov": ("llama", 5, []),
    "smollm2-dflash": ("llama", 30, ["drafter.draft_vocab_size=null"]),
    "smollm2-math": ("llama", 30, ["drafter.draft_vocab_size=null"]),
    "smollm2-markov": ("llama", 30, ["drafter.draft_vocab_size=null"]),
    "smollm2-gpu": ("llama", 30, ["drafter.draft_vocab_size=null"]),
    "qwen3-4b": ("qwen3", 8, ["drafter.target_layer_ids=null", "drafter.mask_token_id=null"]),
    "qwen3-4b-markov": ("qwen3", 8, ["drafter.target_layer_ids=null", "drafter.mask_token_id=null"]),
    "gemma4-12b": ("gemma4_unified", 8, ["drafter.target_layer_ids=null"]),
}


def test_every_recipe_is_covered():
    assert {path.stem for path in FILES} == {*TINY, *GRIDS}


@pytest.mark.parametrize("grid", GRIDS)
def test_shipped_grids_resolve(grid):
    recipes = Recipe.load_grid(FILES[0].parent / f"{grid}.yaml")
    target = masked(tiny_target("llama", layers=5), mask_token="w50")
    cells, seeds = GRIDS[grid]
    assert list(recipes) == [f"{cell}-s{seed}" for seed in range(seeds) for cell in cells]
    for name, recipe in recipes.items():
        config = drafter_config(recipe, target)
        assert bool(config.markov_rank) == name.startswith("markov")
        assert config.num_proposals == int(name.split("-b")[1].split("-")[0]) - 1
        assert config.carry == ("projector" if "projector" in name else "embedding")
        next_token = "next" in name or (name.startswith("markov") and "fill" not in name)
        assert config.slots == ("next_token" if next_token else "fill_in")
        assert recipe.evaluate.limit == 400 and recipe.train.continued.steps == recipe.train.carryover.steps


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_resolve(path):
    family, layers, overrides = TINY[path.stem]
    recipe = Recipe.load(path, overrides)
    target = tiny_target(family, layers=layers, vocab=96) if family != "qwen3" else tiny_target(
        family, layers=layers, vocab=96, vocab_size=128
    )  # fmt: skip
    if path.stem.startswith("lab"):
        target = masked(target, mask_token="w50")
    config = drafter_config(recipe, target)
    markov = path.stem.endswith(("markov", "math", "gpu"))
    assert config.num_hidden_layers == recipe.drafter.layers
    projecting = ("smollm2-dflash", "smollm2-math", "qwen3-4b-markov")
    assert config.carry == ("projector" if path.stem in projecting else "embedding")
    assert config.slots == ("next_token" if markov else "fill_in") and bool(config.markov_rank) == markov
    assert config.num_proposals == (7 if path.stem in ("smollm2-markov", "smollm2-math", "smollm2-dflash") else 15)
    assert recipe.train.continued.steps == recipe.train.carryover.steps
    assert recipe.train.continued.epochs == recipe.train.carryover.epochs
    assert not set(recipe.evaluate.prompts) & {*recipe.record.prompts, *recipe.data.corpus}


def test_paper_setting():
    for name, ids, mask in (("qwen3-4b", (1, 9, 17, 25, 33), 151669), ("gemma4-12b", (5, 17, 29, 41, 46), 4)):
        path = next(path for path in RECIPES if path.stem == name)
        recipe, markov = Recipe.load(path), Recipe.load(path, ["drafter.algorithm=markov", "drafter.block_size=15"])
        assert (recipe.drafter.layers, recipe.drafter.target_layer_ids, recipe.drafter.mask_token_id) == (5, ids, mask)
        assert (recipe.train.baseline.epochs, recipe.train.carryover.epochs) == (10, 3)
        assert (recipe.drafter.block_size, recipe.drafter.slots) == (16, "fill_in")
        assert (markov.drafter.slots, markov.drafter.markov.rank, markov.train.carryover.loss.l1) == (
            "next_token",
            256,
            0.9,
        )


def test_several_temperatures_are_saved_as_they_were(tmp_path: Path) -> None:
    """As a list, without a complaint of the library that writes it."""
    (tmp_path / "recipe.yaml").write_text(SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recipe = Recipe.load(tmp_path / "recipe.yaml", ["record.temperature=[0, 0.7]"])
        assert recipe.record.temperature == (0.0, 0.7)
        assert Recipe.model_validate(yaml.safe_load(recipe.to_yaml())) == recipe
