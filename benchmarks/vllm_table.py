"""One table of a target in vLLM, plain and with drafters: offline, one request at a time, and a server with 1, 4 and 16
at a time, measured by vLLM's own client.

    python benchmarks/vllm_table.py --target lab --prompts EVAL.jsonl --limit 32 --tokens 128 --out runs/vllm-lab \\
        --method DFlash=GRID/dflash-b16-s0/continued --method DFlash+Carryover=GRID/dflash-b16-s0/carryover

Run it with the Python of the environment that `make vllm` builds. What OUT holds already is not measured again. Every
server is asked everything once, with the most requests at a time, before it is measured. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

CLI = [sys.executable, "-m", "carryover.cli"]
PLAIN = "plain vLLM"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1], help="offline")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16], help="of the server's requests")
    parser.add_argument("--method", action="append", default=[], help="NAME=DRAFTER")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    methods = dict(method.split("=", 1) for method in args.method)
    args.out.mkdir(parents=True, exist_ok=True)
    asked = ["--target", args.target, "--prompts", args.prompts, "--limit", str(args.limit)]
    asked += ["--max-new-tokens", str(args.tokens), "--engine", "vllm"]

    drafters = [part for drafter in methods.values() for part in ("--drafter", drafter)]
    for size in args.batch_sizes:
        out = args.out / f"offline-{size}"
        if not (out / "results.json").exists():
            subprocess.run([*CLI, "evaluate", *asked, "--dtype", args.dtype, "--batch-size", str(size), *drafters,
                            "--out", str(out)], check=True)  # fmt: skip
    for name, drafter in {PLAIN: None, **methods}.items():
        if not online(args.out, name).exists():
            measure_server(args, name, drafter, asked)
    print(table(args.out, list(methods), args.batch_sizes, args.concurrency))


def online(out: Path, name: str) -> Path:
    return out / f"online-{name.replace(' ', '-')}" / "online.json"


def measure_server(args: argparse.Namespace, name: str, drafter: str | None, asked: list[str]) -> None:
    """Starts a server of its own for a method, asks it, and stops it."""
    url = f"http://127.0.0.1:{args.port}"
    serve = [*CLI, "serve", "--target", args.target, "--dtype", args.dtype, "--port", str(args.port), "--kv-gib", "2"]
    log = args.out / "server.log"
    with log.open("w") as said, subprocess.Popen(
        [*serve, *(["--drafter", drafter] if drafter else [])], stdout=said, stderr=subprocess.STDOUT
    ) as server:  # fmt: skip
        try:
            while not healthy(url):
                if server.poll() is not None:
                    raise SystemExit(f"the server of {name} ended; {log} says why")
                time.sleep(1)
            for folder, levels in (
                (online(args.out, name).parent / "warm-up", str(max(args.concurrency))),
                (online(args.out, name).parent, ",".join(map(str, args.concurrency))),
            ):
                subprocess.run([*CLI, "evaluate", *asked, "--server", url, "--concurrency", levels, "--out",
                                str(folder)], check=True)  # fmt: skip
        finally:
            server.terminate()


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def table(out: Path, methods: list[str], sizes: list[int], concurrency: list[int]) -> str:
    """Tokens per second offline (speedup over plain) and online, tokens per verification, and the time of a round."""
    offline = {size: json.loads((out / f"offline-{size}" / "results.json").read_text()) for size in sizes}
    head = ["method", "tokens per verification", *(f"batch {s}" for s in sizes), *(f"server, {s}" for s in concurrency),
            "a round, ms"]  # fmt: skip
    lines = [head, ["---"] * len(head)]
    for number, name in enumerate([PLAIN, *methods]):
        runs: list[dict[str, Any]] = [offline[size]["runs"][number]["overall"] for size in sizes]
        served = {level["concurrency"]: level for level in json.loads(online(out, name).read_text())["levels"]}
        speedups = [f" ({run['speedup']:.2f})" if number else "" for run in runs]
        lines.append([
            name,
            f"{runs[0]['acceptance_length']:.2f}",
            *(f"{run['tokens_per_second']:,.1f}{more}" for run, more in zip(runs, speedups, strict=True)),
            *(f"{served[level]['tokens_per_second']:,.1f}" for level in concurrency),
            f"{1000 * runs[0]['acceptance_length'] / runs[0]['tokens_per_second']:.1f}",
        ])  # fmt: skip
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
