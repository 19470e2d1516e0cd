"""Re-convergence of rejected states, round by round: whether the rows of a rejected branch find back to the text.

A round at anchor `a` proposes p_1..p_P, the target accepts n of them, and rows n+1..P are rejected. `v_j` is the
target's first choice at row j, a guess about position a+j+1 made on the rejected branch; `y_t` is the token that the
greedy run committed at position t. Row j *re-converges* if v_j is one of y at a+j, a+j+1, a+j+2: its own position, or
one beside it, because a branch may have gained or lost a word.

Only rounds that another draft follows count, for the others carry nothing. A response that ends leaves the last rows
without a reference: rounds are *complete* if their windows lie within the text; of the others only the rows whose own
position exists are counted (*truncated*).

Letters: `P` proposals. Source: SPEC 7.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from .recall import DRAFTERS, accepted

Response = dict[str, Any]  # of diagnostics.jsonl: `prompt_tokens`, `tokens`, `following`, `rounds`, `baseline_...`


# ---- one round -----------------------------------------------------------------------------------------------------
class Matches(NamedTuple):
    """Rows that re-converge: within one position, at their own position, and with each position used once."""

    within: int
    exact: int
    unique: int


def reconverged(guesses: Sequence[int], reference: Sequence[int]) -> Matches:
    """guesses: v_{n+1}..v_P. reference: y from position a+n+1 on, so that guess i's own position is reference[i+1].

    Guesses whose own position the reference does not reach are left out. unique: the largest set of rows in which each
    has a position of its own; the earliest free one is always a right choice, since windows move along with the rows.
    """
    within = exact = 0
    used: set[int] = set()
    for i, guess in enumerate(guesses[: max(len(reference) - 1, 0)]):
        places = [t for t in range(i, min(i + 3, len(reference))) if reference[t] == guess]
        within += bool(places)
        exact += i + 1 in places
        used.update([t for t in places if t not in used][:1])
    return Matches(within, exact, len(used))


def accepted_behind(proposals: Sequence[int], top: Sequence[int], n: int) -> tuple[int, int]:
    """Of p_{n+2}..p_P, how many the target would have said itself on the rejected branch: all, and in a row.

    proposals: p_1..p_P. top: v_0..v_P, v_0 the anchor's.
    """
    agrees = [proposals[j - 1] == top[j - 1] for j in range(n + 2, len(proposals) + 1)]
    return sum(agrees), next((i for i, same in enumerate(agrees) if not same), len(agrees))


# ---- one prompt ----------------------------------------------------------------------------------------------------
def round_figures(response: Response, i: int) -> dict[str, int]:
    """What round i of a response counts; it is not the last one."""
    r = response["rounds"][i]
    text, at = [*response["tokens"], *response["following"]], r["anchor"] + 1 - response["prompt_tokens"]
    n, p = r["accepted"], len(r["proposals"])
    reference = text[at + n : at + p + 2]  # y at a+n+1 .. a+P+2
    found = reconverged(r["top"][n + 1 :], reference)
    complete = n < p and len(reference) == p + 2 - n
    behind, run = accepted_behind(r["proposals"], r["top"], n)
    return {
        "rounds": 1, "rejected": n < p, "rows": p - n, "complete": complete, "complete_rows": complete * (p - n),
        "within": complete * found.within, "exact": complete * found.exact, "unique": complete * found.unique,
        "truncated_rows": min(p - n, max(len(reference) - 1, 0)), "truncated": found.within, "behind": behind,
        "behind_run": run,
    }  # fmt: skip


def prompt_sums(responses: Sequence[Response]) -> Counter[str]:
    """Everything that is counted for a prompt, over the responses to all its turns."""
    sums: Counter[str] = Counter()
    for response in responses:
        sums.update(tokens=len(response["tokens"]) - 1, verifications=len(response["rounds"]))
        sums.update(baseline_tokens=response["baseline_tokens"], baseline_rounds=response["baseline_rounds"])
        for i, r in enumerate(response["rounds"]):
            if i + 1 < len(response["rounds"]):
                sums.update(round_figures(response, i))
            if "on" in r:
                sums.update({"states": 1, **{f"{d}_accepted": accepted(r[d]) for d in DRAFTERS}})
    return sums
