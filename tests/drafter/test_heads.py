"""The Markov heads against their formulas, token by token; the walk with forced tokens equals the teacher-forced
logits."""

from __future__ import annotations

import pytest
import torch
from drafters import config, noise, random_drafter

from carryover.drafter.heads import ConfidenceHead, MarkovHead

KINDS = ("vanilla", "gated", "rnn")


def slow_bias(head: MarkovHead, previous: list[int], hidden: torch.Tensor) -> torch.Tensor:
    """SPEC 3.1, one sequence: previous `[P]`, hidden `[P, D]` to corrections `[P, V]`."""
    w1, w2, r = head.markov_w1.weight, head.markov_w2.weight, head.rank
    state, out = torch.zeros(r), []
    for y, o in zip(previous, hidden, strict=True):
        e = w1[y]
        if head.kind == "vanilla":
            factor = e
        elif head.kind == "gated":
            factor = torch.sigmoid(head.gate_proj.weight @ torch.cat((o, e)) + head.gate_proj.bias) * e
        else:
            z = head.joint_proj.weight @ torch.cat((state, e, o)) + head.joint_proj.bias
            gate, candidate = torch.sigmoid(z[:r]), torch.tanh(z[r : 2 * r])
            factor = torch.tanh(z[2 * r :])
            state = gate * state + (1 - gate) * candidate
        out.append(w2 @ factor)
    return torch.stack(out)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_bias_is_the_formula(kind):
    head = random_drafter(markov_rank=6, markov_kind=kind, slots="next_token").markov_head
    hidden, previous = noise(2, 5, 32), torch.tensor([[3, 9, 9, 0, 95], [1, 2, 3, 4, 5]])
    expected = torch.stack([slow_bias(head, p.tolist(), h) for p, h in zip(previous, hidden, strict=True)])
    torch.testing.assert_close(head.bias(previous, hidden), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("slots", ["fill_in", "next_token"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_walk_with_forced_tokens_is_teacher_forcing(kind, slots):
    drafter = random_drafter(markov_rank=6, markov_kind=kind, slots=slots)
    p, lm_head = drafter.config.num_proposals, noise(96, 32, seed=2)
    block, anchor = noise(2, 5, 32), torch.tensor([11, 12])
    forced = torch.randint(96, (2, p), generator=torch.Generator().manual_seed(3))
    turn = iter(forced.T)
    tokens, logits = drafter.propose(block, anchor, lambda h: h @ lm_head.T, lambda _: next(turn))
    previous = torch.cat((anchor[:, None], forced[:, :-1]), dim=1)
    assert torch.equal(tokens, forced)
    assert logits.shape == (2, p, 96)
    expected = drafter.logits(drafter.proposing(block), previous, lambda h: h @ lm_head.T)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    # and it is not the uncorrected head
    assert (logits - drafter.proposing(block) @ lm_head.T).abs().max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_greedy_walk_conditions_on_its_own_tokens(kind):
    drafter = random_drafter(markov_rank=6, markov_kind=kind, slots="next_token")
    lm_head, block, anchor = noise(96, 32, seed=2), noise(1, 5, 32), 11
    tokens, _ = drafter.propose(block, torch.tensor([anchor]), lambda h: h @ lm_head.T, lambda x: x.argmax(-1))
    chosen = [anchor]
    for i in range(5):
        bias = slow_bias(drafter.markov_head, chosen, block[0, : i + 1])[-1]
        chosen.append(int((block[0, i] @ lm_head.T + bias).argmax()))
    assert tokens[0].tolist() == chosen[1:]


@torch.no_grad()
def test_without_markov_head_slots_are_independent_of_the_anchor_token():
    drafter, lm_head = random_drafter(), noise(96, 32, seed=2)
    block = noise(2, 5, 32)
    tokens, logits = drafter.propose(block, torch.tensor([1, 2]), lambda h: h @ lm_head.T, lambda x: x.argmax(-1))
    torch.testing.assert_close(logits, block[:, 1:] @ lm_head.T)
    assert torch.equal(tokens, (block[:, 1:] @ lm_head.T).argmax(-1))


@pytest.mark.parametrize("with_markov", [True, False])
@torch.no_grad()
def test_confidence_reads_the_row_and_the_token_before(with_markov):
    drafter = random_drafter(markov_rank=6, slots="next_token", confidence=True, confidence_with_markov=with_markov)
    hidden, previous = noise(1, 5, 32), torch.tensor([[3, 9, 9, 0, 95]])
    weight, bias = drafter.confidence_head.proj.weight[0], drafter.confidence_head.proj.bias[0]
    for i, logit in enumerate(drafter.confidence_logits(hidden, previous)[0]):
        x = (
            torch.cat((hidden[0, i], drafter.markov_head.markov_w1.weight[previous[0, i]]))
            if with_markov
            else hidden[0, i]
        )
        torch.testing.assert_close(logit, weight @ x + bias, atol=1e-5, rtol=1e-5)
    assert ConfidenceHead(config(markov_rank=6, confidence_with_markov=with_markov)).proj.in_features == len(weight)
