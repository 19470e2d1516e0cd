"""Matched-anchor recall: how often the target's next tokens are among a drafter's best ones, at the same states.

Three drafters draft from every state that has carry: ON (with its carry), OFF (the same drafter without) and BASELINE.
Position k = 0..P-1 is the k-th proposed token, its reference `g_k` the target's own greedy continuation, and a drafter
is asked for it behind the right tokens before it (Markov). A state *enters* position k only if ON and BASELINE both put
`g` first at every position before k. That favours these two over OFF from k = 1 on, so two more rules are reported:
`all_three` (OFF as well) and `every` (all states that have a reference).

Letters: `s` states, `n` prompts, `P` proposals, `B` block rows, `D` hidden, `V` vocabulary. Source: SPEC 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..drafter.modeling import Drafter, Head
from .results import interval, known
from .stats import Sums, ratio_intervals

DRAFTERS = ("on", "off", "baseline")
CUTS = (1, 16)  # the K of recall@K
ENTRIES = ("matched", "all_three", "every")
State = dict[str, Any]  # a logged state: `on`, `off` and `baseline` hold the ranks of the reference, at most P each
Ints = NDArray[np.int64]


@torch.no_grad()
def ranks(drafter: Drafter, hidden: Tensor, anchor_token: int, reference: Sequence[int], head: Head) -> list[int]:
    """At each position, how many tokens the drafter prefers to `reference`, of at most P tokens; 0 is its proposal.

    hidden: the drafter's block, `[1, B, D]`. Of equal logits the lower token id counts as preferred, as in argmax. All
    tokens are preferred to one that is not in the drafter's vocabulary.
    """
    wanted = drafter.vocabulary_index(torch.tensor(list(reference), device=hidden.device))
    previous = torch.tensor([[anchor_token, *reference[:-1]]], device=hidden.device)
    logits = drafter.logits(drafter.proposing(hidden)[:, : len(wanted)], previous, head)[0]
    own = logits.gather(1, wanted.clamp(min=0)[:, None])
    earlier = torch.arange(logits.shape[1], device=hidden.device) < wanted[:, None]
    found = ((logits > own) | ((logits == own) & earlier)).sum(1)
    return torch.where(wanted < 0, drafter.config.vocab_size, found).tolist()


def accepted(found: Sequence[int]) -> int:
    """How many proposals the target would accept: the leading ranks that are 0."""
    return next((k for k, rank in enumerate(found) if rank), len(found))


def tally(states: Sequence[State], proposals: int, entry: str = "matched") -> tuple[Ints, Ints]:
    """States that enter each position, `[P]`, and of these the hits of each drafter at each cut, `[3, 2, P]`."""
    rank = np.full((len(states), len(DRAFTERS), proposals), -1)
    for s, state in enumerate(states):
        for d, name in enumerate(DRAFTERS):
            rank[s, d, : len(state[name])] = state[name]
    right = rank == 0
    fit = {"matched": right[:, [0, 2]].all(1), "all_three": right.all(1), "every": np.ones_like(right[:, 0])}[entry]
    before = np.cumprod(np.concatenate((np.ones_like(fit[:, :1]), fit[:, :-1]), axis=1), axis=1, dtype=bool)
    entered = before & (rank[:, 0] >= 0)
    hits = entered[:, None, None] & (rank[:, :, None] < np.array(CUTS)[:, None])
    return entered.sum(0), hits.sum(0)


def recall(prompts: Sequence[Sequence[State]], proposals: int, seed: int = 0) -> dict[str, Any]:
    """The `recall` of diagnostics.json, from the logged states of each prompt."""
    result = {}
    for entry in ENTRIES:
        tallies = [tally(states, proposals, entry) for states in prompts]
        entered, hits = np.stack([n for n, _ in tallies]), np.stack([h for _, h in tallies])
        pooled = curves(entered.sum(1, keepdims=True), hits.sum(-1, keepdims=True), seed)
        result[entry] = {**curves(entered, hits, seed), "pooled": pooled}
    return result


def curves(entered: Ints, hits: Ints, seed: int) -> dict[str, Any]:
    """Recall by position. entered `[n, P]`, hits `[n, 3, 2, P]`. Errors are half the width of a 95 % binomial interval;
    differences have a paired bootstrap interval over prompts."""
    found: dict[str, Any] = {"n": entered.sum(0).tolist()}
    for d, name in enumerate(DRAFTERS):
        found[name], found[f"{name}_error"] = {}, {}
        for c, cut in enumerate(CUTS):
            shares = [Sums(h, n).ratio() for h, n in zip(hits[:, d, c].T, entered.T, strict=True)]
            errors = [1.96 * (r * (1 - r) / n) ** 0.5 if n else np.nan for r, n in zip(shares, found["n"], strict=True)]
            found[name][str(cut)], found[f"{name}_error"][str(cut)] = [*map(known, shares)], [*map(known, errors)]
    for d, name in ((1, "on_minus_off"), (2, "on_minus_baseline")):
        found[name], found[f"{name}_ci95"] = {}, {}
        for c, cut in enumerate(CUTS):
            more = hits[:, 0, c] - hits[:, d, c]
            found[name][str(cut)] = [known(Sums(h, n).ratio()) for h, n in zip(more.T, entered.T, strict=True)]
            found[f"{name}_ci95"][str(cut)] = [interval(i) for i in ratio_intervals(more, entered, seed)]
    return found
