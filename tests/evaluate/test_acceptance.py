"""Acceptance, time shares, loops and results from hand-written traces with hand-computed values."""

from __future__ import annotations

import json

import pytest

from carryover.decode.trace import Generation, Round
from carryover.evaluate.acceptance import (
    acceptance_by_position,
    acceptance_sums,
    accepted_and_proposed,
    carried_rows,
    conditional_acceptance,
    loops,
    rounds_of,
)
from carryover.evaluate.results import Run, comparisons, run_record, stats
from carryover.evaluate.speed import same_output, speed_sums, time_shares


def drafted(tokens: int, rounds: list[tuple[int, int, int]], proposals: int = 3, seconds: float = 1.0) -> Generation:
    """A response of `tokens` tokens 0, 1, ... with rounds (accepted, committed, carried)."""
    return Generation(
        prompt_tokens=4,
        tokens=list(range(tokens)),
        rounds=[
            Round(0, [0] * proposals, accepted, [0] * committed, carried, draft_seconds=0.05, verify_seconds=0.1)
            for accepted, committed, carried in rounds
        ],
        prefill_seconds=0.2,
        seconds=seconds,
    )


# The first token and then 3 + 1 + 4 = 8 more; the second response ends with a stop token, the second of its accepted
# proposals, so it emits no correction.
FIRST = drafted(9, [(2, 3, 0), (0, 1, 1), (3, 4, 3)])
SECOND = drafted(3, [(2, 2, 0)], seconds=0.5)


def test_acceptance_length_counts_what_rounds_emitted() -> None:
    sums = acceptance_sums([[FIRST], [SECOND]])
    assert (list(sums.numerator), list(sums.denominator)) == ([8, 2], [3, 1])
    assert sums.ratio() == 10 / 4
    assert acceptance_sums([[FIRST, SECOND]]).numerator == [10]  # two turns of one prompt are one unit


def test_acceptance_by_position() -> None:
    rounds = rounds_of([[FIRST], [SECOND]])  # accepted 2, 0, 3, 2
    assert accepted_and_proposed(rounds) == ([3, 3, 1], [4, 4, 4])
    assert acceptance_by_position(rounds) == [3 / 4, 3 / 4, 1 / 4]
    assert conditional_acceptance(rounds) == [3 / 4, 3 / 3, 1 / 3]


def test_acceptance_by_position_counts_rounds_that_proposed_it() -> None:
    short = drafted(2, [(1, 1, 0)], proposals=1)  # the context ended: one proposal only
    rounds = rounds_of([[FIRST], [short]])
    assert accepted_and_proposed(rounds) == ([3, 2, 1], [4, 3, 3])
    assert conditional_acceptance(rounds_of([[drafted(2, [(0, 1, 0)])]])) == [0.0, None, None]
    plain = rounds_of([[drafted(2, [(0, 1, 0)], proposals=0)]])
    assert acceptance_by_position(plain) == [] and conditional_acceptance(plain) == []


def test_acceptance_behind_the_end_of_a_response_does_not_count() -> None:
    assert acceptance_by_position([Round(0, [1, 2, 3], accepted=3, committed=[1], carried=0)]) == [1.0, 0.0, 0.0]


def test_carried_rows() -> None:
    assert carried_rows(rounds_of([[FIRST], [SECOND]])) == (0 + 1 + 3 + 0) / 4
    assert carried_rows([]) == 0


def test_time() -> None:
    assert speed_sums([[FIRST], [SECOND]]).ratio() == pytest.approx((9 + 3) / 1.5)  # the first token counts here
    shares = time_shares([[FIRST], [SECOND]])
    assert shares == pytest.approx((4 * 0.05 / 1.5, 4 * 0.1 / 1.5, 2 * 0.2 / 1.5))


def test_same_output_compares_every_turn() -> None:
    assert same_output([FIRST, SECOND], [drafted(9, []), drafted(3, [])])
    assert not same_output([FIRST, SECOND], [drafted(9, []), drafted(4, [])])


def test_loops() -> None:
    gram = list(range(12))
    assert loops(gram * 3) and loops([*gram, 50, *gram, 51, 52, *gram])
    assert not loops(gram * 2) and not loops([*gram, 50, *gram]) and not loops([])
    assert loops([7] * 14) and not loops([7] * 13)  # overlapping occurrences count


# ---- results -------------------------------------------------------------------------------------------------------
def plain(tokens: int, seconds: float) -> Generation:
    rounds = [Round(0, [], 0, [0], 0, verify_seconds=0.1) for _ in range(tokens - 1)]
    return Generation(4, list(range(tokens)), rounds=rounds, prefill_seconds=0.2, seconds=seconds)


AUTOREGRESSIVE = Run("autoregressive", by_task={"qa": {"q1": [plain(9, 2.0)]}, "rag": {"r1": [plain(3, 0.8)]}})
BASELINE = Run(
    "base",
    "runs/base",
    by_task={
        "qa": {"q1": [drafted(9, [(0, 1, 0), (1, 2, 0), (0, 1, 0), (3, 4, 0)])]},
        "rag": {"r1": [drafted(3, [(1, 2, 0)], seconds=0.8)]},
    },
)
CARRY = Run("carry", "runs/carry", carry=True, by_task={"qa": {"q1": [FIRST]}, "rag": {"r1": [SECOND]}})

STATS = {
    "prompts", "tokens", "rounds", "acceptance_length", "acceptance_length_ci95", "acceptance_by_position",
    "carried_rows", "tokens_per_second", "speedup", "speedup_ci95", "draft_share", "verify_share", "identical",
    "divergent",
}  # fmt: skip


def test_stats_of_a_run() -> None:
    s = stats(CARRY.prompts("overall"), AUTOREGRESSIVE.prompts("overall"), greedy=True)
    assert s.keys() >= STATS
    assert (s["prompts"], s["tokens"], s["rounds"], s["acceptance_length"]) == (2, 10, 4, 2.5)
    assert s["acceptance_length_ci95"] == [2.0, 8 / 3]  # with two prompts, a resample is one of them twice or both
    assert s["acceptance_by_position"] == [0.75, 0.75, 0.25]
    assert s["carried_rows"] == 1
    assert s["tokens_per_second"] == 8 and s["speedup"] == pytest.approx(8 / (12 / 2.8))
    assert s["speedup_ci95"] == pytest.approx([0.8 / 0.5, 2.0 / 1.0])
    assert (s["draft_share"], s["verify_share"]) == pytest.approx((0.2 / 1.5, 0.4 / 1.5))
    assert (s["identical"], s["divergent"], s["looping"]) == (2, 0, 0)


def test_stats_of_plain_decoding() -> None:
    s = run_record(AUTOREGRESSIVE, AUTOREGRESSIVE, greedy=True)
    assert s["drafter"] is None and s["carry"] is False and list(s["tasks"]) == ["qa", "rag"]
    overall = s["overall"]
    assert overall["acceptance_length"] == 1 and overall["acceptance_by_position"] == []
    assert overall["speedup"] == 1 and overall["speedup_ci95"] == [1, 1] and overall["draft_share"] == 0


def test_divergence_is_counted_only_when_greedy() -> None:
    other = Run("x", "x", by_task={"qa": {"q1": [plain(8, 1.0)]}, "rag": {"r1": [plain(3, 1.0)]}})
    counts = stats(other.prompts("overall"), AUTOREGRESSIVE.prompts("overall"), greedy=True)
    assert (counts["identical"], counts["divergent"]) == (1, 1)
    counts = stats(other.prompts("overall"), AUTOREGRESSIVE.prompts("overall"), greedy=False)
    assert (counts["identical"], counts["divergent"]) == (None, None)


def test_figures_without_data_are_null() -> None:
    empty = Run("x", "x", by_task={"qa": {"q1": [Generation(4, [2], "stop")]}})  # the first token was the end
    s = stats(empty.prompts("qa"), empty.prompts("qa"), greedy=True)
    assert s["rounds"] == 0 and s["acceptance_length"] is None and s["acceptance_length_ci95"] == [None, None]
    assert s["tokens_per_second"] is None and s["speedup"] is None and s["draft_share"] is None
    json.dumps(s, allow_nan=False)


def test_comparisons_are_paired_gains_of_the_later_run() -> None:
    found = comparisons([AUTOREGRESSIVE, BASELINE, CARRY])
    assert [(c["a"], c["b"], c["task"]) for c in found] == [("carry", "base", t) for t in ("qa", "rag", "overall")]
    qa, rag, overall = found
    assert qa["acceptance_gain"] == pytest.approx((8 / 3) / (8 / 4) - 1) and rag["acceptance_gain"] == 0
    assert overall["acceptance_gain"] == pytest.approx((10 / 4) / (10 / 5) - 1)
    assert overall["acceptance_gain_ci95"] == pytest.approx([0, 1 / 3])
    assert overall["speedup_gain"] == pytest.approx((12 / 1.5) / (12 / 1.8) - 1)
    assert overall["speedup_gain_ci95"] == pytest.approx([0, 0.6])


def test_carry_is_compared_with_a_baseline_that_comes_later() -> None:
    pairs = [(c["a"], c["b"]) for c in comparisons([AUTOREGRESSIVE, CARRY, BASELINE]) if c["task"] == "overall"]
    assert pairs == [("base", "carry"), ("carry", "base")]
