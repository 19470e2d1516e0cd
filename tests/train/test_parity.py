"""Training and decoding are the same function: block states of the parallel training pass equal those of the real
engine for the same anchor, context and carry, round after round. The test whose absence cost others their
acceptance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import packed, tiny_drafter
from tiny import tiny_target

from carryover.decode.engine import Batch, Engine
from carryover.drafter.modeling import Drafter
from carryover.train.anchors import Anchors
from carryover.train.transition import Transition, draft, read_prefix, second_draft, transition, verify

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"carry": "none"}),
    ("llama", {"carry": "embedding"}),
    ("qwen3", {"carry": "projector", "slots": "next_token", "markov_rank": 4}),
    ("gemma3_text", {"carry": "plain", "slots": "next_token", "markov_rank": 4, "markov_kind": "rnn"}),
    ("llama", {"carry": "embedding", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6,
               "sliding_causal": True}),
    ("llama", {"carry": "embedding", "layer_types": ["sliding_attention"] * 2, "sliding_window": 7,
               "sliding_window_from_anchor": True}),
    ("llama", {"carry": "hint"}),
    ("gemma3_text", {"carry": "hint", "slots": "next_token", "markov_rank": 4}),
    ("qwen3", {"carry": "hint", "carry_hint": "target_top1"}),
    ("llama", {"carry": "hint", "carry_hint": "target_top1", "slots": "next_token", "layer_types":
               ["sliding_attention", "full_attention"], "sliding_window": 6, "sliding_causal": True}),
]  # fmt: skip


class Recording(Engine):
    """Keeps the block states of every round."""

    def draft_states(self, batch: Batch, count: int | None = None) -> torch.Tensor:
        states = super().draft_states(batch, count)
        self.states.append(states)
        return states


class HalfRight(Drafter):
    """Proposes what the target will say with probability 0.7, so that accepted counts vary."""

    truth: list[int]

    def propose(self, hidden: Any, anchor_token: Any, head: Any, choose: Any) -> Any:
        out = super().propose(hidden, anchor_token, head, choose)
        start = self.truth.index(int(anchor_token)) + 1 if int(anchor_token) in self.truth else 0
        right = self.truth[start : start + out.tokens.shape[1]]
        tokens = out.tokens.clone()
        for i, token in enumerate(right):
            if torch.rand((), generator=self.coin) < 0.7:
                tokens[0, i] = token
        return out._replace(tokens=tokens)


@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_training_states_equal_decoding_states_in_every_round(family: str, overrides: dict[str, Any]) -> None:
    target = tiny_target(family)
    drafter = tiny_drafter(target, **overrides)
    prompt = torch.randint(6, 90, (9,), generator=torch.Generator().manual_seed(2)).tolist()
    drafter.truth = Engine(target).generate(prompt, 40).tokens
    drafter.coin = torch.Generator().manual_seed(4)
    drafter.__class__ = HalfRight
    engine = Recording(target, drafter)
    engine.states = []
    generation = engine.generate(prompt, 40)
    rounds = generation.rounds
    assert len(rounds) > 4

    batch = packed([[(t, i >= len(prompt)) for i, t in enumerate(prompt + generation.tokens)]], 64)
    drafter.__class__ = Drafter
    prefix = read_prefix(target, drafter, batch, keep_cache=True)
    at = torch.tensor([[r.anchor for r in rounds]])
    anchors = Anchors.at(at, torch.ones_like(at, dtype=torch.bool), batch)
    with torch.no_grad():
        trained = [draft(drafter, target, batch, prefix, anchors)]
        whole = [r for r in rounds if len(r.proposals) == drafter.config.num_proposals][:-1]
        previous = Anchors.at(at[:, : len(whole)], torch.ones(1, len(whole), dtype=torch.bool), batch)
        proposals = torch.tensor([[r.proposals for r in whole]])
        verified = verify(drafter, target, prefix, previous, proposals, greedy=False)
        accepted = torch.tensor([[r.accepted for r in whole]])
        following = Anchors.at(at[:, 1 : len(whole) + 1], torch.ones(1, len(whole), dtype=torch.bool), batch)
        step = Transition(previous, proposals, accepted, following, *verified)
        if drafter.config.carry != "none":
            trained.append(second_draft(drafter, target, batch, prefix, step))

    for i, states in enumerate(engine.states):
        carried = drafter.config.carry != "none" and i > 0 and rounds[i].carried > 0
        expected = trained[1][i - 1] if carried else trained[0][i]
        if carried and rounds[i].carried > 1:
            assert not torch.allclose(expected, trained[0][i], atol=1e-3), "or else carry would not show"
        assert torch.allclose(states[0], expected, atol=2e-5), f"round {i}"
    if drafter.config.carry != "none":
        assert {r.carried for r in rounds} - {0}, "some round must carry"


def test_the_first_transition_of_a_real_decode_is_the_training_transition() -> None:
    """Stages 1 and 2 on a greedy response reproduce the engine's first round: proposals, count, next anchor."""
    target = tiny_target("llama")
    drafter = tiny_drafter(target, carry="embedding")
    for seed in range(5):
        prompt = torch.randint(6, 90, (7,), generator=torch.Generator().manual_seed(seed)).tolist()
        generation = Engine(target, drafter).generate(prompt, 24)
        first, second = generation.rounds[:2]
        batch = packed([[(t, i >= 7) for i, t in enumerate(prompt + generation.tokens)]], 40)
        prefix = read_prefix(target, drafter, batch, keep_cache=True)
        anchors = Anchors.at(torch.tensor([[first.anchor]]), torch.tensor([[True]]), batch)
        step = transition(drafter, target, batch, prefix, anchors, compare=True)
        assert step.proposals[0, 0].tolist() == first.proposals
        assert int(step.accepted) == int(step.greedy) == first.accepted
        assert int(step.next.position) == second.anchor
