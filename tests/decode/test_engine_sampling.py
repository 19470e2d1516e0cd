"""Above temperature 0 the engine's responses are distributed as the target's, and depend on the seed alone."""

from __future__ import annotations

import pytest
import torch
from decode_helpers import CARRIES, HEADS, make_drafter
from scipy.stats import chisquare
from tiny import tiny_target

from carryover.decode.engine import Engine
from carryover.decode.sampling import Sampling
from carryover.decode.verify import verify

VOCAB, PROMPT, RUNS = 6, [3, 1, 4], 700


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama", VOCAB, 1, 11, eos_token_id=None, tie_word_embeddings=False)


def exact_second_and_third(target, sampling):
    """Probabilities `[V, V]` of the second and third new token, summed over the first."""
    firsts, seconds = (t.flatten() for t in torch.meshgrid(torch.arange(VOCAB), torch.arange(VOCAB), indexing="ij"))
    tokens = torch.cat((torch.tensor(PROMPT).expand(VOCAB**2, -1), firsts[:, None], seconds[:, None]), dim=1)
    p = sampling.probabilities(target.head(target.forward(tokens).hidden[:, -3:])).double()
    first = p[:, 0].gather(1, firsts[:, None]) * p[:, 1].gather(1, seconds[:, None])
    return (first * p[:, 2]).view(VOCAB, VOCAB, VOCAB).sum(0)


def p_value(counts, expected):
    assert not counts[expected == 0].any(), "a token was emitted that the target never chooses"
    rare = expected < 5
    counts, expected = (torch.cat((x[~rare], x[rare].sum()[None])) for x in (counts, expected))
    keep = expected > 0
    return float(chisquare(counts[keep], expected[keep] * (counts[keep].sum() / expected[keep].sum())).pvalue)


@pytest.mark.parametrize(
    "draft_sampling, head, carry, slots, sampling",
    [
        ("greedy", "dflash", "embedding", "fill_in", Sampling(1.0, top_k=5)),
        ("probabilistic", "vanilla", "embedding", "next_token", Sampling(0.8, top_p=0.9)),
        ("probabilistic", "dflash", "none", "fill_in", Sampling(1.2, min_p=0.1)),
        ("greedy", "rnn", "projector", "next_token", Sampling(1.0)),
        ("probabilistic", "vanilla few", "plain", "next_token", Sampling(0.9, top_k=4)),
        ("greedy", "dflash few", "embedding", "fill_in", Sampling(1.0)),
        ("probabilistic", "dflash few", "embedding", "fill_in", Sampling(1.1, min_p=0.05)),
    ],
)
def test_two_tokens_have_the_exact_joint_distribution(target, draft_sampling, head, carry, slots, sampling):
    """`few`: a draft vocabulary of four of the six tokens."""
    kind, few = head.split()[0], {"draft_vocab_size": 4} if "few" in head else {}
    shape = {"num_hidden_layers": 1, "block_size": 3, "slots": slots, **HEADS[kind], **few}
    drafter = make_drafter(target, 1, **shape, **CARRIES[carry])
    if few:
        drafter.draft_vocab = torch.tensor([0, 2, 3, 5])
    engine = Engine(target, drafter, sampling, draft_sampling)
    counts, accepted, carried = torch.zeros(VOCAB, VOCAB, dtype=torch.float64), [], 0
    for seed in range(RUNS):
        generation = engine.generate(PROMPT, 3, seed)
        counts[generation.tokens[1], generation.tokens[2]] += 1
        accepted.append(generation.rounds[0].accepted > 0)
        carried += generation.rounds[-1].carried
    assert 0.05 < sum(accepted) / RUNS < 0.95
    assert (carried > 0) == (carry != "none")
    assert p_value(counts.flatten(), exact_second_and_third(target, sampling).flatten() * RUNS) > 1e-3


@pytest.mark.parametrize("draft_sampling", ["greedy", "probabilistic"])
def test_the_seed_decides(target, draft_sampling):
    engine = Engine(target, make_drafter(target, carry="embedding", markov_rank=4), Sampling(1.0), draft_sampling)
    torch.manual_seed(0)
    first = engine.generate(PROMPT, 20, seed=5)
    torch.manual_seed(1)  # the global generator has no say
    assert engine.generate(PROMPT, 20, seed=5).tokens == first.tokens
    assert len({tuple(engine.generate(PROMPT, 20, seed).tokens) for seed in range(4)}) == 4


def test_plain_sampling_is_reproducible_too(target):
    engine = Engine(target, None, Sampling(1.0))
    assert engine.generate(PROMPT, 20, seed=5).tokens == engine.generate(PROMPT, 20, seed=5).tokens
    assert engine.generate(PROMPT, 20, seed=5).tokens != engine.generate(PROMPT, 20, seed=6).tokens


def test_the_rule_gets_the_q_that_was_sampled_from(target, monkeypatch):
    """The corrected, processed draft distribution of every proposal given the one before it."""
    sampling, seen = Sampling(0.7, top_p=0.8), []
    drafter = make_drafter(target, carry="embedding", **HEADS["vanilla"])
    propose, probabilities = drafter.propose, []

    def watched(hidden, anchor, head, choose):
        tokens, _ = propose(hidden, anchor, head, choose)
        previous = torch.cat((anchor[:, None], tokens[:, :-1]), dim=1)
        probabilities.append(sampling.probabilities(drafter.logits(drafter.proposing(hidden), previous, head)))
        return tokens, _

    monkeypatch.setattr(drafter, "propose", watched)

    def watched_rule(tokens, logits, sampling, q, generator):
        seen.append(q)
        return verify(tokens, logits, sampling, q, generator)

    monkeypatch.setattr("carryover.decode.engine.verify", watched_rule)
    Engine(target, drafter, sampling, "probabilistic").generate(PROMPT, 10)
    assert len(seen) == len(probabilities) >= 3
    for q, expected in zip(seen, probabilities, strict=True):
        assert q.dtype == torch.float32 and torch.allclose(q, expected, atol=1e-6)
