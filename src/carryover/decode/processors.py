"""Logits processors inside a block: every row is processed as if the proposals before it were committed.

A processor is any of transformers' `LogitsProcessor`: called with the token ids so far `[1, length]` and the scores of
the next one `[1, V]`. Row i of a block is processed behind the committed tokens and proposals 1..i. Rows behind the
first rejection are processed behind tokens that will never be there, and are never looked at.

A processor must be a function of these two arguments. Those that remember earlier calls would see every row, the
rejected ones too, and are not supported.

Letters: `b` requests, `Q` rows of a block, `V` vocabulary. Source: SPEC 5 (every processor on both sides).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from ..errors import InputError

Process = Callable[[Any, Any], Any]  # (ids [1, length], scores [1, V]) -> scores [1, V]; LogitsProcessor is one


@dataclass(frozen=True)
class Penalties:
    """Changes to the logits that depend on the text so far; the defaults change nothing.

    repetition: above 1 discourages tokens of the prompt and of the response (divides positive logits, multiplies
    negative ones). presence, frequency: subtracted once, and once per occurrence, from the logits of tokens of the
    response. min_new_tokens: no end token before so many. Raises InputError for a value out of range.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.repetition > 0:
            raise InputError(f"the repetition penalty must be above 0 (1 changes nothing), got {self.repetition}.")
        for name, value in (("presence", self.presence), ("frequency", self.frequency)):
            if not -2 <= value <= 2:
                raise InputError(f"the {name} penalty must be between -2 and 2, got {value}.")
        if self.min_new_tokens < 0:
            raise InputError(f"min_new_tokens must be at least 0, got {self.min_new_tokens}.")

    def processors(self, prompt_tokens: int, stop_ids: Sequence[int], device: torch.device) -> list[Process]:
        """Those of one request, in the order of transformers."""
        found: list[Process] = []
        if self.repetition != 1:
            found.append(RepetitionPenaltyLogitsProcessor(self.repetition))
        if self.presence or self.frequency:
            found.append(CountPenalties(prompt_tokens, self.presence, self.frequency))
        if self.min_new_tokens and stop_ids:
            stops = sorted(stop_ids)
            found.append(MinNewTokensLengthLogitsProcessor(prompt_tokens, self.min_new_tokens, stops, str(device)))
        return found


class CountPenalties(LogitsProcessor):
    """Presence and frequency penalties as OpenAI defines them, over the tokens behind the prompt."""

    def __init__(self, prompt_tokens: int, presence: float, frequency: float) -> None:
        self.prompt_tokens, self.presence, self.frequency = prompt_tokens, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ids = input_ids[:, self.prompt_tokens :]
        counts = torch.zeros_like(scores).scatter_add_(1, ids, torch.ones_like(ids, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


def apply(processors: Sequence[Process], ids: Tensor, scores: Tensor) -> Tensor:
    """All of them in turn, as transformers' `LogitsProcessorList`."""
    for process in processors:
        scores = process(ids, scores)
    return scores


class History:
    """The committed tokens of the requests of a batch, and what processes their logits.

    ids: prompt and response so far, per request. processors: per request; a request may have none.
    """

    def __init__(self, ids: list[list[int]], processors: list[Sequence[Process]], device: torch.device) -> None:
        self.committed = [torch.tensor(row, device=device) for row in ids]
        self.processors = processors

    def row(self, logits: Tensor, proposals: Tensor) -> Tensor:
        """`logits [b, V]` of the token behind `proposals [b, i]`; a new tensor, fp32."""
        out = logits.float()
        rows = [
            apply(processors, torch.cat((committed, proposals[r]))[None], out[r][None]) if processors else out[r][None]
            for r, (committed, processors) in enumerate(zip(self.committed, self.processors, strict=True))
        ]
        return torch.cat(rows)

    def rows(self, logits: Tensor, proposals: Tensor) -> Tensor:
        """Row i of `logits [b, P+1, V]` as if the first i of `proposals [b, P]` were committed."""
        return torch.stack([self.row(logits[:, i], proposals[:, :i]) for i in range(logits.shape[1])], dim=1)
