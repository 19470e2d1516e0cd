"""A conversation answers as if every turn were read afresh, and reads only what is new."""

from __future__ import annotations

import random

import pytest
import torch
from decode_helpers import HEADS, LAYERS, make_drafter
from tiny import tiny_target

from carryover.decode.conversation import Conversation
from carryover.decode.engine import Engine
from carryover.decode.sampling import Sampling
from carryover.errors import InputError


def facts(generation):
    rounds = [(r.anchor, r.proposals, r.accepted, r.committed, r.carried) for r in generation.rounds]
    return generation.tokens, generation.finish, rounds


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma4_text"])
@pytest.mark.parametrize("head, layers, sampling", [(None, "full", Sampling()), ("dflash", "sliding", Sampling()),
                                                    ("vanilla", "causal", Sampling(1.0))])  # fmt: skip
def test_turns_equal_fresh_ones_and_read_only_what_is_new(family, head, layers, sampling):
    target = tiny_target(family, 24, 6, 5, eos_token_id=[7, 11], tie_word_embeddings=False)
    drafter = make_drafter(target, carry="embedding", **HEADS[head], **LAYERS[layers]) if head else None
    engine, rng, widths = Engine(target, drafter, sampling, "probabilistic"), random.Random(1), []
    forward = target.decoder.forward

    def counted(tokens, **kwargs):
        widths.append(tokens.shape[1])
        return forward(tokens, **kwargs)

    talk, ids = Conversation(engine), [3, 1, 4]
    p = engine.proposals
    for turn in range(5):
        new = 1 + 3 * turn
        ids += [rng.randrange(24) for _ in range(new)]
        expected = engine.generate(ids, 13, seed=turn)
        target.decoder.forward = counted
        widths.clear()
        generation = talk.generate(ids, 13, seed=turn)
        target.decoder.forward = forward
        assert facts(generation) == facts(expected), turn
        assert widths[0] == talk.read
        if turn:  # the new tokens, the last of the response, and at most one verification's worth
            assert new + 1 <= talk.read <= new + p + 2
        ids += generation.tokens
    # Going back to an earlier point of the conversation, and to another conversation, is no different.
    for prompt in (ids[:9], [5, 5, 2], [5, 5, 2], ids[:20]):
        assert facts(talk.generate(prompt, 9, seed=1)) == facts(engine.generate(prompt, 9, seed=1))
    rounds = talk.rounds(ids, 12, seed=2)
    next(rounds, None)
    rounds.close()  # a reader who leaves in mid-turn
    assert facts(talk.generate(ids, 12, seed=2)) == facts(engine.generate(ids, 12, seed=2))


def test_refused_prompts_leave_the_conversation_as_it_was():
    target = tiny_target("llama", 24, 3, 5, eos_token_id=[7], max_position_embeddings=40)
    engine = Engine(target, make_drafter(target, carry="embedding"))
    talk = Conversation(engine)
    first = talk.generate([3, 4, 5], 6)
    for prompt, message in (([], "empty"), ([3] * 40, "leaves no room"), ([3, 99], "outside")):
        with pytest.raises(InputError, match=message):
            talk.rounds(prompt, 6)
    again = [3, 4, 5, *first.tokens, 6]
    assert talk.generate(again, 40).tokens == engine.generate(again, 40).tokens
    assert talk.read <= len(first.tokens) + 1
    assert torch.isfinite(talk.batch.cache.buffers[0][0]).all()
