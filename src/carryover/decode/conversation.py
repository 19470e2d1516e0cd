"""A conversation keeps its caches: of each turn, only what earlier turns have not read is run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from .engine import Batch, Engine, Request
from .trace import Generation, Round


class Conversation:
    """Turns of one conversation with an engine. Each prompt is the whole conversation so far, as the chat template
    renders it; what it shares with the one before, from the start, is taken from the caches.

    read: how many tokens of the last prompt had to be run.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.batch: Batch | None = None
        self.ids: list[int] = []  # of which the first `kept` are in the caches
        self.kept = 0
        self.read = 0

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, seed: int = 0) -> Generation:
        """The response to the conversation so far; equal to that of `Engine.generate`."""
        generation = Generation(len(prompt_ids))
        for _ in self.rounds(prompt_ids, max_new_tokens, seed, generation):
            pass
        return generation

    def rounds(
        self, prompt_ids: Sequence[int], max_new_tokens: int, seed: int = 0, generation: Generation | None = None
    ) -> Iterator[Round]:
        """Yields the rounds of `generate`; one that is left unfinished leaves the caches in order."""
        prompt = Request(prompt_ids, max_new_tokens, seed)
        self.engine.check(prompt)
        return self._rounds(prompt, Generation(len(prompt_ids)) if generation is None else generation)

    def _rounds(self, prompt: Request, generation: Generation) -> Iterator[Round]:
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.ids, prompt.ids, strict=False)))
        start = min(shared, self.kept, len(prompt.ids) - 1)  # the last token's state gives the first of the response
        self.batch = self.engine.new_batch([prompt], 1, self.batch)
        self.ids, self.kept, self.read = list(prompt.ids), start, len(prompt.ids) - start
        going = self.engine.join(self.batch, prompt, generation, start)
        self.kept = len(prompt.ids)
        while going:
            request = self.batch.requests[0]
            (round_,) = self.engine.round(self.batch)
            # Rows of the last verification are half read (see `DraftCache`); those before it are there for good.
            self.kept, going = request.base, not self.engine.take(request, round_)
            self.ids = request.ids
            yield round_
        self.batch.requests.clear()
