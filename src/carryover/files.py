"""Writing files so that a kill leaves the old content or the new one, never half of it, and processes do not mix."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import InputError

try:
    import fcntl
except ImportError:  # not on Windows; there nothing is locked
    fcntl = None  # type: ignore[assignment]


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 beside `path` and renames, which replaces the file in one step."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


@contextmanager
def alone(path: Path, wait: bool = False) -> Iterator[None]:
    """Holds a file or folder that exists for this process until the block ends; a killed process lets it go.

    Raises InputError when another process holds it; wait: waits for that one instead.
    """
    place = os.open(path, os.O_RDONLY)
    try:
        if fcntl is not None:
            try:
                fcntl.flock(place, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError as error:
                raise Busy(f"another process works on {path}; wait until it ends, or name another --out.") from error
        yield
    finally:
        os.close(place)


class Busy(InputError):
    """Something that another process holds."""


def let_others_read(folder: Path) -> None:
    """Gives weights the permissions of any new file: safetensors writes them for the owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.glob("*.safetensors"):
        path.chmod(0o666 & ~umask)
