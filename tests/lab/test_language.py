"""The lab language: exact probabilities, splits, coverage. The slow obvious versions are enumeration and sampling."""

from __future__ import annotations

import collections
import math
import random

import pytest

from carryover.errors import InputError
from carryover.lab import Rates, lab_prompts, lab_reference, language
from carryover.lab import words as w

TASKS = list(language.TASKS)


def examples(task: str, count: int, level: int = 2, rates: Rates | None = None) -> list[language.Example]:
    rng = random.Random(f"test-{task}")
    return [language.sample(task, rng, level, rates) for _ in range(count)]


def smallest(task: str, rates: Rates) -> language.Example:
    """The example with the fewest responses among some of the lowest level."""
    return min(
        examples(task, 20, level=0, rates=rates), key=lambda e: math.prod(len(c.probabilities) for c in e.choices)
    )


def test_there_are_the_eight_tasks_of_the_paper():
    assert set(TASKS) == {"translation", "math_reasoning", "code", "qa", "summarization", "rag", "dialogue", "writing"}


@pytest.mark.parametrize("task", TASKS)
def test_same_seed_same_example(task):
    one, two = (language.sample(task, random.Random(5)) for _ in range(2))
    assert (one.prompt, one.response, one.logprob) == (two.prompt, two.response, two.logprob)
    assert len({e.prompt for e in examples(task, 50)}) > 45


@pytest.mark.parametrize("task", TASKS)
def test_probabilities_of_all_responses_sum_to_one_and_no_text_has_two_derivations(task):
    # Some tasks say too much to enumerate at the full rates: without synonyms every structural choice is still there.
    example = smallest(task, Rates(synonym=0, optional=0.3, reorder=0.4))
    said = [(" ".join(s.words), s.logprob) for s in language.derivations(example.telling, example.rates)]
    assert len(said) > 1 or not example.choices
    assert len({text for text, _ in said}) == len(said)
    assert sum(math.exp(lp) for _, lp in said) == pytest.approx(1, abs=1e-12)
    assert dict(said)[example.response] == pytest.approx(example.logprob)


def test_enumeration_with_synonyms_agrees_with_sampling_frequencies():
    sizes = [(math.prod(len(c.probabilities) for c in e.choices), e) for e in examples("summarization", 20, level=0)]
    example = next(e for size, e in sizes if 10 < size < 500)
    exact = {" ".join(s.words): math.exp(s.logprob) for s in language.derivations(example.telling, example.rates)}
    assert sum(exact.values()) == pytest.approx(1, abs=1e-9) and 8 < len(exact) < 500
    rng, draws, counts = random.Random(1), 6000, collections.Counter()
    for _ in range(draws):
        speaker = language.Speaker(example.rates, rng)
        example.telling(speaker)
        counts[" ".join(speaker.words)] += 1
    assert set(counts) <= set(exact)
    # Pearson's statistic has mean K-1 and variance 2(K-1) when the exact probabilities are right.
    chi2 = sum((counts[t] - draws * p) ** 2 / (draws * p) for t, p in exact.items())
    assert abs(chi2 - (len(exact) - 1)) < 5 * math.sqrt(2 * len(exact))


@pytest.mark.parametrize("task", TASKS)
def test_score_finds_the_logprob_of_the_text_alone(task):
    for example in examples(task, 10):
        assert language.score(example, example.response) == pytest.approx(example.logprob)
        broken = example.response.split()
        broken[len(broken) // 2] = "<|mask|>"
        assert language.score(example, " ".join(broken)) == -math.inf
        assert language.score(example, " ".join(example.response.split()[:-1])) == -math.inf
        assert language.score(example, example.response + " .") == -math.inf


@pytest.mark.parametrize("task", TASKS)
def test_rates_of_zero_leave_one_response(task):
    for example in examples(task, 20, rates=Rates(0, 0, 0)):
        assert example.logprob == 0 and not example.choices
        assert [" ".join(s.words) for s in language.derivations(example.telling, example.rates)] == [example.response]


@pytest.mark.parametrize("task", TASKS)
def test_every_choice_shows_in_the_word_at_its_position(task):
    example = examples(task, 1)[0]
    script = [c.taken for c in example.choices]
    for i, choice in enumerate(example.choices):
        other = language.Speaker(example.rates, script=[*script[:i], (choice.taken + 1) % len(choice.probabilities)])
        example.telling(other)
        here = example.response.split()
        assert other.words[: choice.position] == here[: choice.position]
        # A synonym of the new branch may differ too; what matters is that this word cannot be the same.
        assert other.words[choice.position] != here[choice.position]


def test_words_are_covered_and_lengths_are_as_stated():
    vocabulary = language.vocabulary()
    known = set(vocabulary)
    assert len(known) == len(vocabulary) and 900 <= len(vocabulary) <= 2000
    for task in TASKS:
        rows = examples(task, 150)
        assert {word for e in rows for word in (e.prompt + " " + e.response).split()} <= known
        assert min(len(e.prompt.split()) for e in rows) >= 12 and max(len(e.prompt.split()) for e in rows) <= 80
        assert max(len(e.response.split()) for e in rows) < 90 < language.LONGEST_RESPONSE
        per_choice = sum(len(e.response.split()) for e in rows) / sum(len(e.choices) for e in rows)
        assert 2 < per_choice < 6  # of these choices about half miss the most likely word


def test_synonym_sets_are_disjoint():
    flat = [word for group in w.SYNONYMS.values() for word in group]
    assert len(flat) == len(set(flat))


def test_arithmetic_is_right():
    for task in ("math_reasoning", "code"):
        for example in examples(task, 100):
            words = example.response.split()
            sums = [
                i
                for i, word in enumerate(words)
                if word == "=" and words[i - 2] in "+-" and i >= 3 and words[i - 3].isdigit()
            ]
            assert sums
            for i in sums:
                left, sign, right, total = words[i - 3], words[i - 2], words[i - 1], words[i + 1]
                assert int(left) + (int(right) if sign == "+" else -int(right)) == int(total)


def test_splits_are_disjoint_balanced_and_deterministic():
    train, held = lab_prompts("train", 800, seed=1), lab_prompts("eval", 160, seed=2)
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in held}
    assert all(language.held_out(r["prompt"]) for r in held) and not any(language.held_out(r["prompt"]) for r in train)
    assert set(collections.Counter(r["task"] for r in train).values()) == {100}
    assert len({r["prompt"] for r in train}) == len({r["id"] for r in train}) == 800
    assert lab_prompts("eval", 40, seed=2) == held[:40]
    assert lab_prompts("eval", 40, seed=3) != held[:40]
    assert {r["task"] for r in lab_prompts("eval", 4, tasks=["qa", "code"])} == {"qa", "code"}
    assert set(train[0]) == {"id", "task", "prompt", "source", "licence"}


def test_reference_recovers_the_example_of_a_row():
    for row in lab_prompts("eval", 16, seed=4):
        example = lab_reference(row)
        assert example.prompt == row["prompt"] and language.score(example, example.response) == pytest.approx(
            example.logprob
        )
    with pytest.raises(InputError, match="not the one"):
        lab_reference(row | {"prompt": "facts :"})
    with pytest.raises(InputError, match="does not come"):
        lab_reference(row | {"id": "t001"})


def test_bad_input_is_named():
    with pytest.raises(InputError, match="no task 'poetry'"):
        language.sample("poetry", random.Random(0))
    with pytest.raises(InputError, match="splits train and eval"):
        lab_prompts("test", 1)
    with pytest.raises(InputError, match="between 0 and 1"):
        Rates(synonym=1.5)
    with pytest.raises(InputError, match="level"):
        language.sample("qa", random.Random(0), level=3)
