"""Shared fixtures: single-threaded torch (the tests are tiny), and no progress bars."""

from __future__ import annotations

import os

import pytest
import torch
from tiny import tiny_target
from transformers.utils import logging

from carryover.target import Target

torch.set_num_threads(1)
os.environ.setdefault("CARRYOVER_WEIGHTS", "plain")  # what is fastest differs; tests/test_weights.py tries the rest
logging.disable_progress_bar()


@pytest.fixture(scope="session")
def target() -> Target:
    """The tiny Llama target, for tests that need just any target. Read-only."""
    return tiny_target("llama")
