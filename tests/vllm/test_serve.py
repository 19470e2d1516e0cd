"""Commands and records around vLLM; needs no vLLM."""

from __future__ import annotations

import json
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from drafters import random_drafter
from tiny import save_target, tiny_target
from typer.testing import CliRunner

from carryover.cli import app
from carryover.data.prompts import Prompt
from carryover.decode.engine import Request
from carryover.errors import InputError
from carryover.evaluate.run import Plan, evaluate
from carryover.formats import load_drafter, save_drafter
from carryover.target import Target
from carryover.vllm import offline, online, serve


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target and drafters for it, by folder."""
    root, target = tmp_path_factory.mktemp("pair"), tiny_target("llama")
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "carry": ("carryover", {"carry": "embedding", "slots": "next_token", "markov_rank": 4}),
        "stock": ("zlab", {}),
        "sidecar": ("zlab", {"carry": "embedding"}),
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


def test_a_drafter_without_its_carry_tensors_is_refused(pair: dict[str, str], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pair["sidecar"], tmp_path / "d"))
    assert serve.speculation(pair["target"], str(folder), None, "greedy")["num_speculative_tokens"] == 4
    (folder / "carryover" / "carry.safetensors").unlink()
    with pytest.raises(InputError, match="carry"):
        serve.server(pair["target"], str(folder), "cpu", python="py")


def test_what_is_asked_for_twice(pair: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert "VLLM_CPU_KVCACHE_SPACE" not in serve.server(pair["target"], None, "cpu", python="py").environment
    asked = serve.server(pair["target"], None, "cpu", python="py", kv_gib=7)
    assert asked.environment["VLLM_CPU_KVCACHE_SPACE"] == "7"
    for extra in (["--speculative-config", "{}"], ["--speculative-config={}"]):
        assert serve.server(pair["target"], None, "cpu", python="py", extra=extra).command[-len(extra) :] == extra
        with pytest.raises(InputError, match="give one of the two"):
            serve.server(pair["target"], pair["carry"], "cpu", python="py", extra=extra)


def test_a_python_without_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no Python '/nonexistent/python'"):
        serve.vllm_python("/nonexistent/python")
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    with pytest.raises(InputError, match="lacks vLLM or this package"):
        serve.vllm_python(str(bare))
    bare.write_text("#!/bin/sh\nexit 0\n")
    assert serve.vllm_python(str(bare)) == str(bare)


def test_a_taken_port_is_named_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match=r"cannot listen at 127\.0\.0\.1:\d+ .*name another --port"):
            serve.run(serve.Server(["/bin/false"], {}), "127.0.0.1", taken.getsockname()[1])


def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """Killed without a word, as by kill -9, while the worker is still loading."""
    worker = "from carryover.vllm.worker import _end_with_parent; _end_with_parent()"
    worker += "; import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    parent = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1]]); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", parent, worker], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert Path(f"/proc/{child}").exists()
        process.kill()
        process.wait()
        until = time.monotonic() + 10
        while running(child) and time.monotonic() < until:
            time.sleep(0.05)
        assert not running(child)


def running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_nothing_is_loaded_for_what_is_refused_or_done(pair: dict[str, str], tmp_path: Path) -> None:
    """Engines start when there is something to decode: this one could not."""
    target = Target.load(pair["target"])
    drafters = {pair["carry"]: load_drafter(pair["carry"], target)}
    prompts, out = [Prompt("a", "t", ["w5 w6"]), Prompt("b", "t", ["w7"])], tmp_path / "out"
    plan = Plan(8, engine="vllm")
    never = str(tmp_path / "never")
    workers = offline.Workers(out, never)
    evaluate(target, drafters, prompts, out, plan, progress=False)  # the embedded engine, for the trace
    results = json.loads((out / "results.json").read_text())
    (out / "results.json").write_text(json.dumps({**results, "engine_counters": {"carry": {"num_drafts": 3}}}))
    with workers:
        again = evaluate(target, drafters, prompts, out, plan, False, workers)
        assert again["engine_counters"] == {"carry": {"num_drafts": 3}} and again["runs"] == results["runs"]
        with pytest.raises(InputError, match="other settings"):
            evaluate(target, drafters, prompts, out, Plan(9, engine="vllm"), False, workers)
        (out / "settings.json").unlink()
        with pytest.raises(InputError, match="results without the settings"):
            evaluate(target, drafters, prompts, out, plan, False, workers)
        with pytest.raises(FileNotFoundError, match="never"):
            evaluate(target, drafters, prompts, tmp_path / "new", plan, False, workers)


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


@pytest.fixture
def url() -> Iterator[str]:
    """A server that names its models and does nothing else."""

    class Models(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"data": [{"id": "lab"}, {"id": "other"}]}).encode())

        def log_message(self, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Models) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_server_is_measured_with_vllms_client(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    prompts = [Prompt("a", "t", ["hello"]), Prompt("b", "t", ["you"])]

    def measure(levels: list[int], target: str = "lab", out: str = "out", asked: list[Prompt] = prompts) -> Any:
        return online.measure(url, target, asked, tmp_path / out, levels, 16, python=sys.executable)

    found = measure([1, 4])
    assert [(x["concurrency"], x["tokens_per_second"], x["acceptance_length"]) for x in found["levels"]] == [
        (1, 10.0, 3.5),
        (4, 40.0, 3.5),
    ]
    assert json.loads((tmp_path / "out" / "online.json").read_text()) == found
    monkeypatch.setattr(online, "CLIENT", "print('no such thing'); raise SystemExit(1)")
    assert measure([4, 1]) == found  # both are there already
    with pytest.raises(InputError, match="it said: no such thing"):
        measure([2])
    with pytest.raises(InputError, match="another prompts_digest; name another --out"):
        measure([1], asked=[Prompt("a", "t", ["hello"]), Prompt("b", "t", ["me"])])
    with pytest.raises(InputError, match="serves lab, other, not smollm2"):
        measure([1], "smollm2", "new")
    with pytest.raises(InputError, match="no OpenAI-compatible server answers"):
        online.measure("http://127.0.0.1:1", "lab", prompts, tmp_path / "new", [1], python=sys.executable)
    fake.write_text(fake.read_text().replace("int(get('num-prompts'))", "1"))
    monkeypatch.setattr(online, "CLIENT", f"import runpy, sys; sys.argv.insert(0, ''); runpy.run_path({str(fake)!r})")
    with pytest.raises(InputError, match="answered 1 of 2 prompts with 3 at a time"):
        measure([3])
    assert json.loads((tmp_path / "out" / "online.json").read_text()) == found and not (tmp_path / "new").exists()
    (tmp_path / "out" / "online.json").write_text("{")
    with pytest.raises(InputError, match="is damaged"):
        measure([1])


def test_an_online_measurement_takes_no_drafter(pair: dict[str, str], tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"id": "a", "task": "t", "prompt": "w5 w6"}\n')
    options = ["--target", pair["target"], "--prompts", str(prompts), "--out", str(tmp_path / "o"), "--server", "x"]
    result = CliRunner().invoke(app, ["evaluate", *options])
    assert result.exit_code == 2
    for levels in ("0", "4,-3", "a,b", ""):
        result = CliRunner().invoke(app, ["evaluate", *options, "--engine", "vllm", "--concurrency", levels])
        assert result.exit_code == 2 and "--concurrency must be" in " ".join(result.output.split())
    assert Plan().engine == "embedded"
