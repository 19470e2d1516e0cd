"""Re-convergence and acceptance behind a rejection, on lists whose counts are known."""

from __future__ import annotations

import random
from itertools import permutations
from typing import Any

import pytest

from carryover.evaluate.reconvergence import accepted_behind, prompt_sums, reconverged, round_figures


@pytest.mark.parametrize(
    "guesses, reference, expected",
    [
        # own positions: 11, 12, 13 ...; the token before and the one behind count as well
        ([11, 12, 13], [10, 11, 12, 13, 14], (3, 3, 3)),
        ([10, 11, 12], [10, 11, 12, 13, 14], (3, 0, 3)),  # one word late
        ([12, 13, 14], [10, 11, 12, 13, 14], (3, 0, 3)),  # one word early
        ([13, 14, 99], [10, 11, 12, 13, 14], (0, 0, 0)),  # two words early
        ([11, 11, 11], [10, 11, 12, 13, 14], (2, 1, 1)),  # one position, two rows
        ([7, 7, 7], [7, 7, 7, 7, 7], (3, 3, 3)),
        ([11, 12, 13], [10, 11, 12], (2, 2, 2)),  # the third has no reference
        ([11, 12, 13], [10], (0, 0, 0)),
        ([11, 12, 13], [], (0, 0, 0)),
        ([], [10, 11], (0, 0, 0)),
    ],
)
def test_reconverged(guesses: list[int], reference: list[int], expected: tuple[int, int, int]) -> None:
    assert reconverged(guesses, reference) == expected


def test_unique_matches_are_a_largest_matching() -> None:
    """Against all ways to give rows positions of their own."""
    rng = random.Random(0)
    for _ in range(300):
        rows = rng.randint(1, 4)
        guesses = [rng.randint(0, 2) for _ in range(rows)]
        reference = [rng.randint(0, 2) for _ in range(rows + 2)]
        fits = [[t for t in range(i, i + 3) if reference[t] == guesses[i]] for i in range(rows)]
        best = max(sum(t in fits[i] for i, t in enumerate(places)) for places in permutations(range(rows + 2), rows))
        found = reconverged(guesses, reference)
        assert found.unique == best
        assert found.within == sum(bool(f) for f in fits)
        assert found.exact == sum(guesses[i] == reference[i + 1] for i in range(rows))


def test_accepted_behind() -> None:
    #                p_1 p_2 p_3 p_4 p_5      v_0 v_1 v_2 v_3 v_4 v_5
    proposals, top = [1, 2, 3, 4, 5], [1, 9, 3, 4, 8, 0]
    assert accepted_behind(proposals, top, 1) == (2, 2)  # p_3 = v_2, p_4 = v_3, p_5 != v_4
    assert accepted_behind(proposals, [1, 9, 0, 4, 5, 0], 1) == (2, 0)  # p_4 and p_5, but not p_3
    assert accepted_behind(proposals, top, 4) == accepted_behind(proposals, top, 5) == (0, 0)


def response(**overrides: Any) -> dict[str, Any]:
    """Prompt of 2 tokens, then 10, 11, ... 19. The round at anchor 2 (token 10) has its first proposal right."""
    first = {"anchor": 2, "proposals": [11, 50, 51, 14], "accepted": 1, "top": [11, 12, 13, 14, 14]}
    second = {"anchor": 4, "proposals": [13, 14, 15, 16], "accepted": 4, "top": [13, 14, 15, 16, 17],
              "on": [0, 0, 0, 0], "off": [0, 3, 0, 0], "baseline": [1, 0, 0, 0]}  # fmt: skip
    third = {"anchor": 9, "proposals": [50, 51, 52, 53], "accepted": 0, "top": [18, 0, 0, 0, 0]}
    fields = {"prompt_tokens": 2, "tokens": list(range(10, 20)), "following": [], "baseline_tokens": 9,
              "baseline_rounds": 6, "rounds": [first, second, third]}  # fmt: skip
    return {**fields, **overrides}


def test_round_figures() -> None:
    # Rejected rows 2, 3, 4 guess 13, 14, 14 about positions 5, 6, 7, where the text has 13, 14, 15.
    assert round_figures(response(), 0) == {
        "rounds": 1, "rejected": 1, "rows": 3, "complete": 1, "complete_rows": 3, "within": 3, "exact": 2, "unique": 2,
        "truncated_rows": 3, "truncated": 3, "behind": 1, "behind_run": 0,
    }  # fmt: skip
    nothing = dict.fromkeys(("rejected", "rows", "complete", "complete_rows", "within", "exact", "unique",
                             "truncated_rows", "truncated", "behind", "behind_run"), 0)  # fmt: skip
    assert round_figures(response(), 1) == {"rounds": 1, **nothing}


def test_rounds_at_the_end_of_a_text() -> None:
    short = response(tokens=[10, 11, 12, 13])  # positions 2..5: of the rows only the first has its own position
    found = round_figures(short, 0)
    assert (found["complete"], found["within"], found["truncated_rows"], found["truncated"]) == (0, 0, 1, 1)
    longer = response(tokens=[10, 11, 12, 13], following=[14, 15, 16])  # where only the limit ended it
    assert round_figures(longer, 0) == round_figures(response(), 0)


def test_sums_of_a_prompt() -> None:
    sums = prompt_sums([response(), response(rounds=[])])
    assert (sums["tokens"], sums["verifications"], sums["baseline_tokens"], sums["baseline_rounds"]) == (18, 3, 18, 12)
    assert (sums["rounds"], sums["rejected"], sums["rows"]) == (2, 1, 3)  # the last round carries nothing
    assert [sums[key] for key in ("states", "on_accepted", "off_accepted", "baseline_accepted")] == [1, 4, 1, 0]
