"""Writing files so that a kill leaves the old content or the new one, never half of it, and processes do not mix."""

from __future__ import annotations

import os
import sys
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
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # another process may write the same file
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


@contextmanager
def alone(path: Path, wait: bool = False) -> Iterator[None]:
    """Holds a file or folder that exists for this process until the block ends; a killed process lets it go.

    Raises InputError when another process holds it; wait: waits for that one instead.
    """
    if fcntl is None:
        yield
        return
    place = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if not wait:
                raise Busy(f"another process works on {path}; wait until it ends, or name another --out.") from error
            print(f"waiting for another process that works on {path}", file=sys.stderr)
            fcntl.flock(place, fcntl.LOCK_EX)
        except OSError:  # a file system that has no locks
            pass
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
