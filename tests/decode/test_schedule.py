"""How many proposals to draft: close to the best fixed number, hardly ever slower than none, and exact throughout."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from decode_helpers import CARRIES, HEADS, PROMPT, make_drafter
from scipy.stats import chisquare
from tiny import TEXT_FAMILIES, tiny_target

from carryover.decode.conversation import Conversation
from carryover.decode.engine import Engine, Request
from carryover.decode.sampling import Sampling
from carryover.decode.schedule import Acceptance, Schedule, Seconds
from carryover.errors import InputError

MOST = 7
COST = [1.0 + 0.12 * (n > 0) + 0.08 * n for n in range(MOST + 1)]  # of a round by proposals; drafting at all costs too


class Cycle(Schedule):
    """Every number of proposals in turn, none included, whatever happens."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.numbers = [0, most, 1, 0, 0, 2, 0, most, most, 0][: 10 if most > 1 else 4]
        self.at = 0

    def choose(self, requests):
        self.at += 1
        return min(self.most, self.numbers[self.at % len(self.numbers)])


def cycling(target, drafter, *args, **kwargs) -> Engine:
    engine = Engine(target, drafter, *args, proposals="auto", **kwargs)
    engine.schedule = Cycle(engine.proposals)
    return engine


# ---- exactness -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("carry", list(CARRIES))
@pytest.mark.parametrize("head", list(HEADS))
def test_greedy_output_is_the_targets(head, carry):
    """With rounds of every length, plain ones among them; one at a time, together, and in a conversation."""
    target = tiny_target("llama", 24, 6, 5, eos_token_id=[7])
    drafter = make_drafter(target, **HEADS[head], **CARRIES[carry])
    prompts = [PROMPT, [9, 2, 6, 5], [3, 5, 8, 9, 7, 9, 3]]
    plain = [Engine(target).generate(ids, 40).tokens for ids in prompts]
    engine = cycling(target, drafter)
    made = [engine.generate(ids, 40) for ids in prompts]
    assert [g.tokens for g in made] == plain
    assert len({len(r.proposals) for g in made for r in g.rounds}) > 2
    many = dict(cycling(target, drafter).generate_many([Request(ids, 40) for ids in prompts], 2))
    assert [many[i].tokens for i in range(3)] == plain
    talk = Conversation(cycling(target, drafter))
    first = talk.generate(PROMPT, 12)
    ids = [*PROMPT, *first.tokens, 4, 5]
    assert talk.generate(ids, 20).tokens == Engine(target).generate(ids, 20).tokens


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_states_wait_for_the_next_draft(family):
    """A draft behind plain rounds is the draft of an engine that drafted in every round (without carry, which rows of
    older rounds cannot be), for a request alone and for one beside others."""
    target = tiny_target(family, 24, 6, 5, eos_token_id=[7])
    drafter = make_drafter(target)
    always = Engine(target, drafter).generate(PROMPT, 30)
    drafts = {r.anchor: r.proposals for r in _every_anchor(target, drafter, PROMPT, always.tokens)}
    compared = 0
    for size in (1, 3):
        prompts = [PROMPT, [9, 2, 6, 5], PROMPT][:size]
        made = dict(cycling(target, drafter).generate_many([Request(ids, 30) for ids in prompts], size))
        for i, ids in enumerate(prompts):
            assert made[i].tokens == Engine(target).generate(ids, 30).tokens
            for r in made[i].rounds if ids == PROMPT else ():
                if len(r.proposals) == drafter.config.num_proposals:
                    compared += 1
                    assert r.proposals == drafts[r.anchor]
    assert compared >= 6


def _every_anchor(target, drafter, prompt, tokens):
    """The first round of an engine that begins at each position of a response."""
    for n in range(1, len(tokens) - 1):
        yield from Engine(target, drafter).generate([*prompt, *tokens[: n - 1]], 2 + len(tokens)).rounds[:1]


@pytest.mark.parametrize("draft_sampling", ["greedy", "probabilistic"])
def test_sampled_output_follows_the_target(draft_sampling):
    """The distribution of three tokens behind a prompt, with rounds of changing length and with carry."""
    target = tiny_target("llama", 6, 6, 3, eos_token_id=[5])
    drafter = make_drafter(target, carry="embedding", **HEADS["vanilla"])
    sampling, n = Sampling(1.0), 3000
    engine = cycling(target, drafter, sampling, draft_sampling)
    counts = Counter(tuple(engine.generate([1, 2], 3, seed=seed).tokens) for seed in range(n))
    expected: dict[tuple[int, ...], float] = {}
    waiting = [((), 1.0)]
    while waiting:
        tokens, share = waiting.pop()
        if len(tokens) == 3 or (tokens and tokens[-1] == 5):
            expected[tokens] = share * n
            continue
        hidden = target.forward(torch.tensor([[1, 2, *tokens]])).hidden[:, -1]
        for token, p in enumerate(sampling.probabilities(target.head(hidden))[0].tolist()):
            waiting.append(((*tokens, token), share * p))
    often = [key for key, count in expected.items() if count >= 5]
    rest = n - sum(counts[k] for k in often), n - sum(expected[k] for k in often)
    observed, wanted = [counts[k] for k in often] + [rest[0]], [expected[k] for k in often] + [rest[1]]
    assert chisquare(observed, wanted).pvalue > 1e-3


# ---- the choice ----------------------------------------------------------------------------------------------------
def played(schedule: Schedule, chances: list[float], tokens: int, seed: int, noise: float = 0.05) -> tuple[float, int]:
    """Seconds and tokens of a response whose proposals are right with these chances."""
    draw, counts, seconds, made = random.Random(seed), schedule.begin(), 0.0, 0
    while made < tokens:
        n = schedule.choose([counts])
        accepted = next((k for k in range(n) if draw.random() >= chances[k]), n)
        spent = COST[n] * (1 + noise * draw.uniform(-1, 1))
        schedule.learn([counts], n, [accepted], spent)
        seconds, made = seconds + spent, made + accepted + 1
    return seconds, made


TEXTS = {
    "hopeless": [0.02] * MOST,
    "poor": [0.1, 0.1, 0.05, 0.05, 0.05, 0.05, 0.05],
    "fair": [0.5, 0.4, 0.35, 0.3, 0.3, 0.3, 0.3],
    "good": [0.7, 0.7, 0.65, 0.6, 0.6, 0.6, 0.6],
    "perfect": [0.98] * MOST,
}


@pytest.mark.parametrize("text", list(TEXTS))
def test_close_to_the_best_fixed_number_and_never_much_slower_than_none(text):
    """On a text of one kind, its first responses included: the bars of --proposals auto, by expectation."""
    chances = TEXTS[text]
    best = max(Schedule.tokens(chances, n) / COST[n] for n in range(MOST + 1))
    rates = []
    for seed in range(20):
        schedule, seconds, tokens = Schedule(MOST), 0.0, 0
        for response in range(12):
            spent, made = played(schedule, chances, 96, 100 * seed + response)
            seconds, tokens = seconds + spent, tokens + made
        rates.append(tokens / seconds)
    mean = sum(rates) / len(rates)
    assert mean >= 0.97 * best
    assert mean >= 0.97 * 1 / COST[0]


def test_a_text_that_changes_is_noticed():
    """Both ways: responses of a hopeless kind between good ones, and a hopeless beginning."""
    schedule, seconds, tokens, bound = Schedule(MOST), 0.0, 0, 0.0
    for i in range(60):
        kind = TEXTS["good" if i // 5 % 2 else "hopeless"]
        spent, made = played(schedule, kind, 200, i)
        best = max(Schedule.tokens(kind, n) / COST[n] for n in range(MOST + 1))
        seconds, tokens, bound = seconds + spent, tokens + made, bound + made / best
    assert bound / seconds > 0.9


def test_the_other_number_of_requests_is_what_is_known_until_it_is_measured():
    schedule = Schedule(3)
    counts = [schedule.begin() for _ in range(2)]
    assert schedule.choose(counts) == 3  # nothing is known
    schedule.learn(counts, 3, [0, 1], 2.0)
    assert schedule.choose(counts) == 0  # nor what a plain round costs
    schedule.learn(counts, 0, [0, 0], 1.0)
    assert schedule.choose(counts[:1]) == schedule.choose(counts)


def test_seconds_lie_on_lines_between_what_was_tried_and_forget_the_first_time():
    seconds = Seconds()
    for n, spent in ((0, 9.0), (0, 1.0), (4, 30.0), (4, 3.0)):
        seconds.add(n, spent)
    assert [seconds.of(n) for n in (0, 1, 2, 4, 7)] == [1.0, 1.5, 2.0, 3.0, 3.0]
    seconds.add(4, 100.0)  # something else took the processor
    assert seconds.of(4) == pytest.approx(3.6)


def test_acceptance_counts_only_what_was_reached():
    counts = Acceptance(3, keep=0.5)
    counts.add(3, 1)  # right, wrong, not reached
    assert counts.reached == [1, 1, 0] and counts.right == [1, 0, 0]
    counts.add(1, 1)  # a shorter draft, all right
    assert counts.reached == [1.5, 1, 0] and counts.right == [1.5, 0, 0]
    assert counts.chances([0.5, 0.5, 0.5], 1.0) == pytest.approx([2.0 / 2.5, 0.25, 0.5])
    assert Schedule.tokens([0.5, 0.5, 0.1], 2) == pytest.approx(1.75)


def test_what_excludes_it():
    target = tiny_target("llama")
    with pytest.raises(InputError, match="auto needs a drafter"):
        Engine(target, proposals="auto")
    with pytest.raises(InputError, match="excludes compile"):
        Engine(target, make_drafter(target), proposals="auto", compile=True)
