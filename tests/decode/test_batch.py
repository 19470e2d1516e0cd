"""Many requests at a time: what happens to one never changes another, whoever is beside it, comes or goes."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from decode_helpers import CARRIES, HEADS, LAYERS, make_drafter
from tiny import tiny_target

from carryover.decode.engine import Engine, Request
from carryover.decode.sampling import Sampling
from carryover.errors import InputError
from carryover.target import Target


@cache
def small(family: str) -> Target:
    """Some responses of it stop early, others never."""
    return tiny_target(family, 24, 6, 5, eos_token_id=[7, 11], tie_word_embeddings=False)


def prompts(count: int = 18) -> list[Request]:
    """Lengths 1 to 19 and limits 1 to 17, so that requests start, end and leave at different times."""
    rng = random.Random(3)
    return [
        Request([rng.randrange(24) for _ in range(1 + 7 * i % 19)], 1 + 11 * i % 17, seed=100 + i) for i in range(count)
    ]


def facts(generation):
    """All of a generation but its times."""
    rounds = [(r.anchor, r.proposals, r.accepted, r.committed, r.carried) for r in generation.rounds]
    return generation.tokens, generation.finish, rounds


ENGINES = [
    (family, head, carry, layers, sampling)
    for i, family in enumerate(("llama", "qwen3", "gemma3_text", "gemma4_text"))
    for head, carry, layers, sampling in (
        (None, "none", "full", Sampling((i % 2) * 1.0)),
        (list(HEADS)[i], "embedding", list(LAYERS)[i], Sampling()),
        (list(HEADS)[3 - i], list(CARRIES)[i + 1], list(LAYERS)[3 - i], Sampling(0.9, top_p=0.95)),
        ("dflash", "none", "full", Sampling()),
        (list(HEADS)[i], ("rejected_tokens", "target_top1")[i % 2], list(LAYERS)[i], Sampling((i // 2) * 0.9)),
    )
]


@pytest.mark.parametrize("family, head, carry, layers, sampling", ENGINES)
def test_a_response_does_not_depend_on_its_company(family, head, carry, layers, sampling):
    target, asked = small(family), prompts()
    drafter = make_drafter(target, **HEADS[head], **CARRIES[carry], **LAYERS[layers]) if head else None
    engine = Engine(target, drafter, sampling, "probabilistic", timed=False)
    alone = [facts(engine.generate(*prompt[:3])) for prompt in asked]
    assert {finish for _, finish, _ in alone} == {"stop", "length"}
    assert any(carried for _, _, rounds in alone for *_, carried in rounds) == (carry != "none")
    order = list(range(len(asked)))
    for size, shuffled in ((1, False), (4, True), (16, True)):
        if shuffled:
            random.Random(size).shuffle(order)
        together = {order[i]: facts(g) for i, g in engine.generate_many([asked[j] for j in order], size)}
        assert len(together) == len(asked)
        for i, expected in enumerate(alone):
            assert together[i] == expected, (size, i)


def test_few_carry_rows_in_company():
    """Requests of one batch carry what they may, those with little to carry and those with more than the limit."""
    target = small("llama")
    for interface in (CARRIES["embedding"], {**CARRIES["embedding"], **LAYERS["causal"]}, CARRIES["target_top1"]):
        engine = Engine(target, make_drafter(target, slots="next_token", **interface), carry_rows=2)
        asked = prompts()
        alone = [facts(engine.generate(*prompt[:3])) for prompt in asked]
        assert {carried for _, _, rounds in alone for *_, carried in rounds} >= {0, 2}
        assert {i: facts(g) for i, g in engine.generate_many(asked, 4)} == dict(enumerate(alone))


def test_batches_work_through_the_queue_and_forward_once_a_round(monkeypatch):
    """A finished request is replaced at once; a round is one forward for all; carry costs no target work."""
    target = small("llama")
    calls, forward = [], target.decoder.forward

    def counted(tokens, **kwargs):
        calls.append(tuple(tokens.shape))
        return forward(tokens, **kwargs)

    monkeypatch.setattr(target.decoder, "forward", counted)
    asked = [Request([3 + i % 4, 9], limit, i) for i, limit in enumerate([20, 3, 3, 3, 3, 3, 1, 9])]
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", 99)
    made = {}
    for carry in ("none", "embedding"):
        calls.clear()
        engine = Engine(target, make_drafter(target, **CARRIES[carry]))
        made[carry] = dict(engine.generate_many(asked, 3))
        prefills = [shape for shape in calls if shape[1] == 2]
        rounds = [shape for shape in calls if shape[1] != 2]
        assert prefills == [(1, 2)] * len(asked) and {width for _, width in rounds} == {4}
        assert sum(rows for rows, _ in rounds) == sum(len(g.rounds) for g in made[carry].values())
        waiting = len(asked) - 3
        assert rounds[0][0] == 3 and max(rows for rows, _ in rounds) == 3 and waiting > 0
        ones = [i for i, (rows, _) in enumerate(rounds) if rows < 3]
        assert ones == list(range(ones[0], len(rounds))), "slots stay full while prompts wait"
    assert {i: g.tokens for i, g in made["none"].items()} == {i: g.tokens for i, g in made["embedding"].items()}


def test_times_are_each_requests_share():
    target = small("llama")
    engine = Engine(target, make_drafter(target, carry="embedding"))
    made = [g for _, g in engine.generate_many(prompts(8), 8)]
    for g in made:
        parts = g.prefill_seconds + sum(r.draft_seconds + r.verify_seconds for r in g.rounds)
        assert 0 < parts <= g.seconds


def test_refusals_come_before_anything_is_decoded(monkeypatch):
    target = small("llama")
    monkeypatch.setattr(target, "prefill", lambda *args: pytest.fail("decoded"))
    engine = Engine(target)
    with pytest.raises(InputError, match="empty"):
        next(engine.generate_many([Request([3], 4), Request([], 4)], 2))
    with pytest.raises(InputError, match="at least one row, got 0"):
        next(engine.generate_many(prompts(), 0))
    assert list(engine.generate_many([], 4)) == []


@torch.inference_mode()  # the engine's own: caches are written in place
def test_nothing_of_a_request_is_left_in_its_slot():
    """NaN in everything a finished request wrote must not reach the next one."""
    target = small("gemma3_text")
    engine = Engine(target, make_drafter(target, carry="embedding", **LAYERS["sliding"]))
    asked = [p for p in prompts(6) if p.max_new_tokens > 3]
    expected = [facts(engine.generate(*prompt[:3])) for prompt in asked]
    batch = engine.new_batch(asked, 1)
    for prompt, facts_alone in zip(asked, expected, strict=True):
        from carryover.decode.trace import Generation

        generation = Generation(len(prompt.ids))
        going = engine.join(batch, prompt, generation)
        while going:
            going = not engine.take(batch.requests[0], engine.round(batch)[0])
        assert facts(generation) == facts_alone
        batch.leave(0) if batch.requests else None
        assert batch.draft_cache is not None
        for pair in [*batch.cache.buffers.values(), *batch.draft_cache.layers]:
            for buffer in pair:
                assert torch.isfinite(buffer).all()
                buffer.mul_(-3).add_(1e4)
