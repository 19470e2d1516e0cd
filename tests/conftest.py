"""Shared fixtures: single-threaded torch (the tests are tiny), and no progress bars."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_target
from transformers.utils import logging

from carryover.target import Target

torch.set_num_threads(1)
logging.disable_progress_bar()


@pytest.fixture(scope="session")
def target() -> Target:
    """The tiny Llama target, for tests that need just any target. Read-only."""
    return tiny_target("llama")
