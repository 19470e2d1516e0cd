"""The record of a generation: one `Round` per target verification. Decoding writes it; evaluation, report and viewers
read it; nobody derives it a second time."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Round:
    """One draft-verify-commit.

    anchor: position of the last committed token when the round began. proposals: the P drafted tokens, none for plain
    decoding. committed: tokens emitted by this round, accepted ones first, then the correction or bonus, cut at the end
    of the response. accepted: n, how many proposals were accepted, those behind the cut not counted. carried: carry
    rows the draft read, or rejected proposals it read as hints. Times in seconds, 0 if the engine was not asked for
    them.
    """

    anchor: int
    proposals: list[int]
    accepted: int
    committed: list[int]
    carried: int
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0


@dataclass
class Generation:
    """A whole response. tokens: all new tokens, the first one (from prefill, not part of any round) included.

    finish: `stop` (an end token was emitted, it is the last token), `loop` (see `loops.py`), or `length`.
    """

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    finish: str = "length"
    rounds: list[Round] = field(default_factory=list)
    prefill_seconds: float = 0.0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Generation:
        rounds = [Round(**r) for r in record["rounds"]]
        return cls(**{**record, "rounds": rounds})
