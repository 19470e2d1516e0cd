"""What a measurement ran on: versions, processor, threads, load. Stored with every result."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from .. import __version__
from ..precision import cpu_name
from ..target import Target


def environment(target: Target) -> dict[str, Any]:
    """A JSON record of the machine and the software, as they are now."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "carryover": __version__,
        "commit": git_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "device": torch.cuda.get_device_name() if target.device.type == "cuda" else target.device.type,
        "dtype": str(target.dtype).removeprefix("torch."),
        "weights": target.weights(),
    }


def git_commit() -> str | None:
    """The commit of a source checkout, `+` behind it when files differ; None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        commit, changed = _git(root, "rev-parse", "--short=12", "HEAD"), _git(root, "status", "--porcelain")
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed else "")


def _git(root: Path, *command: str) -> str:
    return subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, check=True).stdout.strip()
