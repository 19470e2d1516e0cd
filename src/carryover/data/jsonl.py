"""JSON lines, plain or gzipped, one file or a folder of them; every record comes with the place it was read from."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import InputError

SUFFIXES = (".jsonl", ".jsonl.gz")


def jsonl_files(path: Path) -> list[Path]:
    """The file itself, or the JSONL files of a folder by name. Raises InputError if there is nothing to read."""
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if f.name.endswith(SUFFIXES))
        if not files:
            raise InputError(f"the folder {path} holds no .jsonl or .jsonl.gz file.")
        return files
    if not path.is_file():
        raise InputError(f"there is no file or folder {path}.")
    return [path]


def read_jsonl(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (`FILE:LINE`, record) and skips blank lines. Raises InputError naming the line that is no JSON object."""
    try:
        with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                where = f"{file}:{number}"
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as error:
                    raise InputError(f"{where} is not valid JSON ({error.msg} at column {error.colno}).") from error
                except (ValueError, RecursionError) as error:  # numbers and nesting beyond what Python reads
                    raise InputError(f"{where} is not valid JSON ({error}).") from error
                if not isinstance(record, dict):
                    raise InputError(f"{where} must be a JSON object, got {line.strip()[:40]}.")
                yield where, record
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise InputError(f"cannot read {file}: {error}.") from error
