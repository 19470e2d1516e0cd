"""Real commands in real processes, killed or interrupted in the middle: run again, they end as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drafters import random_drafter
from tiny import save_target, tiny_target

from carryover.drafter.modeling import Drafter
from carryover.formats import save_drafter
from carryover.target import Target

pytestmark = pytest.mark.slow
SIGNALS = pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tiny_target(), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"id": f"p{i}", "task": "t", "prompt": f"w{i % 80 + 7} w{2 * i % 80 + 9}"} for i in range(120)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-c", "from carryover.cli import main; main()", *map(str, arguments)]


def finish(*arguments: object) -> str:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def stop(sent: signal.Signals, begun: Callable[[], bool], *arguments: object) -> None:
    """Starts a command and sends the signal once `begun`; a stopped command says so in one line, never a traceback."""
    process = subprocess.Popen(
        command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts
    )
    assert process.stderr is not None
    deadline = time.monotonic() + 200
    while not begun():
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.002)
    os.kill(process.pid, sent)
    said = process.communicate(timeout=60)[1]
    assert process.returncode != 0, "it finished before the signal came"
    assert "Traceback" not in said
    if sent == signal.SIGINT:
        assert process.returncode == 130 and "interrupted; the same command" in said


def heed_interrupts() -> None:
    """Whatever runs the tests in the background may have SIGINT ignored, which processes inherit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@SIGNALS
def test_record(sent: signal.Signals, target: Path, prompts: Path, tmp_path: Path) -> None:
    def arguments(name: str) -> tuple[object, ...]:
        return ("record", "--target", target, "--prompts", prompts, "--out", tmp_path / name, "--max-new-tokens", 48,
                "--batch-size", 4)  # fmt: skip

    finish(*arguments("whole.jsonl"))
    stop(sent, lambda: len(lines(tmp_path / "cut.jsonl")) >= 12, *arguments("cut.jsonl"))
    kept = [line for line in lines(tmp_path / "cut.jsonl") if line.endswith("}")]
    assert 12 <= len(kept) < 120
    finish(*arguments("cut.jsonl"))
    assert lines(tmp_path / "cut.jsonl")[: len(kept)] == kept
    assert sorted(lines(tmp_path / "cut.jsonl")) == sorted(lines(tmp_path / "whole.jsonl"))


@SIGNALS
def test_train(sent: signal.Signals, target: Path, prompts: Path, tmp_path: Path) -> None:
    recorded = tmp_path / "recorded.jsonl"
    finish("record", "--target", target, "--prompts", prompts, "--limit", 16, "--out", recorded,
           "--max-new-tokens", 24)  # fmt: skip
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"target: {target}\ndata: {{corpus: {recorded}, max_length: 64}}\n"
        "drafter: {algorithm: markov, layers: 1, block_size: 4, captured: 2, mask_token_id: 6}\n"
        "train: {anchors: 4, steps: 40, save_steps: 6, logging_steps: 1}\n"
    )
    train = ("train", recipe, "--stage", "baseline", "--resume", "--out")
    finish(*train, tmp_path / "whole")
    cut = tmp_path / "cut"
    stop(sent, lambda: (cut / "checkpoint-12" / "trainer_state.json").exists(), *train, cut)
    assert not (cut / "model.safetensors").exists()
    finish(*train, cut)
    whole, resumed = (Drafter.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    logs = [map(json.loads, lines(tmp_path / name / "train_log.jsonl")) for name in ("whole", "cut")]
    losses = [[(record["step"], record["loss"]) for record in log if "loss" in record] for log in logs]
    assert losses[0] == losses[1] and [step for step, _ in losses[0]] == list(range(1, 41))


@SIGNALS
def test_evaluate(sent: signal.Signals, target: Path, prompts: Path, tmp_path: Path) -> None:
    loaded = Target.load(target)
    save_drafter(
        random_drafter(2, carry="embedding", max_position_embeddings=512, target_fingerprint=loaded.fingerprint()),
        tmp_path / "drafter",
    )

    def arguments(name: str) -> tuple[object, ...]:
        return ("evaluate", "--target", target, "--prompts", prompts, "--drafter", tmp_path / "drafter", "--limit", 40,
                "--max-new-tokens", 24, "--carry-off", "--out", tmp_path / name)  # fmt: skip

    finish(*arguments("whole"))
    stop(sent, lambda: len(lines(tmp_path / "cut" / "trace.jsonl")) >= 9, *arguments("cut"))
    assert not (tmp_path / "cut" / "results.json").exists()
    finish(*arguments("cut"))
    whole, cut = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("whole", "cut"))
    assert cut["environment"]["sessions"] == 2
    untimed = ("name", "prompts", "tokens", "rounds", "acceptance_length", "acceptance_by_position", "identical")
    for a, b in zip(whole["runs"], cut["runs"], strict=True):
        assert [a["overall"].get(k, a.get(k)) for k in untimed] == [b["overall"].get(k, b.get(k)) for k in untimed]
    assert whole["runs"][1]["overall"]["identical"] == 40
