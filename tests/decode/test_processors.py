"""Penalties and logits processors inside a block: as if every earlier proposal were committed, losslessly."""

from __future__ import annotations

import pytest
import torch
from decode_helpers import CARRIES, HEADS, make_drafter
from scipy.stats import chisquare
from tiny import tiny_target
from transformers import (
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from carryover.decode.engine import Engine, Request
from carryover.decode.processors import CountPenalties, History, Penalties
from carryover.decode.sampling import Sampling
from carryover.errors import InputError

PROMPT, NEW = [3, 1, 4, 1, 5], 24


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama", 24, 3, 52, eos_token_id=[7, 11], tie_word_embeddings=False)


def drafters(target):
    for i, (head, carry) in enumerate(zip(HEADS, ("embedding", "none", "projector", "plain"), strict=True)):
        yield None if i == 0 else make_drafter(target, i, **HEADS[head], **CARRIES[carry])
        yield make_drafter(target, i + 9, carry="embedding", **HEADS[head])


SETTINGS = [
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7, "min_new_tokens": 9},
    {"min_new_tokens": 15},
    {"no_repeat_ngram_size": 2, "min_new_tokens": 12},
    {"sequence_bias": [[[3], 1.5], [[5, 9], -4.0], [[1, 2], 5.0]], "bad_words_ids": [[6], [2, 8]]},
]


def ours(setting):
    """The same settings as penalties and as processors of the request."""
    penalties = Penalties(setting.get("repetition_penalty", 1.0), min_new_tokens=setting.get("min_new_tokens", 0))
    processors = []
    if "sequence_bias" in setting:
        processors.append(SequenceBiasLogitsProcessor(setting["sequence_bias"]))
    if "no_repeat_ngram_size" in setting:
        processors.append(NoRepeatNGramLogitsProcessor(setting["no_repeat_ngram_size"]))
    if "bad_words_ids" in setting:
        processors.append(NoBadWordsLogitsProcessor(setting["bad_words_ids"], eos_token_id=[7, 11]))
    return penalties, processors


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: "+".join(s))
def test_greedy_output_is_that_of_transformers(target, setting):
    prompt = torch.tensor([PROMPT])
    theirs = target.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False, pad_token_id=0, **setting
    )[0, len(PROMPT) :].tolist()
    assert theirs != Engine(target).generate(PROMPT, NEW).tokens, "the setting changes nothing here"
    penalties, processors = ours(setting)
    accepted = 0
    for drafter in drafters(target):
        engine = Engine(target, drafter, penalties=penalties)
        asked = [Request(PROMPT, NEW, 0, processors), Request([9, 2], 7, 1), Request(PROMPT, NEW, 2, processors)]
        made = dict(engine.generate_many(asked, 2))
        assert made[0].tokens == made[2].tokens == theirs
        accepted += sum(r.accepted for r in made[0].rounds)
    assert accepted > 0


def test_presence_and_frequency_are_those_of_a_slow_loop(target):
    presence, frequency = 0.8, 0.5
    tokens = list(PROMPT)
    for _ in range(NEW):
        logits = target.head(target.forward(torch.tensor([tokens])).hidden[0, -1])
        for token in set(tokens[len(PROMPT) :]):
            logits[token] -= presence + frequency * tokens[len(PROMPT) :].count(token)
        tokens.append(int(logits.argmax()))
        if tokens[-1] in target.stop_ids:
            break
    penalties = Penalties(presence=presence, frequency=frequency)
    for drafter in drafters(target):
        assert Engine(target, drafter, penalties=penalties).generate(PROMPT, NEW).tokens == tokens[len(PROMPT) :]
    assert tokens[len(PROMPT) :] != Engine(target).generate(PROMPT, NEW).tokens


def test_rows_of_a_block_are_processed_behind_the_proposals_before_them():
    history = History([[5, 1], [2]], [[CountPenalties(1, 1.0, 0.25)], []], torch.device("cpu"))
    out = history.rows(torch.zeros(2, 3, 6), torch.tensor([[1, 4], [3, 3]]))
    expected = torch.zeros(2, 3, 6)  # of the first request the response so far is [1]; the second has no processor
    expected[0, 0, 1] = -1.25
    expected[0, 1, 1] = expected[0, 2, 1] = -1.5
    expected[0, 2, 4] = -1.25
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    "draft_sampling, head", [("greedy", "dflash"), ("probabilistic", "dflash"), ("probabilistic", "rnn")]
)
def test_two_tokens_have_the_exact_joint_distribution(draft_sampling, head):
    vocab, runs, prompt = 6, 900, [3, 1, 4]
    target = tiny_target("llama", vocab, 1, 11, eos_token_id=[2], tie_word_embeddings=False)
    penalties, sampling = Penalties(1.3, 0.4, 0.6, min_new_tokens=4), Sampling(1.0, top_p=0.95)
    expected = torch.zeros(vocab, vocab, dtype=torch.float64)

    def distribution(response):
        ids = torch.tensor([prompt + response])
        logits = target.head(target.forward(ids).hidden[:, -1])
        for processor in penalties.processors(len(prompt), [2], torch.device("cpu")):
            logits = processor(ids, logits)
        return sampling.probabilities(logits)[0].double()

    for first, p in enumerate(distribution([])):
        for second, q in enumerate(distribution([first])):
            expected[second] += p * q * distribution([first, second])
    drafter = make_drafter(target, 1, num_hidden_layers=1, block_size=3, carry="embedding", **HEADS[head])
    engine = Engine(target, drafter, sampling, draft_sampling, penalties=penalties, timed=False)
    counts = torch.zeros(vocab, vocab, dtype=torch.float64)
    for _, generation in engine.generate_many([Request(prompt, 3, seed) for seed in range(runs)], 32):
        counts[generation.tokens[1], generation.tokens[2]] += 1
    counts, expected = counts.flatten(), expected.flatten() * runs
    assert not counts[expected == 0].any() and not counts.view(vocab, vocab)[2].any()
    rare = expected < 5
    counts, expected = (torch.cat((x[~rare], x[rare].sum()[None])) for x in (counts, expected))
    assert chisquare(counts, expected * counts.sum() / expected.sum()).pvalue > 1e-3


@pytest.mark.parametrize(
    "values, message",
    [
        ({"repetition": 0.0}, "repetition penalty must be above 0"),
        ({"presence": 2.5}, "presence penalty must be between -2 and 2"),
        ({"frequency": -3.0}, "frequency penalty must be between"),
        ({"min_new_tokens": -1}, "min_new_tokens must be at least 0"),
    ],
)
def test_values_out_of_range_are_refused(values, message):
    with pytest.raises(InputError, match=message):
        Penalties(**values)
