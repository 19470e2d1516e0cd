"""Time per token, where it goes, and whether the output stayed what plain decoding gives; read from traces.

Throughput is end to end: all tokens of the responses over all their seconds, prefill included, batch of one. It
compares methods only if they were timed side by side, which `run.py` does.

Letters: `n` prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .acceptance import Responses
from .stats import Sums


class TimeShares(NamedTuple):
    """Shares of the whole time of the responses; what is left of 1 is the loop around them."""

    draft: float
    verify: float
    prefill: float


def speed_sums(prompts: Sequence[Responses]) -> Sums:
    """Tokens and seconds, by prompt: `[n]` each. Their ratio is the throughput, tokens per second."""
    return Sums(
        [sum(len(g.tokens) for g in responses) for responses in prompts],
        [sum(g.seconds for g in responses) for responses in prompts],
    )


def time_shares(prompts: Sequence[Responses]) -> TimeShares:
    """Where the seconds went: the drafter, the target's verifications (or plain steps), the prefill. NaN where the
    engine did not time its rounds."""
    generations = [g for responses in prompts for g in responses]
    seconds = sum(g.seconds for g in generations) or float("nan")
    rounds = [r for g in generations for r in g.rounds]
    verify = sum(r.verify_seconds for r in rounds) or (float("nan") if rounds else 0.0)
    return TimeShares(
        sum(r.draft_seconds for r in rounds) / seconds if verify == verify else verify,
        verify / seconds,
        sum(g.prefill_seconds for g in generations) / seconds,
    )


def same_output(responses: Responses, reference: Responses) -> bool:
    """Whether a prompt's responses are, token for token, those of plain decoding."""
    return [g.tokens for g in responses] == [g.tokens for g in reference]
