"""At temperature 0 the output is the target's own, whatever the drafter does."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from decode_helpers import CARRIES, HEADS, LAYERS, PROMPT, ScriptedDrafter, begin, make_drafter
from tiny import tiny_target

from carryover.decode.engine import Engine
from carryover.target import Target

NEW = 20


SEEDS = {"llama": 16, "qwen3": 21, "gemma3_text": 35}  # of targets that do not loop


@cache
def small(family: str) -> Target:
    """Few tokens, so that random drafters are right now and then; it never stops by itself."""
    return tiny_target(family, 8, 3, SEEDS[family], eos_token_id=None, tie_word_embeddings=False)


@cache
def continuation(family: str, count: int = NEW + 8) -> list[int]:
    """What transformers generates greedily."""
    model, prompt = small(family).model, torch.tensor([PROMPT])
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False)
    return out[0, len(PROMPT) :].tolist()


def check_trace(generation, proposals):
    """What must hold for the rounds of any generation that no stop token ends."""
    emitted = [token for r in generation.rounds for token in r.committed]
    assert generation.tokens[1:] == emitted
    at, carried = generation.prompt_tokens, 0
    for r in generation.rounds[:-1]:
        assert r.anchor == at and len(r.proposals) == proposals
        assert r.committed[:-1] == r.proposals[: r.accepted] and len(r.committed) == r.accepted + 1
        at += r.accepted + 1
        carried = proposals - r.accepted
    assert generation.rounds[-1].anchor == at
    return carried


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_plain_decoding_is_transformers_greedy(family):
    generation = Engine(small(family)).generate(PROMPT, NEW)
    assert generation.tokens == continuation(family)[:NEW] and generation.finish == "length"
    assert len(set(generation.tokens)) >= 6  # no trivial loop
    assert check_trace(generation, 0) == 0


@pytest.mark.parametrize("head", ["dflash", "vanilla", "rnn"])
def test_a_reduced_draft_vocabulary_changes_proposals_only(head):
    target = small("llama")
    drafter = make_drafter(target, 2, carry="embedding", slots="next_token", draft_vocab_size=5, **HEADS[head])
    drafter.draft_vocab = torch.tensor([0, 1, 3, 6, 7])
    generation = Engine(target, drafter).generate(PROMPT, NEW)
    assert generation.tokens == continuation("llama")[:NEW]
    proposed = {token for r in generation.rounds for token in r.proposals}
    assert proposed <= {0, 1, 3, 6, 7} and not set(generation.tokens) <= proposed
    assert sum(r.accepted for r in generation.rounds) > 0


COMBINATIONS = [
    (head, slots, list(CARRIES)[(2 * i + j) % len(CARRIES)], list(LAYERS)[(i + j) % len(LAYERS)])
    for i, head in enumerate(HEADS)
    for j, slots in enumerate(("fill_in", "next_token", "fill_in", "next_token"))
]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("head, slots, carry, layers", COMBINATIONS)
def test_random_drafters(family, head, slots, carry, layers):
    drafter = make_drafter(small(family), slots=slots, **HEADS[head], **CARRIES[carry], **LAYERS[layers])
    generation = Engine(small(family), drafter).generate(PROMPT, NEW)
    assert generation.tokens == continuation(family)[:NEW]
    check_trace(generation, drafter.config.num_proposals)
    assert all(r.carried == 0 for r in generation.rounds) == (carry == "none")


def test_random_drafters_are_sometimes_right():
    """Or else the test above would only ever see rejections at the first proposal."""
    accepted = set()
    for seed in range(12):
        drafter = make_drafter(small("llama"), seed, carry="embedding", **HEADS["vanilla"])
        generation = Engine(small("llama"), drafter).generate(PROMPT, NEW)
        assert generation.tokens == continuation("llama")[:NEW]
        accepted |= {r.accepted for r in generation.rounds[:-1]}
    assert {0, 1, 2} <= accepted


PLANS = {
    "always wrong": lambda r: 0,
    "oracle": lambda r: 99,
    "half right": lambda r: 2,
    "changing": lambda r: r * 3 % 5,
}


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("slots", ["fill_in", "next_token"])
@pytest.mark.parametrize("carry", ["none", "embedding", "projector"])
@pytest.mark.parametrize("plan", PLANS)
def test_scripted_drafters(family, slots, carry, plan):
    target = small(family)
    drafter = make_drafter(target, kind=ScriptedDrafter, slots=slots, **CARRIES[carry], **LAYERS["sliding"])
    drafter.follow(PROMPT + continuation(family), PLANS[plan])
    generation = Engine(target, drafter).generate(PROMPT, NEW)
    assert generation.tokens == continuation(family)[:NEW]
    p = drafter.config.num_proposals
    check_trace(generation, p)
    right = [min(p, PLANS[plan](r)) for r in range(len(generation.rounds))]
    assert [r.accepted for r in generation.rounds[:-1]] == right[:-1]
    rejected = [0] + [p - n for n in right[:-1]]
    assert [r.carried for r in generation.rounds] == (rejected if carry != "none" else [0] * len(rejected))


@pytest.mark.parametrize("head", HEADS)
def test_drawn_drafts_do_not_change_greedy_output(head):
    drafter = make_drafter(small("llama"), carry="embedding", **HEADS[head])
    generation = Engine(small("llama"), drafter, draft_sampling="probabilistic").generate(PROMPT, NEW, seed=9)
    assert generation.tokens == continuation("llama")[:NEW]


@pytest.mark.parametrize(
    "target_dtype, draft_dtype", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_target_and_drafter_of_different_precision(target_dtype, draft_dtype):
    target = tiny_target("llama", 8, 3, SEEDS["llama"], eos_token_id=None, tie_word_embeddings=False)
    target = Target(target.model.to(target_dtype), target.tokenizer)
    drafter = make_drafter(target, carry="embedding", markov_rank=4).to(draft_dtype)
    generation = Engine(target, drafter).generate(PROMPT, 8)
    assert len(generation.tokens) == 8
    if target_dtype == torch.float32:
        assert generation.tokens == continuation("llama")[:8]


@pytest.mark.parametrize("drafting", [False, True])
def test_one_target_forward_per_round(drafting, monkeypatch):
    target, calls = small("llama"), []
    drafter = make_drafter(target, carry="embedding", markov_rank=4) if drafting else None
    forward = target.decoder.forward

    def counted(tokens, **kwargs):
        calls.append(tokens.shape[1])
        return forward(tokens, **kwargs)

    monkeypatch.setattr(target.decoder, "forward", counted)
    generation = Engine(target, drafter).generate(PROMPT, NEW)
    assert calls == [len(PROMPT)] + [1 + len(r.proposals) for r in generation.rounds]


def test_the_head_runs_on_the_rows_that_need_it_only(monkeypatch):
    target, rows = small("llama"), []
    head = target.head
    monkeypatch.setattr(target, "head", lambda hidden: rows.append(hidden.shape[:-1].numel()) or head(hidden))
    drafter = make_drafter(target)
    generation = Engine(target, drafter).generate(PROMPT, NEW)
    assert rows == [1] + [drafter.config.num_proposals, drafter.config.num_proposals + 1] * len(generation.rounds)


def test_the_target_cache_keeps_committed_rows_only():
    """After every round its rows up to the anchor equal those of a fresh run over the committed tokens."""
    target = small("gemma3_text")
    engine = Engine(target, make_drafter(target, carry="embedding"))
    batch, tokens = begin(engine, PROMPT, NEW), [*PROMPT, continuation("gemma3_text")[0]]
    buffers = {layer: [buffer.data_ptr() for buffer in pair] for layer, pair in batch.cache.buffers.items()}
    for _ in range(5):
        tokens += engine.round(batch)[0].committed
        anchor = batch.requests[0].anchor
        assert anchor == len(tokens) - 1
        fresh = target.new_cache()
        target.forward(torch.tensor([tokens[:-1]]), fresh)
        for i, expected in enumerate(fresh.layers):
            keys, values = (buffer[:, :, :anchor] for buffer in batch.cache.buffers[i])
            assert torch.allclose(keys, expected.keys, atol=1e-5)
            assert torch.allclose(values, expected.values, atol=1e-5)
    after = {layer: [buffer.data_ptr() for buffer in pair] for layer, pair in batch.cache.buffers.items()}
    assert after == buffers  # written in place, never reallocated
