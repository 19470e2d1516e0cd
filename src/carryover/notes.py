"""What a user should know and need not do anything about: one line on stderr, once."""

from __future__ import annotations

import sys

_said: set[str] = set()


def note(text: str) -> None:
    if text not in _said:
        _said.add(text)
        print(f"note: {text}", file=sys.stderr, flush=True)
