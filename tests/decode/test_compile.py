"""The compiled path says what the uncompiled one says, compiles seldom, and is done without where it is impossible."""

from __future__ import annotations

import pytest
import torch
from decode_helpers import make_drafter
from tiny import tiny_target
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention

from carryover import compiled, notes
from carryover.attention import grouped_attention
from carryover.compiled import Compiled, bucket
from carryover.decode.conversation import Conversation
from carryover.decode.engine import Engine, Request


@pytest.fixture(autouse=True)
def possible(monkeypatch):
    """Small buckets, nothing compiled yet, and what one test finds impossible is possible again for the next one."""
    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "SMALLEST", 32)
    monkeypatch.setattr(Compiled, "possible", True)


def asked(limit: int = 30) -> list[Request]:
    """Prompts of 3, 27 and 51 tokens: before, at and beyond the border of the first bucket."""
    return [Request([3 + i, 5, 7] * (1 + 8 * i), limit, i) for i in range(3)]


def facts(generations):
    return {i: (g.tokens, [(r.anchor, r.proposals, r.accepted, r.carried) for r in g.rounds]) for i, g in generations}


def test_buckets_are_powers_of_two(monkeypatch):
    monkeypatch.undo()
    assert [bucket(rows) for rows in (1, 255, 256, 257, 1024, 1025)] == [256, 256, 256, 512, 1024, 2048]


@pytest.mark.slow
@pytest.mark.parametrize("carry", [None, "none", "embedding"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gemma4_text"])
def test_compiled_and_uncompiled_say_the_same(family, carry, capsys):
    target = tiny_target(family, 24, 6, 5, eos_token_id=[7], tie_word_embeddings=False)
    drafter = make_drafter(target, carry=carry) if carry else None
    fast, slow = Engine(target, drafter, compile=True), Engine(target, drafter)
    for size in (1, 3):
        expected = facts(slow.generate_many(asked(), size))
        counters.clear()
        assert facts(fast.generate_many(asked(), size)) == expected
        assert 0 < counters["stats"]["unique_graphs"] < 16
        counters.clear()
        assert facts(fast.generate_many(asked(), size)) == expected
        assert counters["stats"]["unique_graphs"] == 0, "compiled again"
    assert Compiled.possible and "uncompiled" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_conversation_grows_its_caches():
    target = tiny_target("llama", 24, 2, eos_token_id=99)
    engine = Engine(target, make_drafter(target, carry="embedding"), compile=True)
    talk, ids = Conversation(engine), [3, 5, 7]
    for _ in range(3):
        reply = talk.generate(ids, 25).tokens
        assert reply == Engine(target).generate(ids, 25).tokens
        ids = [*ids, *reply, 4]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("with_drafter", [False, True])
def test_where_it_is_impossible_one_note_is_all_that_happens(monkeypatch, capsys, size, with_drafter):
    """Static shapes without compiled functions: what is written, masked and padded is as in the compiled path."""
    monkeypatch.setattr(notes, "_said", set())
    target = tiny_target("qwen3", 24, 6, 5, eos_token_id=[7], tie_word_embeddings=False)
    drafter = make_drafter(target, carry="embedding") if with_drafter else None

    def broken(*args, **kwargs):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: broken)
    made = facts(Engine(target, drafter, compile=True).generate_many(asked(), size))
    assert made == facts(Engine(target, drafter).generate_many(asked(), size))
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "uncompiled" in line] == said[1:] and "no C++ compiler" in said[1]


@pytest.mark.parametrize("carry", [None, "embedding", "hint"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma4_text", "gemma4_unified_text"])
def test_static_shapes_change_nothing(monkeypatch, family, carry):
    """The same functions uncompiled, with caches read whole and empty slots beside the requests."""
    monkeypatch.setattr(torch, "compile", lambda function, **kwargs: function)
    target = tiny_target(family, 24, 6, 5, eos_token_id=[7], tie_word_embeddings=False)
    drafter = make_drafter(target, carry=carry) if carry else None
    for size in (1, 3):
        for limit in (None, 1) if carry == "embedding" else (None,):
            engines = [Engine(target, drafter, compile=fast, carry_rows=limit) for fast in (True, False)]
            made, expected = (facts(engine.generate_many(asked(), size)) for engine in engines)
            assert made == expected


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("per_request", [False, True])
def test_grouped_attention_is_attention(queries, per_request):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, queries, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    mask = torch.rand(2 if per_request else 1, 1, queries, 9) < 0.5
    mask[..., 0] = True
    k3, v3 = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
    for scale in (None, 1.0):
        expected = scaled_dot_product_attention(q, k3, v3, attn_mask=mask, scale=scale)
        torch.testing.assert_close(grouped_attention(q, k, v, mask, scale), expected, atol=1e-6, rtol=1e-5)
