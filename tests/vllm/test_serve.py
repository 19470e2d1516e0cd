"""Commands and records around vLLM; needs no vLLM."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from drafters import random_drafter
from tiny import save_target, tiny_target
from typer.testing import CliRunner

from carryover.cli import app
from carryover.data.prompts import Prompt
from carryover.decode.engine import Request
from carryover.errors import InputError
from carryover.evaluate.run import Plan
from carryover.formats import save_drafter
from carryover.vllm import offline, online, serve


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target and drafters for it, by folder."""
    root, target = tmp_path_factory.mktemp("pair"), tiny_target("llama")
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "carry": ("carryover", {"carry": "embedding", "slots": "next_token", "markov_rank": 4}),
        "stock": ("zlab", {}),
        "markov": ("speculators", {"markov_rank": 4}),
        "narrow": ("carryover", {"hidden_size": 16, "target_hidden_size": 32, "carry": "plain"}),
    }
    for name, (form, settings) in kinds.items():
        save_drafter(random_drafter(**settings), root / name, form, target)
    return {"target": str(save_target(target, root / "target")), **{name: str(root / name) for name in kinds}}


def test_the_command_names_target_drafter_and_proposals(pair: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    made = serve.server(pair["target"], pair["carry"], "cpu", port=9000, python="py", extra=["--max-num-seqs", "4"])
    assert made.command[:3] == ["py", "-m", "vllm.entrypoints.openai.api_server"]
    assert made.command[-2:] == ["--max-num-seqs", "4"]
    assert made.environment == {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_PLUGINS": "other,carryover"}
    asked = json.loads(made.command[made.command.index("--speculative-config") + 1])
    assert (asked["method"], asked["model"], asked["num_speculative_tokens"]) == ("dflash", pair["carry"], 5)
    words = shlex.split(str(made))
    assert words[2:] == made.command and words[0] == "VLLM_CPU_KVCACHE_SPACE=4"
    on_gpu = serve.server(pair["target"], None, "cuda", python="py")
    assert on_gpu.environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")  # asked for
    assert "VLLM_USE_V2_MODEL_RUNNER" not in serve.server(pair["target"], None, "cuda", python="py").environment
    assert "--speculative-config" not in on_gpu.command and "--enforce-eager" not in on_gpu.command


def test_pairs_that_cannot_be_served_are_refused_before_anything_starts(pair: dict[str, str]) -> None:
    with pytest.raises(InputError, match="its hidden_size is 16"):
        serve.server(pair["target"], pair["narrow"], "cpu", python="py")
    with pytest.raises(InputError, match="num_speculative_tokens is 9"):
        serve.server(pair["target"], pair["carry"], "cpu", proposals=9, python="py")
    with pytest.raises(InputError, match="--to carryover"):
        serve.server(pair["target"], pair["markov"], "cpu", python="py")
    assert serve.speculation(pair["target"], pair["stock"], None, "greedy")["num_speculative_tokens"] == 4


def test_serve_prints_its_command(pair: dict[str, str]) -> None:
    options = ["--target", pair["target"], "--drafter", pair["carry"], "--python", "py", "--dry-run"]
    result = CliRunner().invoke(app, ["serve", *options, "--max-model-len", "256"])
    assert result.exit_code == 0, result.output
    assert " -m vllm.entrypoints.openai.api_server " in result.output
    assert result.output.rstrip().endswith("--max-model-len 256")
    refused = CliRunner().invoke(app, ["serve", *options[:4], "--proposals", "9", "--python", "py"])
    assert refused.exit_code == 2


def test_steps_of_vllm_become_rounds() -> None:
    engine = object.__new__(offline.VllmEngine)
    engine.proposals, engine.carries = 3, True
    response = {"steps": [[8], [1, 2], [3], [4, 5, 6, 7]], "finish": "length", "seconds": 2.0, "first_seconds": 0.5}
    made = engine._generation(Request([9] * 10, 8), response)
    assert made.tokens == [8, 1, 2, 3, 4, 5, 6, 7]
    assert [(r.anchor, r.accepted, r.committed, r.carried) for r in made.rounds] == [
        (10, 1, [1, 2], 0),
        (12, 0, [3], 2),
        (13, 3, [4, 5, 6, 7], 3),
    ]
    assert [r.proposals for r in made.rounds] == [[1, -1, -1], [-1, -1, -1], [4, 5, 6]]
    assert (made.finish, made.seconds, made.prefill_seconds) == ("length", 2.0, 0.5)


def test_a_carry_off_control_is_the_drafter_without_its_carry(tmp_path: Path) -> None:
    drafter = random_drafter(carry="embedding")
    plain, folder = offline.Workers(tmp_path, "py")._without_carry(drafter)
    assert plain.config.carry == "none" and (folder / "model.safetensors").exists()
    assert not any(name.startswith("carry.") for name in plain.state_dict())
    assert offline.Workers(tmp_path, "py")._without_carry(drafter)[1] == folder


def test_a_server_is_measured_with_vllms_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is replaced by one that says what it was asked for."""
    fake = tmp_path / "client.py"
    fake.write_text(
        "import json, sys\n"
        "a = sys.argv[3:]\n"
        "get = lambda name: a[a.index('--' + name) + 1]\n"
        "found = {'completed': int(get('num-prompts')), 'output_throughput': 10.0 * int(get('max-concurrency')),"
        " 'mean_ttft_ms': 5.0, 'mean_e2el_ms': 50.0, 'spec_decode_acceptance_length': 3.5}\n"
        "json.dump(found, open(get('result-dir') + '/' + get('result-filename'), 'w'))\n"
    )
    monkeypatch.setattr(online, "CLIENT", f"import runpy, sys; sys.argv.insert(0, ''); runpy.run_path({str(fake)!r})")
    import sys

    prompts = [Prompt("a", "t", ["hello"]), Prompt("b", "t", ["you"])]
    found = online.measure("http://127.0.0.1:1", "lab", prompts, tmp_path / "out", [1, 4], 16, python=sys.executable)
    assert [(x["concurrency"], x["tokens_per_second"], x["acceptance_length"]) for x in found["levels"]] == [
        (1, 10.0, 3.5),
        (4, 40.0, 3.5),
    ]
    assert json.loads((tmp_path / "out" / "online.json").read_text()) == found
    monkeypatch.setattr(online, "CLIENT", "print('no such server'); raise SystemExit(1)")
    with pytest.raises(InputError, match="it said: no such server"):
        online.measure("http://127.0.0.1:1", "lab", prompts, tmp_path / "out", [1], python=sys.executable)


def test_an_online_measurement_takes_no_drafter(pair: dict[str, str], tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"id": "a", "task": "t", "prompt": "w5 w6"}\n')
    options = ["--target", pair["target"], "--prompts", str(prompts), "--out", str(tmp_path / "o"), "--server", "x"]
    result = CliRunner().invoke(app, ["evaluate", *options])
    assert result.exit_code == 2
    assert Plan().engine == "embedded"
