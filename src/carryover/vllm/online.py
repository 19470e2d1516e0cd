"""A server measured from outside: vLLM's own benchmark client against any OpenAI-compatible server, at several levels
of concurrency. Latency includes queueing and the network, so these figures never go into `results.json`.

Every prompt goes as one user message, to which the server applies its chat template. The client reads the server's
counts of speculative decoding before and after, so nothing else may use the server meanwhile.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..data.prompts import Prompt
from ..embedded import EMBEDDED
from ..errors import InputError
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

    target: whose tokenizer counts tokens. model: the name that the server serves it under; None: `target`. Raises
    InputError where the client fails, with the last thing it said.
    """
    asked = {
        "url": url,
        "target": target,
        "model": model or target,
        "prompts": len(prompts),
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
    }
    results: dict[str, Any] = {**asked, "levels": []}
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        data, result = Path(scratch) / "prompts.jsonl", Path(scratch) / "result.json"
        lines = [{"prompt": prompt.turns[0], "output_tokens": max_new_tokens} for prompt in prompts]
        data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        for level in concurrency:
            command = client(asked, data, result, level, python or this_python())
            run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if run.returncode or not result.exists():
                last = next((line for line in reversed(run.stdout.splitlines()) if line.strip()), "nothing")
                raise InputError(f"vLLM's benchmark client failed against {url}; it said: {last.strip()}")
            found = json.loads(result.read_text())
            result.unlink()
            figures = {ours: found.get(theirs) for ours, theirs in FIGURES.items()}
            results["levels"].append({"concurrency": level, **figures})
            write_text(out / FILE, json.dumps(results, indent=1) + "\n")
    return results


def client(asked: dict[str, Any], data: Path, result: Path, concurrency: int, python: str) -> list[str]:
    """The command of one level."""
    tokenizer = str(EMBEDDED[asked["target"]]()) if asked["target"] in EMBEDDED else asked["target"]
    options: dict[str, Any] = {
        "backend": "openai-chat",
        "endpoint": "/v1/chat/completions",
        "base-url": asked["url"],
        "model": asked["model"],
        "tokenizer": tokenizer,
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
