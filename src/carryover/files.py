"""Writing files so that a kill leaves the old content or the new one, never half of it."""

from __future__ import annotations

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 beside `path` and renames, which replaces the file in one step."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
