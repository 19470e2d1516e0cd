"""Where a response ends: stop tokens, lengths, the end of the context; and what is no input at all."""

from __future__ import annotations

import pytest
from decode_helpers import PROMPT, ScriptedDrafter, make_drafter
from tiny import tiny_target

from carryover.decode import loops
from carryover.decode.engine import Engine, Request
from carryover.decode.trace import Generation
from carryover.errors import InputError

PLANS = {"oracle": lambda r: 99, "half right": lambda r: 2, "always wrong": lambda r: 0}


@pytest.fixture(scope="module")
def endless():
    """A target that never stops by itself."""
    return tiny_target(seed=3, layers=3, eos_token_id=None)


@pytest.fixture(scope="module")
def truth(endless):
    tokens = Engine(endless).generate(PROMPT, 30).tokens
    assert len(set(tokens[:13])) >= 8  # no trivial loop
    return tokens


def scripted(target, truth, plan):
    drafter = make_drafter(target, kind=ScriptedDrafter, block_size=5, carry="embedding")
    return drafter.follow(PROMPT + truth, PLANS[plan])


@pytest.mark.parametrize("plan", [*PLANS, None])
@pytest.mark.parametrize("count", range(1, 14))
def test_length_limit_at_every_offset_of_a_block(endless, truth, plan, count):
    drafter = scripted(endless, truth, plan) if plan else None
    generation = Engine(endless, drafter).generate(PROMPT, count)
    assert generation.tokens == truth[:count] and generation.finish == "length"
    assert [t for r in generation.rounds for t in r.committed] == truth[1:count]
    assert all(r.accepted <= len(r.committed) for r in generation.rounds)


@pytest.mark.parametrize("plan", [*PLANS, None])
@pytest.mark.parametrize("at", range(13))
def test_stop_token_at_every_offset_of_a_block(endless, truth, plan, at, monkeypatch):
    monkeypatch.setattr(endless.model.generation_config, "eos_token_id", [truth[at], 95])
    expected = truth[: truth.index(truth[at]) + 1]
    drafter = scripted(endless, truth, plan) if plan else None
    generation = Engine(endless, drafter).generate(PROMPT, 30)
    assert generation.tokens == expected and generation.finish == "stop"
    assert [t for r in generation.rounds for t in r.committed] == expected[1:]
    if plan == "oracle" and len(expected) % 5 != 1:  # the stop token was one of the proposals
        assert generation.rounds[-1].accepted == len(generation.rounds[-1].committed)


def test_stop_token_is_the_last_that_fits(endless, truth, monkeypatch):
    monkeypatch.setattr(endless.model.generation_config, "eos_token_id", truth[4])
    expected = truth[: truth.index(truth[4]) + 1]
    for count, finish in ((len(expected), "stop"), (len(expected) - 1, "length")):
        generation = Engine(endless, scripted(endless, truth, "oracle")).generate(PROMPT, count)
        assert (generation.tokens, generation.finish) == (expected[:count], finish)


def test_mask_pad_and_other_special_ids_are_ordinary_tokens():
    """Relabels the vocabulary so that the response consists of the pad, start, end and mask ids among others."""
    vocab = 12
    target = tiny_target(seed=3, layers=3, vocab=vocab, eos_token_id=None)
    truth = Engine(target).generate(PROMPT, 24).tokens
    special = list(dict.fromkeys(truth))[:4]
    old = special + [i for i in range(vocab) if i not in special]  # new id i is old token old[i]
    embedding = target.model.get_input_embeddings().weight
    embedding.copy_(embedding[old].clone())
    relabelled, prompt = ([old.index(t) for t in tokens] for tokens in (truth, PROMPT))
    assert {0, 1, 2, 3} <= set(relabelled) and target.tokenizer.pad_token_id == 0 and target.tokenizer.eos_token_id == 2
    assert Engine(target).generate(prompt, 24).tokens == relabelled
    for seed in range(3):
        drafter = make_drafter(target, seed, mask_token_id=3, carry="embedding")
        assert Engine(target, drafter).generate(prompt, 24).tokens == relabelled
    scripted = make_drafter(target, kind=ScriptedDrafter, mask_token_id=3)
    oracle = scripted.follow(prompt + relabelled + [0] * 4, lambda r: 99)
    assert Engine(target, oracle).generate(prompt, 24).tokens == relabelled


@pytest.mark.parametrize("plan", [*PLANS, None])
def test_the_end_of_the_context(plan, monkeypatch):
    target = tiny_target(seed=3, layers=3, eos_token_id=None, max_position_embeddings=18)
    truth = Engine(target).generate(PROMPT, 100).tokens
    assert len(PROMPT) + len(truth) == 18
    ends, forward = [], target.forward

    def watched(tokens, cache, layer_ids, positions=None, masks=None):
        ends.append(tokens.shape[1] if positions is None else int(positions.max()) + 1)
        return forward(tokens, cache, layer_ids, positions, masks)

    monkeypatch.setattr(target, "forward", watched)
    drafter = scripted(target, truth + [0] * 5, plan) if plan else None
    generation = Engine(target, drafter).generate(PROMPT, 100)
    assert generation.tokens == truth and generation.finish == "length"
    assert max(ends) <= 18  # the target never sees a position beyond its last
    if plan == "half right":
        assert [len(r.proposals) for r in generation.rounds] == [4, 4, 4, 3]


def test_prompts_that_just_fit_and_do_not():
    target = tiny_target(seed=3, layers=3, eos_token_id=None, max_position_embeddings=8)
    generation = Engine(target, make_drafter(target)).generate([3] * 7, 5)
    assert len(generation.tokens) == 1 and generation.rounds == [] and generation.finish == "length"
    with pytest.raises(InputError, match="8 tokens and leaves no room"):
        Engine(target).generate([3] * 8, 5)


@pytest.mark.parametrize(
    "prompt, count, message",
    [
        ([], 5, "empty"),
        ([3, 96], 5, r"outside the target's vocabulary \(0 to 95\)"),
        ([-1, 3], 5, "outside"),
        ([3], 0, "max_new_tokens must be at least 1"),
    ],
)
def test_bad_requests(endless, prompt, count, message):
    with pytest.raises(InputError, match=message):
        Engine(endless).generate(prompt, count)
    with pytest.raises(InputError, match=message):
        Engine(endless).rounds(prompt, count)  # at once, not when the first round is asked for


def test_unknown_draft_sampling(endless):
    with pytest.raises(InputError, match="draft_sampling must be greedy or probabilistic"):
        Engine(endless, draft_sampling="typical")


def test_rounds_stream_the_generation(endless, truth):
    generation, seen = Generation(len(PROMPT)), []
    for round_ in Engine(endless, scripted(endless, truth, "half right")).rounds(PROMPT, 12, generation=generation):
        assert round_ is generation.rounds[-1]
        seen.append(len(generation.tokens))
    assert seen == [4, 7, 10, 12] and generation.tokens == truth[:12]


def test_times_are_filled_in_if_asked_for(endless, truth):
    timed = Engine(endless, scripted(endless, truth, "oracle")).generate(PROMPT, 12)
    assert all(r.draft_seconds > 0 and r.verify_seconds > 0 for r in timed.rounds)
    parts = timed.prefill_seconds + sum(r.draft_seconds + r.verify_seconds for r in timed.rounds)
    assert timed.prefill_seconds > 0 and parts <= timed.seconds
    plain = Engine(endless).generate(PROMPT, 4)
    assert all(r.draft_seconds == 0 and r.verify_seconds > 0 for r in plain.rounds)
    untimed = Engine(endless, scripted(endless, truth, "oracle"), timed=False).generate(PROMPT, 12)
    assert all(r.draft_seconds == r.verify_seconds == 0 for r in untimed.rounds) and untimed.seconds > 0
    assert untimed.tokens == timed.tokens


def test_trace_round_trip(endless):
    generation = Engine(endless, make_drafter(endless, carry="plain")).generate(PROMPT, 6)
    assert Generation.from_dict(generation.as_dict()) == generation
    assert all(type(t) is int for r in generation.rounds for t in r.proposals + r.committed)


@pytest.mark.parametrize("plan", [*PLANS, None])
@pytest.mark.parametrize("length", [2, 3, 4])
def test_a_degenerate_loop_ends_every_methods_response_at_the_same_token(endless, plan, length, monkeypatch):
    monkeypatch.setattr(loops, "LENGTH", length)
    known = Engine(endless).generate(PROMPT, 130).tokens
    whole = known[:120]

    def degenerate(tokens: list[int]) -> bool:
        runs = [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]
        return any(runs.count(run) >= 3 for run in runs)

    expected = next(whole[:n] for n in range(1, 121) if degenerate(whole[:n]))
    drafter = scripted(endless, known, plan) if plan else None
    engine = Engine(endless, drafter, stop_loops=True)
    generation = engine.generate(PROMPT, 120)
    assert generation.tokens == expected and generation.finish == "loop"
    assert [t for r in generation.rounds for t in r.committed] == expected[1:]
    slots = 1 if plan else 2  # a scripted drafter knows one sequence
    assert [g.tokens for _, g in engine.generate_many([Request(PROMPT, 120)] * 3, slots)] == [expected] * 3
    assert engine.generate(PROMPT, len(expected) - 1).finish == "length"
    assert Engine(endless, drafter).generate(PROMPT, 120).tokens == whole
