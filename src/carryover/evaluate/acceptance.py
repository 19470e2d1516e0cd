"""How many tokens a verification yields, read from traces.

The convention, which differs between projects: the acceptance length is the number of tokens emitted by rounds, bonus
or correction included, over the number of rounds, pooled over all rounds (not a mean of means). The first token of a
response comes from the prefill and belongs to no round. A round cut by a stop token or by the length limit counts the
tokens it really emitted.

Letters: `n` prompts, `P` proposals. Source: SPEC 0.1 (decision 10) and 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..decode.loops import LoopWatch
from ..decode.trace import Generation, Round
from .stats import Sums

Responses = Sequence[Generation]  # the responses of one prompt, one for each of its turns


def acceptance_sums(prompts: Sequence[Responses]) -> Sums:
    """Tokens emitted by rounds, and rounds, by prompt: `[n]` each. Their ratio is the acceptance length."""
    rounds = [[r for g in responses for r in g.rounds] for responses in prompts]
    return Sums([sum(len(r.committed) for r in rs) for rs in rounds], [len(rs) for rs in rounds])


def rounds_of(prompts: Iterable[Responses]) -> list[Round]:
    """All rounds of all prompts."""
    return [r for responses in prompts for g in responses for r in g.rounds]


def accepted_and_proposed(rounds: Sequence[Round]) -> tuple[list[int], list[int]]:
    """Rounds that accepted, and rounds that proposed, position k = 1..P: `[P]` each. Empty for plain decoding.

    A position counts as accepted when it and all before it were, and its token was emitted.
    """
    width = max((len(r.proposals) for r in rounds), default=0)
    positions = range(1, width + 1)
    accepted = [sum(min(r.accepted, len(r.committed)) >= k for r in rounds) for k in positions]
    return accepted, [sum(len(r.proposals) >= k for r in rounds) for k in positions]


def acceptance_by_position(rounds: Sequence[Round]) -> list[float]:
    """Share of the rounds that proposed position k which accepted it, k = 1..P; never rises with k."""
    return [a / p for a, p in zip(*accepted_and_proposed(rounds), strict=True)]


def conditional_acceptance(rounds: Sequence[Round]) -> list[float | None]:
    """The same among the rounds that accepted every position before k; None where no round got that far."""
    width = len(accepted_and_proposed(rounds)[0])
    shares: list[float | None] = []
    for k in range(1, width + 1):
        reached = [r for r in rounds if len(r.proposals) >= k and min(r.accepted, len(r.committed)) >= k - 1]
        shares.append(sum(min(r.accepted, len(r.committed)) >= k for r in reached) / len(reached) if reached else None)
    return shares


def carried_rows(rounds: Sequence[Round]) -> float:
    """Mean number of carry rows that a draft read."""
    return float(np.mean([r.carried for r in rounds])) if rounds else 0.0


def loops(tokens: Sequence[int]) -> bool:
    """Whether a response is degenerate. The number of such responses belongs beside every acceptance."""
    return LoopWatch().read(tokens) is not None
