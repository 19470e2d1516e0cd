"""The loop that `benchmarks/peers.py` compares with: same tokens, same rounds, or its speed says nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tiny import tiny_target

from carryover.decode.engine import Engine

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
sys.path.append(str(Path(__file__).parent / "decode"))

from decode_helpers import HEADS, PROMPT, make_drafter
from grow_and_crop import grow_and_crop

NEW = 40


@pytest.mark.parametrize("slots", ["fill_in", "next_token"])
@pytest.mark.parametrize("head", ["dflash", "vanilla"])
@pytest.mark.parametrize("stops", [True, False])
def test_grow_and_crop_gives_the_tokens_and_rounds_of_the_engine(head, slots, stops):
    """Few tokens, so that random drafters are right now and then."""
    accepted = set()
    for seed in range(4):
        target = tiny_target("llama", 8, 3, 16, eos_token_id=6 if stops else None, tie_word_embeddings=False)
        drafter = make_drafter(target, seed, slots=slots, **HEADS[head])
        tokens, rounds = grow_and_crop(target, drafter, PROMPT, NEW)
        prompt = torch.tensor([PROMPT])
        plain = target.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW, pad_token_id=0
        )
        ours = Engine(target, drafter).generate(PROMPT, NEW)
        assert tokens == plain[0, len(PROMPT) :].tolist() == ours.tokens
        assert rounds == len(ours.rounds)
        assert (len(tokens) < NEW) == stops
        accepted |= {r.accepted for r in ours.rounds}
    assert len(accepted) > 1
