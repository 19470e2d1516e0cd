"""The lab tokenizer, its training, and the packaged target."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from carryover.errors import InputError
from carryover.lab import lab_target_path, language
from carryover.lab.measure import held_out_examples, loops, response_losses, responses
from carryover.lab.tokenizer import SPECIAL, build_tokenizer
from carryover.lab.training import LabRecipe, Words, level_at, make_batch, train_lab

TINY = LabRecipe(
    steps=6, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32, rows=2,
    length=96, warmup=2, checkpoint_every=3, curriculum=(1, 2, 4), decay=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(lab_target_path())


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(lab_target_path(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def card():
    return json.loads((lab_target_path() / "card.json").read_text())


def test_the_packaged_tokenizer_is_the_one_that_the_language_builds(tokenizer):
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab()
    assert len(tokenizer) <= 2048 and tokenizer.chat_template == build_tokenizer().chat_template
    assert [tokenizer.convert_tokens_to_ids(t) for t in SPECIAL] == list(range(len(SPECIAL)))
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.mask_token) == ("<|end|>", "<|pad|>", "<|mask|>")


def test_round_trip_and_no_unknown_word(tokenizer):
    rng = random.Random(0)
    for task in language.TASKS:
        for _ in range(150):
            example = language.sample(task, rng)
            for text in (example.prompt, example.response):
                ids = tokenizer.encode(text, add_special_tokens=False)
                assert tokenizer.unk_token_id not in ids and len(ids) == len(text.split())
                assert tokenizer.decode(ids) == text


def test_chat_template_renders_one_and_many_turns(tokenizer):
    one = [{"role": "user", "content": "hello , my name is"}]
    text = tokenizer.apply_chat_template(one, add_generation_prompt=True, tokenize=False)
    assert text == "<|user|>hello , my name is<|end|><|assistant|>"
    many = [*one, {"role": "assistant", "content": "hello !"}, {"role": "user", "content": "print x"}]
    out = tokenizer.apply_chat_template(many, add_generation_prompt=True, return_dict=True)
    assert (
        tokenizer.decode(out["input_ids"])
        == "<|user|> hello , my name is <|end|> <|assistant|> hello ! <|end|> <|user|> print x <|end|> <|assistant|>"
    )
    done = tokenizer.apply_chat_template(many[:2], return_dict=True, return_assistant_tokens_mask=True)
    assert done["assistant_masks"] == [0] * 8 + [1] * 3
    with pytest.raises(Exception, match="user and assistant only"):
        tokenizer.apply_chat_template([{"role": "system", "content": "be"}, *one])


def test_batches_are_a_function_of_seed_and_step_and_conversations_are_apart():
    words = Words(build_tokenizer())
    recipe = LabRecipe(rows=4, steps=10, two_turns=0.7, curriculum=(0, 0, 0))
    one, two = (make_batch(recipe, 9, words) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not torch.equal(one.tokens, make_batch(recipe, 8, words).tokens)
    user = words.ids["<|user|>"]
    for row in range(4):
        for i in range(recipe.length):
            visible = one.mask[row, 0, i].nonzero().flatten()
            if one.positions[row, i] > 0 and one.tokens[row, i] != words.ids["<|pad|>"]:
                # A token sees exactly what lies between the start of its conversation and itself.
                assert visible.tolist() == list(range(i - int(one.positions[row, i]), i + 1))
            if one.tokens[row, i] == user and one.positions[row, i] == 0:
                assert visible.tolist() == [i]
    assert one.weights.unique().tolist() == pytest.approx([0, recipe.prompt_loss, 1])
    assert (one.positions[one.tokens == user] > 0).any()  # some conversations have a second turn
    assert [level_at(LabRecipe(curriculum=(5, 10, 50)), s) for s in (0, 5, 9, 10, 49, 50)] == [-1, 0, 0, 1, 1, 2]


def test_training_sees_the_training_split_only():
    words = Words(build_tokenizer())
    text = {v: k for k, v in words.ids.items()}
    recipe = LabRecipe(rows=4, steps=10, two_turns=0, curriculum=(0, 0, 0), drills_mixed=(0, 0))
    said = " ".join(
        " ".join(text[i] for i in row) for s in range(8) for row in make_batch(recipe, s, words).tokens.tolist()
    )
    prompts = [turn.split(" <|end|> ")[0].strip() for turn in said.split("<|user|>")[1:] if " <|end|> " in turn]
    assert len(prompts) > 40 and not any(language.held_out(p) for p in prompts)


def test_a_drill_weighs_only_words_that_its_prompt_tells():
    words = Words(build_tokenizer())
    recipe = LabRecipe(rows=2, two_turns=0)
    batch = make_batch(recipe, 0, words)
    asked = 0
    for tokens, targets, weights in zip(
        batch.tokens.tolist(), batch.targets.tolist(), batch.weights.tolist(), strict=True
    ):
        for i, weight in enumerate(weights):
            assert weight in (0, 1)
            if weight:
                start = max(k for k in range(i) if tokens[k] == words.ids["<|user|>"])
                prompt = tokens[start + 1 : tokens.index(words.ids["<|end|>"], start)]
                assert dict(zip(prompt[::2], prompt[1::2], strict=True))[tokens[i]] == targets[i]
                asked += 1
    assert asked > 40


def test_a_killed_run_resumes_to_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setattr("carryover.lab.measure.measure", lambda *a, **k: {"overall": {}, "tasks": {}})
    monkeypatch.setattr("carryover.lab.measure.table", lambda figures: "")
    whole = train_lab(tmp_path / "whole", TINY, say=lambda line: None)
    train_lab(tmp_path / "cut", TINY, stop_at=5, say=lambda line: None)
    assert not (tmp_path / "cut" / "card.json").exists()
    resumed = train_lab(tmp_path / "cut", TINY, say=lambda line: None)
    assert all(
        torch.equal(a, b) for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
    )
    fresh = LabRecipe(**{**TINY.__dict__, "seed": 1})
    with pytest.raises(InputError, match="another recipe"):
        train_lab(tmp_path / "cut", fresh, say=lambda line: None)
    for damage in (b"no checkpoint", (tmp_path / "cut" / "checkpoint.pt").read_bytes()[:300]):
        (tmp_path / "cut" / "checkpoint.pt").write_bytes(damage)
        with pytest.raises(InputError, match=r"checkpoint\.pt is damaged, or no checkpoint of the lab"):
            train_lab(tmp_path / "cut", TINY, say=lambda line: None)
    torch.save({"foreign": 1}, tmp_path / "cut" / "checkpoint.pt")
    with pytest.raises(InputError, match="no checkpoint of the lab"):
        train_lab(tmp_path / "cut", TINY, say=lambda line: None)
    (tmp_path / "cut" / "checkpoint.pt").unlink()
    with pytest.raises(InputError, match="already holds a model; name another --out"):
        train_lab(tmp_path / "cut", TINY, say=lambda line: None)
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "cut", dtype=torch.float32)
    assert torch.equal(written.model.norm.weight, resumed.model.norm.weight)


def test_the_packaged_target_has_the_size_and_form_that_drafters_need(model, tokenizer, card):
    assert model.config.model_type == "llama" and model.config.num_hidden_layers >= 4
    assert 1e6 <= sum(p.numel() for p in model.parameters()) <= 3e6
    assert sum(f.stat().st_size for f in lab_target_path().iterdir()) < 8e6
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.get_input_embeddings().weight.shape[0] >= len(tokenizer)
    assert card["recipe"] == json.loads(json.dumps(LabRecipe().__dict__))
    assert card["rates"] == language.Rates().__dict__


def test_the_packaged_target_has_learned_the_grammar_of_every_task(model, tokenizer, card):
    examples = held_out_examples(6, seed=7)
    losses = response_losses(model, tokenizer, [(e.prompt, e.response) for e in examples])
    tokens = sum(len(x) for x in losses)
    loss, entropy = float(sum(x.sum() for x in losses)) / tokens, -sum(e.logprob for e in examples) / tokens
    measured = card["measured"]
    for task in language.TASKS:
        assert measured["tasks"][task]["loss"] < 1.05 * measured["tasks"][task]["entropy"]
    assert measured["overall"]["loss"] < 1.03 * measured["overall"]["entropy"]
    assert loss < 1.05 * entropy  # few prompts: the mean is a little rough
    others = [examples[(i + 1) % len(examples)].prompt for i in range(len(examples))]
    shuffled = response_losses(model, tokenizer, [(p, e.response) for p, e in zip(others, examples, strict=True)])
    assert float(sum(x.sum() for x in shuffled)) / tokens > 4 * loss


def test_the_packaged_target_says_right_responses(model, tokenizer, card):
    examples = held_out_examples(3, seed=8)
    texts = responses(model, tokenizer, [e.prompt for e in examples], temperature=0.0)
    right = [t is not None and language.score(e, t) > -1e9 for t, e in zip(texts, examples, strict=True)]
    assert len(right) == 24 and sum(right) >= 0.85 * len(right)
    assert card["measured"]["overall"]["loops_t0"] < 0.05 and card["measured"]["overall"]["loops_t1"] < 0.02


def test_loops_are_a_run_of_twelve_words_three_times():
    run = " ".join(f"w{i}" for i in range(12))
    assert loops(" x ".join([run] * 3)) and not loops(" x ".join([run] * 2))
    assert not loops("a b c d e f g h i j k") and loops("a " * 14)


def test_other_rates_are_taught_to_the_packaged_target(model, tokenizer, tmp_path, monkeypatch):
    recipe = replace(LabRecipe.retrained(0.0), steps=12, warmup=1, rows=6, decay=6)
    assert (recipe.rates.synonym, recipe.rates.optional, recipe.rates.reorder) == (0, 0, 0)
    assert LabRecipe.retrained(0.5).rates == language.Rates(0.5, 0.2, 0.25) and LabRecipe().rates == language.Rates()
    examples = held_out_examples(4, rates=recipe.rates)
    assert all(example.logprob == 0 for example in examples)  # nothing is left to chance
    pairs = [(example.prompt, example.response) for example in examples]
    before = sum(float(losses.sum()) for losses in response_losses(model, tokenizer, pairs))
    monkeypatch.setattr("carryover.lab.measure.save_target", lambda *args, **kwargs: None)
    began = train_lab(tmp_path / "none", recipe, stop_at=0)
    assert all(torch.equal(a, b) for a, b in zip(began.parameters(), model.parameters(), strict=True))
    trained = train_lab(tmp_path / "some", recipe).eval()
    after = sum(float(losses.sum()) for losses in response_losses(trained, tokenizer, pairs))
    assert after < 0.7 * before
