"""Every acceptance rule is lossless: its tokens are distributed as the target's. A wrong rule is noticed."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare
from torch.nn.functional import one_hot

from carryover.decode.sampling import Sampling, draw
from carryover.decode.verify import Chooser, matched_prefix, rejection_sampling, verify

V, P, N = 9, 3, 40_000
PROCESSORS = {
    "temperature 1": Sampling(1.0),
    "temperature 0.6": Sampling(0.6),
    "top_k": Sampling(1.0, top_k=4),
    "top_p": Sampling(0.8, top_p=0.75),
    "min_p": Sampling(1.3, min_p=0.2),
    "all": Sampling(0.9, top_k=6, top_p=0.9, min_p=0.05),
}


def loop_matched_prefix(proposals, reference):
    n = 0
    while n < len(proposals) and proposals[n] == reference[n]:
        n += 1
    return n


def test_matched_prefix():
    proposals, reference = torch.randint(0, 2, (2, 50, 4, 5))
    expected = [
        loop_matched_prefix(p, r)
        for p, r in zip(proposals.flatten(0, 1).tolist(), reference.flatten(0, 1).tolist(), strict=True)
    ]
    assert matched_prefix(proposals, reference).flatten().tolist() == expected
    assert matched_prefix(proposals, proposals).eq(5).all()
    assert matched_prefix(proposals[..., :0], reference[..., :0]).eq(0).all()


def test_greedy_rule():
    logits = torch.randn(200, P + 1, 3)
    proposals = torch.randint(0, 3, (200, P))
    for q in (None, one_hot(proposals, 3).float()):
        verdict = verify(proposals, logits, Sampling(), q)
        for i in range(200):
            best = logits[i].argmax(-1).tolist()
            n = loop_matched_prefix(proposals[i].tolist(), best)
            assert (verdict.accepted[i], verdict.next_token[i]) == (n, best[n])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)])
def test_no_proposals_is_plain_decoding(sampling):
    logits = torch.randn(7, 1, V)
    verdict = verify(torch.empty(7, 0, dtype=torch.long), logits, sampling, None, torch.Generator().manual_seed(5))
    assert verdict.accepted.tolist() == [0] * 7
    assert torch.equal(verdict.next_token, sampling.choose(logits[:, 0], torch.Generator().manual_seed(5)))


def test_rejection_sampling_accepts_with_probability_p_over_q_and_corrects_from_the_residual():
    """One proposal that is always token 0: acceptance min(1, p/q), correction from max(p - q, 0)."""
    p, q = torch.tensor([0.1, 0.3, 0.6]), torch.tensor([0.4, 0.5, 0.1])
    rows = torch.stack((p, torch.tensor([0.0, 0.0, 1.0])))
    verdict = rejection_sampling(
        torch.zeros(N, 1, dtype=torch.long), rows.expand(N, 2, 3), q.expand(N, 1, 3), torch.Generator().manual_seed(0)
    )
    accepted = verdict.accepted.sum().item()
    assert chisquare([accepted, N - accepted], [N * 0.25, N * 0.75]).pvalue > 1e-3
    assert verdict.next_token.eq(2).all()  # the only token with p > q; and the bonus row is certain of it
    certain = rejection_sampling(torch.full((N, 1), 2), rows.expand(N, 2, 3), q.expand(N, 1, 3))
    assert certain.accepted.eq(1).all()


def test_equal_distributions_accept_everything():
    p = Sampling(1.0).probabilities(torch.randn(2000, P + 1, V))
    verdict = rejection_sampling(draw(p[:, :P]), p, p[:, :P])
    assert verdict.accepted.eq(P).all()


def test_disjoint_distributions_and_empty_residuals_are_safe():
    p = torch.tensor([[[0.5, 0.5, 0.0, 0.0]]]).expand(500, 2, 4)
    q = torch.tensor([[[0.0, 0.0, 0.5, 0.5]]]).expand(500, 1, 4)
    verdict = rejection_sampling(draw(q), p, q)
    assert verdict.accepted.eq(0).all() and verdict.next_token.lt(2).all()
    # A q above p everywhere (in truth only by rounding) leaves no residual; the correction must still come from p.
    verdict = rejection_sampling(torch.zeros(500, 1, dtype=torch.long), p * 0.5, p[:, :1])
    assert 0 < verdict.accepted.sum() < 500
    assert set(verdict.next_token[verdict.accepted == 0].tolist()) == {0, 1}


# ---- the joint distribution of two tokens --------------------------------------------------------------------------
def chain(seed, dtype=torch.float32):
    """A target and a drafter over V tokens: logits of the next token given the last one, `[V, V]` each."""
    generator = torch.Generator().manual_seed(seed)
    target, drafter = torch.randn(2, V, V, generator=generator) * 1.5
    return target.to(dtype), (target + drafter).to(dtype)


def two_tokens(sampling, draft_sampling, head, ratio_q=None, dtype=torch.float32, seed=0):
    """Draws N pairs of tokens that follow token 0: one drafted and verified round, then the target alone.

    head: `parallel` slots do not know what was drawn before them, `markov` slots do. ratio_q makes another q of the
    logits for the ratio.
    """
    target, drafter = chain(seed, dtype)
    generator = torch.Generator().manual_seed(seed + 1)
    chooser = Chooser(sampling, draft_sampling, generator)
    if head == "parallel":
        proposals = chooser(drafter[:P].expand(N, P, V))
    else:
        proposals, previous = [], torch.zeros(N, dtype=torch.long)
        for _ in range(P):
            previous = chooser(drafter[previous])
            proposals.append(previous)
        proposals = torch.stack(proposals, 1)
    q = chooser.probabilities
    if ratio_q is not None:
        assert head == "markov"
        q = ratio_q(drafter[torch.cat((torch.zeros(N, 1, dtype=torch.long), proposals[:, :-1]), 1)])
    verified = torch.cat((torch.zeros(N, 1, dtype=torch.long), proposals), 1)
    accepted, token = verify(proposals, target[verified], sampling, q, generator)
    emitted = torch.where(torch.arange(P) < accepted[:, None], proposals, token[:, None])
    first = emitted[:, 0]
    second = torch.where(accepted >= 1, emitted[:, 1], sampling.choose(target[first], generator))
    return first, second, accepted


def p_value(first, second, sampling, dtype=torch.float32, seed=0):
    p = sampling.probabilities(chain(seed, dtype)[0]).double()
    expected = (p[0][:, None] * p).flatten() * N
    counts = (first * V + second).bincount(minlength=V * V).double()
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 8
    pooled = [torch.cat((x[~rare], x[rare].sum()[None])) for x in (counts, expected)]
    keep = pooled[1] > 0
    observed, wanted = (x[keep] for x in pooled)
    return float(chisquare(observed, wanted * (observed.sum() / wanted.sum())).pvalue)


@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("head", ["parallel", "markov"])
@pytest.mark.parametrize("draft_sampling", ["greedy", "probabilistic"])
def test_lossless(draft_sampling, head, processors):
    sampling = PROCESSORS[processors]
    first, second, accepted = two_tokens(sampling, draft_sampling, head)
    assert 0 < (accepted > 0).float().mean() < 1
    assert p_value(first, second, sampling) > 1e-3


@pytest.mark.parametrize("draft_sampling", ["greedy", "probabilistic"])
def test_lossless_with_bf16_logits(draft_sampling):
    sampling = Sampling(0.8, top_k=6)
    first, second, _ = two_tokens(sampling, draft_sampling, "markov", dtype=torch.bfloat16)
    assert p_value(first, second, sampling, torch.bfloat16) > 1e-3


@pytest.mark.parametrize(
    "mistake, processors",
    [
        (lambda logits: logits.float().softmax(-1), "top_k"),  # q before the processors
        (lambda logits: logits.float().softmax(-1), "temperature 0.6"),
        (lambda logits: one_hot(logits.argmax(-1), V).float(), "temperature 1"),  # one-hot q for drawn proposals
    ],
)
def test_a_wrong_q_is_noticed(mistake, processors):
    sampling = PROCESSORS[processors]
    first, second, _ = two_tokens(sampling, "probabilistic", "markov", mistake)
    assert p_value(first, second, sampling) < 1e-6


def test_greedy_drafts_judged_by_their_probabilities_are_noticed():
    sampling = PROCESSORS["temperature 1"]
    first, second, _ = two_tokens(sampling, "greedy", "markov", sampling.probabilities)
    assert p_value(first, second, sampling) < 1e-6


def test_probabilistic_drafts_are_accepted_more_often_than_greedy_ones_here():
    """min(1, p/q) accepts sum(min(p, q)) of the drawn proposals; sample-and-match accepts p(argmax q)."""
    sampling = PROCESSORS["temperature 1"]
    p, q = (sampling.probabilities(logits)[0] for logits in chain(0))
    for draft_sampling, expected in (("probabilistic", torch.minimum(p, q).sum()), ("greedy", p[q.argmax()])):
        accepted = two_tokens(sampling, draft_sampling, "markov")[2]
        assert abs((accepted > 0).float().mean() - expected) < 0.01


# ---- the chooser ---------------------------------------------------------------------------------------------------
def test_chooser_keeps_the_very_distributions_it_drew_from():
    sampling, logits = Sampling(0.7, top_p=0.8), torch.randn(5, P, V).bfloat16()
    once, walked = Chooser(sampling, "probabilistic", None), Chooser(sampling, "probabilistic", None)
    tokens = once(logits)
    for i in range(P):
        walked(logits[:, i])
    assert once.probabilities.dtype == torch.float32
    assert torch.equal(once.probabilities, sampling.probabilities(logits))
    assert torch.equal(walked.probabilities, sampling.probabilities(logits))
    assert once.probabilities.gather(2, tokens[..., None]).gt(0).all()


@pytest.mark.parametrize("sampling, draft_sampling", [(Sampling(), "probabilistic"), (Sampling(1.0), "greedy")])
def test_chooser_without_probabilities_takes_the_argmax(sampling, draft_sampling):
    chooser, logits = Chooser(sampling, draft_sampling, None), torch.randn(5, P, V)
    assert torch.equal(chooser(logits), logits.argmax(-1))
    assert chooser.probabilities is None
