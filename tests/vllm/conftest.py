"""The target that vLLM serves in these tests, alive and in a folder, anew for every file."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import save_target

from carryover.target import Target


@pytest.fixture(scope="module")
def target() -> Target:
    from vllm_helpers import serving_target  # sets variables for vLLM, which tests without it must not see

    return serving_target()


@pytest.fixture(scope="module")
def folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(target, tmp_path_factory.mktemp("target"))
