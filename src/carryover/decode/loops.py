"""What a degenerate loop is, and where a response becomes one.

Small targets decoded greedily fall into loops (37 % of SmolLM2's answers). Loops are easy to draft and inflate every
method's acceptance, so they are counted, and an evaluation may end responses there. The rule reads the response alone,
so it ends those of all methods at the same token.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

LENGTH, TIMES = 12, 3


class LoopWatch:
    """Reads a response token by token. It is degenerate once one run of LENGTH tokens has occurred TIMES times."""

    def __init__(self) -> None:
        self.last: deque[int] = deque(maxlen=LENGTH)
        self.seen: Counter[tuple[int, ...]] = Counter()

    def read(self, tokens: Iterable[int]) -> int | None:
        """How many of these further tokens it took to make the response degenerate; None: it is not."""
        for i, token in enumerate(tokens, 1):
            self.last.append(token)
            if len(self.last) == LENGTH:
                self.seen[run := tuple(self.last)] += 1
                if self.seen[run] == TIMES:
                    return i
        return None
