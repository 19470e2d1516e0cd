"""Matched-anchor recall: counts on hand-made ranks, and ranks against drafts rebuilt from nothing but the tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from drafters import random_drafter
from tiny import tiny_target
from torch import Tensor

from carryover.decode.engine import Engine
from carryover.drafter.modeling import Drafter
from carryover.evaluate.diagnose import follow
from carryover.evaluate.recall import accepted, ranks, recall, tally
from carryover.rows import block_rows, carry_rows, concat, context_rows
from carryover.target import Target

PROMPT = [3, 1, 4, 1, 5]
SMALL = {"vocab_size": 8, "num_target_layers": 3, "target_layer_ids": [-1, 1], "mask_token_id": 2, "block_size": 4}
MARKOV = {"slots": "next_token", "markov_rank": 6}


@pytest.fixture(scope="module")
def small() -> Target:
    """A vocabulary of 8: random drafters are right now and then."""
    return tiny_target("llama", 8, 3, 16, eos_token_id=None, tie_word_embeddings=False)


def make_drafter(seed: int, **overrides: Any) -> Drafter:
    return random_drafter(seed, **{**SMALL, **overrides})


# ---- the obvious way -----------------------------------------------------------------------------------------------
def features_of(target: Target, drafter: Drafter, tokens: list[int]) -> Tensor:
    return target.forward(torch.tensor([tokens]), layer_ids=drafter.config.layer_ids).features  # type: ignore[return-value]


@torch.no_grad()
def rebuilt(target: Target, drafter: Drafter, text: list[int], anchor: int, branch: list[int], n: int) -> Tensor:
    """Block states `[B, D]` at `anchor` of `text`, in one uncached pass; carry: rows n+1.. of `branch`, which was
    proposed at the anchor before."""
    zero, context = torch.zeros(1, 1, dtype=torch.long), torch.arange(anchor)[None]
    block = block_rows(zero + anchor, zero, drafter.config.block_size)
    keys, carried = [context_rows(context, torch.zeros_like(context))], None
    if branch:
        before = anchor - n - 1
        keys.append(carry_rows(zero + before, zero, zero + n, len(branch)))
        carried = features_of(target, drafter, text[: before + 1] + branch)[:, before + 1 :]
    tokens = torch.tensor([[text[anchor]] + [drafter.config.mask_token_id] * (drafter.config.block_size - 1)])
    return drafter(
        target.embed(tokens), block.position, drafter.masks(block, concat(*keys, block)),
        features_of(target, drafter, text[:anchor]), context, carried, keys[-1].position if branch else None,
    )[0]  # fmt: skip


@torch.no_grad()
def slow_ranks(target: Target, drafter: Drafter, states: Tensor, anchor_token: int, reference: list[int]) -> list[int]:
    w, found, previous = drafter.state_dict(), [], anchor_token
    for k, token in enumerate(reference):
        logits = target.head(states[k + drafter.config.first_slot])
        if drafter.config.markov_rank:
            logits = logits + w["markov_head.markov_w2.weight"] @ w["markov_head.markov_w1.weight"][previous]
        found.append(sorted(range(len(logits)), key=lambda i: -float(logits[i])).index(token))
        previous = token
    return found


@pytest.mark.parametrize("head", [{}, MARKOV], ids=["dflash", "markov"])
def test_ranks_of_three_drafters_at_every_state(small: Target, head: dict[str, Any]) -> None:
    """The baseline has another layer count, other target layers, and is never the one that is decoded."""
    drafter = make_drafter(3, carry="embedding", **head)
    baseline = make_drafter(4, target_layer_ids=[0, 1], num_hidden_layers=1, **head)
    generation, record, sums = follow(small, drafter, baseline, PROMPT, 24)
    assert generation.tokens == record["tokens"] == Engine(small).generate(PROMPT, 24).tokens
    decoded = Engine(small, drafter).generate(PROMPT, 24)
    keys = ("anchor", "proposals", "accepted")
    assert [[r[key] for key in keys] for r in record["rounds"]] == [
        [getattr(r, key) for key in keys] for r in decoded.rounds
    ]
    plain = Engine(small, baseline).generate(PROMPT, 24)
    assert (record["baseline_tokens"], record["baseline_rounds"]) == (len(plain.tokens) - 1, len(plain.rounds))
    p = drafter.config.num_proposals
    assert record["following"] == Engine(small).generate(PROMPT, 24 + p + 2).tokens[24:]

    text, states = PROMPT + record["tokens"] + record["following"], 0
    for last, r in zip(record["rounds"], record["rounds"][1:], strict=False):
        anchor, n = r["anchor"], last["accepted"]
        verified = small.head(small.forward(torch.tensor([text[: anchor + 1] + r["proposals"]])).hidden)[0].argmax(-1)
        assert r["top"] == verified[anchor:].tolist()
        assert ("on" in r) == (n < p)
        if n == p:
            continue
        states += 1
        reference = text[anchor + 1 : anchor + 1 + p]
        compared = {"on": (drafter, last["proposals"]), "off": (drafter, []), "baseline": (baseline, [])}
        for name, (which, branch) in compared.items():
            block = rebuilt(small, which, text, anchor, branch, n)
            assert r[name] == slow_ranks(small, which, block, text[anchor], reference)
        assert accepted(r["on"]) == r["accepted"] or r is record["rounds"][-1]  # which the limit cuts
    assert states == len(sums) >= 8
    assert any(r.get("on") != r.get("off") for r in record["rounds"])
    assert len({accepted(r[name]) for r in record["rounds"] if "on" in r for name in ("on", "off", "baseline")}) > 1


def test_local_replay_is_one_verification(small: Target) -> None:
    """The proposals that a drafter without carry makes at the same states, judged by the target itself."""
    drafter = make_drafter(3, carry="embedding", **MARKOV)
    _, record, _ = follow(small, drafter, drafter, PROMPT, 24)
    text = PROMPT + record["tokens"] + record["following"]
    off = Engine(small, drafter, carry=False)
    for r in record["rounds"]:
        if "on" not in r:
            continue
        assert r["off"] == r["baseline"]  # here the same drafter without carry
        generation = off.generate(text[: r["anchor"]], 2)  # re-reads everything; its first draft has no carry
        assert generation.tokens[0] == text[r["anchor"]]
        proposals = generation.rounds[0].proposals
        said = small.head(small.forward(torch.tensor([text[: r["anchor"] + 1] + proposals])).hidden)[0].argmax(-1)
        matches = [a == b for a, b in zip(proposals, said[r["anchor"] :].tolist(), strict=False)]
        assert accepted(r["off"]) == [*matches, False].index(False)


def test_ranks_break_ties_like_argmax() -> None:
    drafter = make_drafter(0)
    logits = torch.tensor([[[0, 3, 1, 3, 3, 0, 0, 2], [0.0] * 8, [5, 4, 3, 2, 1, 0, 6, 7]]]).float()
    for wanted, expected in (([1, 0, 7], [0, 0, 0]), ([4, 7, 5], [2, 7, 7]), ([7, 3], [3, 3]), ([2], [4])):
        found = ranks(drafter, torch.zeros(1, 4, 32), 0, wanted, lambda hidden: logits[:, : hidden.shape[1]])
        assert found == expected


def test_tokens_outside_the_draft_vocabulary_are_last() -> None:
    drafter = make_drafter(0).restricted(torch.tensor([1, 3, 5]))
    logits = torch.tensor([[[2.0, 3.0, 1.0]] * 3])
    found = ranks(drafter, torch.zeros(1, 4, 32), 0, [1, 2, 5], lambda hidden: logits)
    assert found == [1, drafter.config.vocab_size, 2]


# ---- counting ------------------------------------------------------------------------------------------------------
def state(on: list[int], off: list[int], baseline: list[int]) -> dict[str, list[int]]:
    return {"on": on, "off": off, "baseline": baseline}


PROMPTS = [
    [state([0, 0, 3], [0, 20, 0], [0, 0, 1]), state([0, 15, 0], [1, 0, 0], [0, 16, 0])],
    [state([1, 0, 0], [0, 0, 0], [0, 0, 0]), state([0, 0], [2, 1], [0, 9])],  # a text that ends after two tokens
]


def test_tally() -> None:
    entered, hits = tally(PROMPTS[0] + PROMPTS[1], 3)
    assert entered.tolist() == [4, 3, 1]
    assert hits.tolist() == [
        [[3, 2, 0], [4, 3, 1]],
        [[2, 1, 1], [4, 2, 1]],
        [[4, 1, 0], [4, 2, 1]],
    ]
    entered, hits = tally(PROMPTS[0] + PROMPTS[1], 3, "all_three")
    assert entered.tolist() == [4, 1, 0] and hits[:, 0].tolist() == [[3, 1, 0], [2, 0, 0], [4, 1, 0]]
    entered, hits = tally(PROMPTS[0] + PROMPTS[1], 3, "every")
    assert entered.tolist() == [4, 4, 3] and hits[:, 0].tolist() == [[3, 3, 2], [2, 2, 3], [4, 2, 2]]
    assert tally([], 3)[0].tolist() == [0, 0, 0]


def test_recall_and_its_errors() -> None:
    found = recall([*PROMPTS, []], 3)["matched"]
    assert found["n"] == [4, 3, 1] and found["pooled"]["n"] == [8]
    assert found["on"]["1"] == pytest.approx([3 / 4, 2 / 3, 0]) and found["off"]["16"] == pytest.approx([1, 2 / 3, 1])
    assert found["on_error"]["1"][0] == pytest.approx(1.96 * np.sqrt(0.75 * 0.25 / 4))
    assert found["on_minus_off"]["1"] == pytest.approx([1 / 4, 1 / 3, -1])
    assert found["on_minus_baseline"]["1"] == pytest.approx([-1 / 4, 1 / 3, 0])
    assert found["pooled"]["on"]["1"] == [5 / 8] and found["pooled"]["on_minus_off"]["16"] == [1 / 8]
    # Prompt 0 alone: 2 - 1 of 2; prompt 1 alone: 1 - 1 of 2. Resamples lie between.
    assert found["on_minus_off_ci95"]["1"][0] == pytest.approx([0.0, 0.5])
    assert recall([[state([0], [0], [0])]], 3)["every"]["on"]["1"] == [1.0, None, None]
