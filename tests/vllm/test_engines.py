"""vLLM from the outside: an evaluation through it, and a server that is asked, measured, killed and started again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.engine", reason="needs vLLM: make test-vllm")
from drafters import random_drafter
from tiny import save_target
from vllm_helpers import DRAFTER, serving_target

from carryover.data.prompts import Prompt
from carryover.evaluate.run import Plan, evaluate
from carryover.formats import load_drafter, save_drafter
from carryover.target import Target
from carryover.vllm.offline import Workers
from carryover.vllm.online import measure
from carryover.vllm.serve import Server, server

pytestmark = pytest.mark.vllm
VOCAB, START = 24, 900  # so few tokens that a random drafter guesses some; seconds a server may take to start


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a Markov drafter with carry, in folders."""
    root = tmp_path_factory.mktemp("pair")
    settings = {"block_size": 4, "slots": "next_token", "markov_rank": 6, "carry": "embedding", "vocab_size": VOCAB}
    save_drafter(random_drafter(3, **{**DRAFTER, **settings}), root / "drafter")
    return save_target(serving_target(VOCAB), root / "target"), root / "drafter"


def test_an_evaluation_through_vllm_is_that_of_the_embedded_engine(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target = Target.load(pair[0], "float32")
    drafters = {str(pair[1]): load_drafter(pair[1], target)}
    prompts = [Prompt(str(i), "words", [" ".join(f"w{5 + (i * k) % 19}" for k in range(1, 9))]) for i in range(8)]
    plan = Plan(24, batch_size=4, proposals=(2,))
    with Workers(tmp_path / "vllm", sys.executable) as workers:
        found = evaluate(target, drafters, prompts, tmp_path / "vllm", replace(plan, engine="vllm"), False, workers)
    expected = evaluate(target, drafters, prompts, tmp_path / "embedded", plan, False)
    assert [run["name"] for run in found["runs"]] == ["autoregressive", "drafter (2 proposals)", "drafter"]
    counted = found["engine_counters"]["drafter"]
    for run, own in zip(found["runs"], expected["runs"], strict=True):
        a, b = run["overall"], own["overall"]
        for key in ("tokens", "rounds", "acceptance_length", "carried_rows", "identical"):
            assert a[key] == pytest.approx(b[key]), (run["name"], key)
        # Whether the last token of a response was accepted or corrected, vLLM does not say.
        last = 8 / max(b["rounds"], 1)
        assert a["acceptance_by_position"] == pytest.approx(b["acceptance_by_position"], abs=last)
        assert a["identical"] == 8 and a["tokens_per_second"] > 0
        assert a["draft_share"] is None
    assert counted["num_drafts"] == found["runs"][2]["overall"]["rounds"]
    assert counted["num_accepted_tokens"] == sum(counted["num_accepted_tokens_per_pos"]) > 0


@contextmanager
def running(made: Server) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The server and its address, from when it answers; killed at the end, with whatever it started."""
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **made.environment}
    process = subprocess.Popen(made.command, env=environment, start_new_session=True)
    url = f"http://127.0.0.1:{made.command[made.command.index('--port') + 1]}"
    try:
        deadline = time.monotonic() + START
        while True:
            with suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.5)
        yield process, url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def asked(url: str, model: str, tokens: int, **options: Any) -> urllib.request.Request:
    body = {"model": model, "prompt": [3, 9, 14], "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **options}
    return urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )


def answer(url: str, model: str) -> str:
    with urllib.request.urlopen(asked(url, model, 24), timeout=120) as reply:
        return str(json.load(reply)["choices"][0]["text"])


def test_a_server_is_measured_and_serves_again_after_a_kill(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    target, drafter = map(str, pair)
    extra = ["--max-model-len", "384", "--max-num-seqs", "4"]
    made = server(target, drafter, "cpu", port=port, dtype="float32", kv_gib=1, extra=extra)
    with running(made) as (process, url):
        first = answer(url, target)
        prompts = [Prompt(str(i), "t", [f"w{5 + i} w9"]) for i in range(4)]
        levels = measure(url, target, prompts, tmp_path, [1, 2], 16)["levels"]
        with urllib.request.urlopen(asked(url, target, 300, stream=True), timeout=120) as reply:
            assert reply.readline().startswith(b"data:")
            process.send_signal(signal.SIGKILL)  # in the middle of a response
            process.wait()
    with running(made) as (_, url):
        assert answer(url, target) == first
    assert [(level["concurrency"], level["completed"]) for level in levels] == [(1, 4), (2, 4)]
    assert all(level["acceptance_length"] >= 1 and level["tokens_per_second"] > 0 for level in levels)
