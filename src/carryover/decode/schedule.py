"""How many proposals the next round drafts: as many as give the most tokens per second, by what rounds have shown.

    tokens of a round with l proposals   1 + sum over j <= l of the chance that proposals 1 to j are all right
    seconds of such a round              measured; between numbers that were tried, on a straight line

The chance of each position is counted over the last rounds of the request, and over those of all requests before where
it has few of its own. 0 proposals is plain decoding: nothing is drafted, and the states of the tokens are kept for the
next draft. Then a draft is tried now and again, ever less often, so that a text which becomes easy is noticed.

The choice depends on finished rounds alone, and every number of proposals is verified by the same exact rule, so the
distribution of the output is the target's (docs/decisions.md). Times differ from run to run, so the numbers do as well;
in fp32 at temperature 0 the tokens do not.

Letters: `P` proposals, at most; `l` proposals of a round; `b` requests.
"""

from __future__ import annotations

from collections.abc import Sequence

FORGET = 0.9  # how much of its count a position keeps when a round of the request reaches it
LONG = 0.995  # the same over all requests
PRIOR = 3.0  # so many rounds of its own weigh as much as those of all requests before
FIRST_WAIT, LAST_WAIT = 6, 48  # plain rounds between two tries of a draft
LOOK = 24  # speculative rounds between two tries of one proposal more, or of another number that is not known yet
WORTH = 1.02  # drafting must promise so much more than plain decoding
SMOOTH = 0.2  # weight of a new time


class Acceptance:
    """Counts with forgetting: how often each position was reached, and how often its proposal was right."""

    def __init__(self, positions: int, keep: float) -> None:
        self.right, self.reached, self.keep = [0.0] * positions, [0.0] * positions, keep

    def add(self, proposals: int, accepted: int) -> None:
        for k in range(min(accepted + 1, proposals)):
            self.reached[k] = self.keep * self.reached[k] + 1
            self.right[k] = self.keep * self.right[k] + (k < accepted)

    def chances(self, prior: Sequence[float], weight: float) -> list[float]:
        """The chance of each position, given that all before it were right."""
        counts = zip(self.right, self.reached, prior, strict=True)
        return [(right + weight * p) / (reached + weight) for right, reached, p in counts]


class Seconds:
    """Mean seconds of a round by its number of proposals."""

    def __init__(self) -> None:
        self.mean: dict[int, float] = {}
        self.times: dict[int, int] = {}

    def add(self, proposals: int, seconds: float) -> None:
        before, n = self.mean.get(proposals), self.times.get(proposals, 0)
        self.times[proposals] = n + 1
        if before is None or n == 1:  # the first of its kind also allocates and warms up
            self.mean[proposals] = seconds
        else:  # one slow moment should not decide what is done in the next hundred rounds
            self.mean[proposals] = before + SMOOTH * (min(seconds, 2 * before) - before)

    def of(self, proposals: int) -> float:
        """Between the nearest numbers that were tried on a straight line; beyond them the nearest."""
        below = max((n for n in self.mean if n <= proposals), default=None)
        above = min((n for n in self.mean if n >= proposals), default=None)
        if below is None or above is None or below == above:
            return self.mean[above if below is None else below]  # type: ignore[index]
        share = (proposals - below) / (above - below)
        return self.mean[below] + share * (self.mean[above] - self.mean[below])


class Schedule:
    """Chooses for one engine. It learns from every request, and begins each with what it knows."""

    def __init__(self, most: int) -> None:
        """most: the proposals the drafter was trained for."""
        self.most = most
        self.everything = Acceptance(most, LONG)
        self.seconds: dict[int, Seconds] = {}  # by the number of requests
        self.plain = self.speculative = 0  # rounds since the last try of something else
        self.wait = FIRST_WAIT

    def begin(self) -> Acceptance:
        """The counts of a new request."""
        return Acceptance(self.most, FORGET)

    def choose(self, requests: Sequence[Acceptance]) -> int:
        """How many proposals these requests draft next."""
        seconds = self.seconds.get(len(requests)) or self._like(len(requests))
        if seconds is None or self.most not in seconds.mean:
            return self.most
        if 0 not in seconds.mean:
            return 0
        chances = self._chances(requests)
        rates = [self.tokens(chances, n) / seconds.of(n) for n in range(self.most + 1)]
        best = max(range(1, self.most + 1), key=rates.__getitem__)
        if rates[best] <= WORTH * rates[0]:
            return best if self.plain >= self.wait else 0
        if self.speculative >= LOOK:
            untried = [n for n in (best + 1, best - 1) if 0 < n <= self.most and seconds.times.get(n, 0) < 2]
            return untried[0] if untried else min(best + 1, self.most)
        return best

    def learn(self, requests: Sequence[Acceptance], proposals: int, accepted: Sequence[int], seconds: float) -> None:
        """What a round of these requests showed."""
        known = self.seconds.setdefault(len(requests), Seconds())
        known.add(proposals, seconds)
        for counts, n in zip(requests, accepted, strict=True):
            counts.add(proposals, n)
            self.everything.add(proposals, n)
        if proposals == 0:
            self.plain, self.speculative = self.plain + 1, 0
            return
        tried = self.plain >= self.wait
        self.plain = 0
        if {0, self.most} <= known.mean.keys():
            chances = self._chances(requests)
            plainly = max(self.tokens(chances, n) / known.of(n) for n in range(1, self.most + 1)) <= WORTH / known.of(0)
            self.wait = min(2 * self.wait, LAST_WAIT) if tried and plainly else self.wait if plainly else FIRST_WAIT
        self.speculative = 0 if self.speculative >= LOOK else self.speculative + 1

    @staticmethod
    def tokens(chances: Sequence[float], proposals: int) -> float:
        """Expected tokens of a round, its correction or bonus included."""
        reach, total = 1.0, 1.0
        for chance in chances[:proposals]:
            reach *= chance
            total += reach
        return total

    def _chances(self, requests: Sequence[Acceptance]) -> list[float]:
        prior = self.everything.chances([0.5] * self.most, 1.0)
        each = [counts.chances(prior, PRIOR) for counts in requests]
        return [sum(column) / len(each) for column in zip(*each, strict=True)]

    def _like(self, requests: int) -> Seconds | None:
        """Of another number of requests, the nearest, until this one is known."""
        nearest = min(self.seconds, key=lambda n: abs(n - requests), default=None)
        return None if nearest is None else self.seconds[nearest]
