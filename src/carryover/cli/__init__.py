"""The command line. Thin: each command reads its options, calls one function of the package and prints what it returns.

Exit codes: 0 fine, 1 the check failed, 2 bad usage or input (one sentence on stderr; a traceback only with `--debug`),
130 interrupted. Heavy modules are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

# isort: off
from . import story, training, measuring, decoding, checkpoints  # noqa: F401  # registers them, in the order of --help
from .shared import app
# isort: on


def main() -> None:
    app()
