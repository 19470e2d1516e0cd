"""A server measured from outside: vLLM's own benchmark client against any OpenAI-compatible server, at several levels
of concurrency. Latency includes queueing and the network, so these figures never go into `results.json`.

Every prompt goes as one user message, its first turn, to which the server applies its chat template. The client reads
the server's counts of speculative decoding before and after, so nothing else may use the server meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import urllib.request
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .. import __version__
from ..data.prompts import Prompt
from ..embedded import located
from ..errors import InputError
from ..evaluate.environment import cpu_name
from ..files import write_text
from .serve import this_python

FILE = "online.json"
CONCURRENCY = (1, 2, 4, 8, 16, 32)
# `vllm bench serve` without the `vllm` command, which the CPU build lacks.
CLIENT = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
# our name -> the client's
FIGURES = {
    "completed": "completed",
    "seconds": "duration",
    "requests_per_second": "request_throughput",
    "tokens_per_second": "output_throughput",
    "first_token_ms_mean": "mean_ttft_ms",
    "first_token_ms_p99": "p99_ttft_ms",
    "token_ms_mean": "mean_tpot_ms",
    "token_ms_p99": "p99_tpot_ms",
    "response_ms_mean": "mean_e2el_ms",
    "response_ms_p99": "p99_e2el_ms",
    "acceptance_length": "spec_decode_acceptance_length",
    "acceptance_by_position": "spec_decode_per_position_acceptance_rates",
    "rounds": "spec_decode_num_drafts",
}


def measure(
    url: str,
    target: str,
    prompts: Sequence[Prompt],
    out: Path,
    concurrency: Sequence[int] = CONCURRENCY,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    model: str | None = None,
    python: str | None = None,
) -> dict[str, Any]:
    """Sends all prompts once at each level of concurrency; writes `out/online.json` after each and returns it.

    A level that `out` holds already is not measured again. target: whose tokenizer counts tokens. model: the name that
    the server serves it under; None: `target`. Raises InputError where no such server answers, for a folder with
    another measurement, and where the client fails or not every prompt was answered.
    """
    asked = {
        "url": url,
        "target": target,
        "model": model or target,
        "prompts": len(prompts),
        "prompts_digest": hashlib.sha256(json.dumps([p.turns[0] for p in prompts]).encode()).hexdigest()[:16],
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
    }
    results = begun(out / FILE, asked)
    check_server(url, str(asked["model"]))
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        data, result = Path(scratch) / "prompts.jsonl", Path(scratch) / "result.json"
        lines = [{"prompt": prompt.turns[0], "output_tokens": max_new_tokens} for prompt in prompts]
        data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        for level in concurrency:
            if any(done["concurrency"] == level for done in results["levels"]):
                continue
            command = client(asked, data, result, level, python or this_python())
            run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if run.returncode or not result.exists():
                last = next((line for line in reversed(run.stdout.splitlines()) if line.strip()), "nothing")
                raise InputError(f"vLLM's benchmark client failed against {url}; it said: {last.strip()}")
            found = json.loads(result.read_text())
            result.unlink()
            if found.get("completed") != len(prompts):
                raise InputError(
                    f"{url} answered {found.get('completed')} of {len(prompts)} prompts with {level} at a time, which "
                    "is no measurement; its log says why."
                )
            figures = {ours: found.get(theirs) for ours, theirs in FIGURES.items()}
            results["levels"].append({"concurrency": level, **figures})
            write_text(out / FILE, json.dumps(results, indent=1) + "\n")
    return results


def begun(path: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """What `path` holds of this measurement. Raises InputError when it holds another one."""
    if not path.exists():
        started = datetime.now(UTC).isoformat(timespec="seconds")
        return {**asked, "environment": {"started": started, "carryover": __version__, "cpu": cpu_name()}, "levels": []}
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        changed = [key for key, value in asked.items() if found[key] != value]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged; delete it, or name another --out.") from error
    if changed:
        raise InputError(f"{path} holds a measurement with another {', '.join(changed)}; name another --out.")
    return found


def check_server(url: str, model: str) -> None:
    """Raises InputError unless a server at `url` serves `model`."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/v1/models", timeout=10) as answer:
            served = [entry["id"] for entry in json.load(answer)["data"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "reason", error)
        raise InputError(
            f"no OpenAI-compatible server answers at {url} ({reason}); `carryover serve` starts one."
        ) from error
    if model not in served:
        raise InputError(f"the server at {url} serves {', '.join(served)}, not {model}; name that as --target.")


def client(asked: dict[str, Any], data: Path, result: Path, concurrency: int, python: str) -> list[str]:
    """The command of one level."""
    options: dict[str, Any] = {
        "backend": "openai-chat",
        "endpoint": "/v1/chat/completions",
        "base-url": asked["url"],
        "model": asked["model"],
        "tokenizer": located(asked["target"]),
        "dataset-name": "custom",
        "dataset-path": data,
        "custom-output-len": asked["max_new_tokens"],
        "num-prompts": asked["prompts"],
        "max-concurrency": concurrency,
        "temperature": asked["temperature"],
        "seed": asked["seed"],
        "percentile-metrics": "ttft,tpot,itl,e2el",
        "result-dir": result.parent,
        "result-filename": result.name,
    }
    flags = ["--skip-chat-template", "--save-result", "--disable-tqdm"]
    pairs = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return [python, "-c", CLIENT, *pairs, *flags]
