"""Speed against others: same target, same prompts, same run, one request at a time, greedy.

    python benchmarks/peers.py --target lab --drafter DIR --drafter DIR2 --threads 1 [--vllm-python PATH]

The others are `generate` of transformers, plain and with prompt lookup (the fastest of `--lookup`, chosen in a pass
before the timed ones); the DFlash loop with caches that grow and are cropped (`grow_and_crop.py`), on the drafters
given; and vLLM, plain, with n-gram lookup and with the DFlash drafters converted for it, each engine in a process of
its own (`vllm_worker.py`), started with the Python given, idle while others run. `--drafter random` is a random one.

Methods take turns prompt by prompt, and who begins changes. Prints tokens per second (minimum, median, maximum over the
repeats), by how much ours is faster (medians; 1.0 is equal), whether the tokens are those of transformers, and tokens
per verification. The last line is JSON. Set OMP_WAIT_POLICY=PASSIVE, or idle threads of one method slow the others.

Acceptance length: tokens after the first per verification. Prompt lookup of transformers verifies in the prompt's own
forward already, so there it is all tokens per forward. vLLM: 1 + accepted / drafts, rounds that drafted, not cut at the
end of a response.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import random_drafter
from grow_and_crop import grow_and_crop
from transformers.utils import logging

from carryover.data.chat import render_prompt
from carryover.data.prompts import SUITES, load_prompts
from carryover.decode.engine import Engine
from carryover.drafter.modeling import Drafter
from carryover.embedded import EMBEDDED
from carryover.errors import InputError
from carryover.evaluate.divergence import first_difference, logit_gap
from carryover.evaluate.environment import environment
from carryover.formats import decoding_drafter, save_drafter
from carryover.lab import lab_prompts
from carryover.target import Target

HAS_COMPILE = "compile" in inspect.signature(Engine).parameters
OURS = "ours, plain"


class Answer(NamedTuple):
    """tokens of the response; how many of them verifications emitted, and in how many; seconds if not to be timed."""

    tokens: list[int]
    emitted: int = 0
    verifications: int = 0
    seconds: float | None = None


class Method(NamedTuple):
    """run: prompt ids to answer. like: our method that does the same work, "" if none does."""

    run: Callable[[list[int]], Answer]
    like: str = ""


# ---- the methods -----------------------------------------------------------------------------------------------------
def of_transformers(target: Target, tokens: int, **options: Any) -> Callable[[list[int]], Answer]:
    def run(ids: list[int]) -> Answer:
        forwards = 0

        def count(*_: Any) -> None:
            nonlocal forwards
            forwards += 1

        handle = target.model.register_forward_hook(count)
        prompt = torch.tensor([ids])
        out: Any = target.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=tokens, pad_token_id=0,
            **options,
        )  # fmt: skip
        handle.remove()
        response = out[0, len(ids) :].tolist()
        return Answer(response, len(response), forwards if options else 0)

    return run


def of_engine(engine: Engine, tokens: int) -> Callable[[list[int]], Answer]:
    def run(ids: list[int]) -> Answer:
        generation = engine.generate(ids, tokens)
        return Answer(generation.tokens, len(generation.tokens) - 1, len(generation.rounds) if engine.drafter else 0)

    return run


def our_methods(
    target: Target, drafters: dict[str, Drafter], tokens: int, options: dict[str, Any]
) -> dict[str, Method]:
    """Plain, and with each drafter; with carry and without where the drafter has it."""
    engines = {OURS: Engine(target, timed=False, **options)}
    for name, drafter in drafters.items():
        both = {", carry on": True, ", carry off": False} if drafter.config.carry != "none" else {"": True}
        for label, carry in both.items():
            engines[f"ours, {name}{label}"] = Engine(target, drafter, carry=carry, timed=False, **options)
    return {name: Method(of_engine(engine, tokens)) for name, engine in engines.items()}


def of_loop(target: Target, drafter: Drafter, tokens: int) -> Callable[[list[int]], Answer]:
    def run(ids: list[int]) -> Answer:
        response, rounds = grow_and_crop(target, drafter, ids, tokens)
        return Answer(response, len(response) - 1, rounds)

    return run


class Vllm:
    """An engine in a process of its own. Raises InputError, with its last words, when it does not start."""

    def __init__(self, python: str, settings: dict[str, Any], threads: int, stop: list[int], tokens: int) -> None:
        self.stop, self.tokens, self.drafts, self.accepted = stop, tokens, 0, 0
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        # vLLM warns of a significant loss without these two, so they are loaded where its environment has them
        library = Path(python).parent.parent / "lib"
        preloaded = [str(x) for name in ("libiomp5.so", "libtcmalloc_minimal.so.4") if (x := library / name).exists()]
        environment = {
            **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_WAIT_POLICY": "PASSIVE", "LD_PRELOAD": ":".join(preloaded),
        }  # fmt: skip
        command = [python, str(Path(__file__).with_name("vllm_worker.py")), json.dumps(settings)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment
        )
        self.version = " ".join([self._reply()["version"], *(Path(x).name for x in preloaded)])

    def __call__(self, ids: list[int]) -> Answer:
        assert self.process.stdin is not None
        print(json.dumps({"ids": ids, "tokens": self.tokens, "stop": self.stop}), file=self.process.stdin, flush=True)
        reply = self._reply()
        drafts, accepted = reply["drafts"] - self.drafts, reply["accepted"] - self.accepted
        self.drafts, self.accepted = reply["drafts"], reply["accepted"]
        return Answer(reply["tokens"], drafts + accepted, drafts, reply["seconds"])

    def _reply(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.log.seek(0)
            errors = [x.strip() for x in self.log.read().splitlines() if "Error" in x]
            raise InputError((errors or ["it ended without a word"])[-1])
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def vllm_methods(
    args: argparse.Namespace, target: Target, drafters: dict[str, Drafter], length: int, folder: Path
) -> dict[str, Vllm]:
    """Those that start; the others are named with the reason."""
    if not args.vllm_python:
        print("vLLM: skipped, no --vllm-python")
        return {}
    settings = {
        "model": str(EMBEDDED[args.target]() if args.target in EMBEDDED else args.target), "dtype": args.dtype,
        "enforce_eager": True, "max_num_seqs": 1, "max_model_len": min(target.max_length, length + args.tokens + 64),
        "enable_prefix_caching": False, "disable_log_stats": False,
    }  # fmt: skip
    ngram = {"method": "ngram", "num_speculative_tokens": args.ngram, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    wanted: dict[str, dict[str, Any]] = {"vLLM, plain": {}, f"vLLM, ngram {args.ngram}": ngram}
    for name, drafter in drafters.items():
        try:
            save_drafter(drafter, folder / name.replace("/", "-"), "zlab")
        except InputError as error:
            print(f"vLLM, {name}: left out, {error}")
            continue
        wanted[f"vLLM, {name}"] = {
            "method": "dflash", "model": str(folder / name.replace("/", "-")),
            "num_speculative_tokens": drafter.config.num_proposals,
        }  # fmt: skip
    started = {}
    for name, speculative in wanted.items():
        print(f"starting {name}", file=sys.stderr)
        config = {**settings, "speculative_config": speculative} if speculative else settings
        try:
            started[name] = Vllm(args.vllm_python, config, args.threads, sorted(target.stop_ids), args.tokens)
        except InputError as error:
            print(f"{name}: does not start, {error}")
    return started


def fastest_lookup(target: Target, prompts: list[list[int]], tokens: int, settings: list[int]) -> dict[int, float]:
    """Tokens per second of each `prompt_lookup_num_tokens`, the fastest first."""
    speeds = {}
    for count in settings:
        run = of_transformers(target, tokens, prompt_lookup_num_tokens=count)
        run(prompts[0])
        began = time.perf_counter()
        total = sum(len(run(ids).tokens) for ids in prompts)
        speeds[count] = total / (time.perf_counter() - began)
    return dict(sorted(speeds.items(), key=lambda item: -item[1]))


def load(args: argparse.Namespace, target: Target) -> dict[str, Drafter]:
    """By the last parts of their paths, as many as tell them apart."""
    paths = [Path(path).parts for path in args.drafter]
    last = next((n for n in range(1, 9) if len({path[-n:] for path in paths}) == len(paths)), 0)
    return {
        "/".join(path[-last:]): (
            random_drafter(target, 3, 16) if path == ("random",) else decoding_drafter(Path(*path), target)
        )
        for path in paths
    }


# ---- the comparison --------------------------------------------------------------------------------------------------
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--drafter", action="append", default=[], help="a folder, a hub id, or `random`; repeatable")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--lookup", type=int, nargs="+", default=[2, 5, 10], help="prompt_lookup_num_tokens to try")
    parser.add_argument("--ngram", type=int, default=5, help="num_speculative_tokens of vLLM's ngram")
    parser.add_argument("--vllm-python", help="the Python of an environment with vLLM; without it vLLM is skipped")
    if HAS_COMPILE:
        parser.add_argument("--compile", action="store_true", help="ours also compiled")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    target = Target.load(args.target, args.dtype)
    assert target.tokenizer is not None
    if args.target == "lab":
        texts = [row["prompt"] for row in lab_prompts("eval", args.prompts)]
    else:
        texts = [prompt.turns[0] for prompt in load_prompts(SUITES["smollm2_demo"])[: args.prompts]]
    prompts = [render_prompt(target.tokenizer, [text]) for text in texts]
    drafters = load(args, target)

    plain = of_transformers(target, args.tokens)
    expected = [plain(ids).tokens for ids in prompts]
    with tempfile.TemporaryDirectory() as folder:
        vllm = vllm_methods(args, target, drafters, max(map(len, prompts)), Path(folder))
        print("everything is loaded", file=sys.stderr)
        lookup = fastest_lookup(target, prompts, args.tokens, args.lookup)
        best = next(iter(lookup))
        print("prompt_lookup_num_tokens: " + ", ".join(f"{n} {speed:.1f} tokens/s" for n, speed in lookup.items()))
        methods = {
            "transformers, plain": Method(plain, OURS),
            f"transformers, lookup {best}": Method(of_transformers(target, args.tokens, prompt_lookup_num_tokens=best)),
        }
        for name, drafter in drafters.items():
            like = f"ours, {name}" + (", carry off" if drafter.config.carry != "none" else "")
            if "sliding_attention" in (drafter.config.layer_types or ()):
                print(f"grow and crop, {name}: left out, it has sliding layers")
            else:
                methods[f"grow and crop, {name}"] = Method(of_loop(target, drafter, args.tokens), like)
            if engine := vllm.get(f"vLLM, {name}"):
                methods[f"vLLM, {name}"] = Method(engine, like)
        for name, engine in vllm.items():
            methods.setdefault(name, Method(engine, OURS if name == "vLLM, plain" else ""))
        methods |= our_methods(target, drafters, args.tokens, {})
        if HAS_COMPILE and args.compile:
            compiled = our_methods(target, drafters, args.tokens, {"compile": True})
            methods |= {f"{name}, compiled": method for name, method in compiled.items()}
        result = compare(methods, prompts, expected, args.repeats)
        for engine in vllm.values():
            engine.close()

    # a response that ends early or goes on differs where the shorter one ends
    for row in result.values():
        row["differences"] = []
        for i, found in row.pop("wrong").items():
            at = first_difference(expected[i], found)
            gap = None if at is None else logit_gap(target, prompts[i], expected[i], found, at)
            at = min(len(expected[i]), len(found)) if at is None else at
            row["differences"].append({"prompt": i, "token": at, "logit_gap": gap})
    print(table(result, len(prompts)))
    print(f"{args.target}, {args.dtype}, {torch.get_num_threads()} threads, {len(prompts)} prompts, {args.tokens} new "
          f"tokens, {args.repeats} repeats")  # fmt: skip
    told = {**vars(args), "lookup": lookup, "vllm": next((engine.version for engine in vllm.values()), None)}
    del told["vllm_python"]
    print(json.dumps({**told, "methods": result, "environment": environment(target)}))


def compare(
    methods: dict[str, Method], prompts: list[list[int]], expected: list[list[int]], repeats: int
) -> dict[str, Any]:
    """Runs all methods on all prompts in turns; the first of the passes warms up and is not counted."""
    speeds: dict[str, list[float]] = {name: [] for name in methods}
    wrong: dict[str, dict[int, list[int]]] = {name: {} for name in methods}
    emitted, verifications = dict.fromkeys(methods, 0), dict.fromkeys(methods, 0)
    names = list(methods)
    for repeat in range(repeats + 1):
        seconds, tokens = dict.fromkeys(methods, 0.0), dict.fromkeys(methods, 0)
        for i, ids in enumerate(prompts):
            begin = (i + repeat) % len(names)
            for name in names[begin:] + names[:begin]:
                began = time.perf_counter()
                answer = methods[name].run(ids)
                seconds[name] += time.perf_counter() - began if answer.seconds is None else answer.seconds
                tokens[name] += len(answer.tokens)
                emitted[name] += answer.emitted
                verifications[name] += answer.verifications
                if answer.tokens != expected[i]:
                    wrong[name].setdefault(i, answer.tokens)
        print(f"pass {repeat} of {repeats}", file=sys.stderr)
        for name in names if repeat else []:
            speeds[name].append(tokens[name] / seconds[name])
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    fastest = max((name for name in names if name.startswith("ours")), key=lambda name: medians[name])
    return {
        name: {
            "tokens_per_second": [min(speeds[name]), medians[name], max(speeds[name])],
            "like_for_like": methods[name].like or None,
            "ours_over_it": medians[methods[name].like] / medians[name] if methods[name].like else None,
            "fastest_of_ours_over_it": medians[fastest] / medians[name],
            "acceptance_length": emitted[name] / verifications[name] if verifications[name] else None,
            "wrong": wrong[name],
        }
        for name in names
    }


def table(result: dict[str, Any], prompts: int) -> str:
    lines = ["| method | tokens/s: min | median | max | ours, same work, over it | fastest of ours over it "
             "| acceptance length | tokens |", "|---" * 8 + "|"]  # fmt: skip
    for name, row in result.items():
        least, median, most = row["tokens_per_second"]
        same, accepted = (f"{x:.2f}" if x else "" for x in (row["ours_over_it"], row["acceptance_length"]))
        equal = "equal"
        if row["differences"]:
            first = row["differences"][0]
            gap = "one ends" if first["logit_gap"] is None else f"logit gap {first['logit_gap']:.1e}"
            equal = (f"{len(row['differences'])} of {prompts} differ; first prompt {first['prompt']} at token "
                     f"{first['token']}, {gap}")  # fmt: skip
        lines.append(f"| {name} | {least:.1f} | {median:.1f} | {most:.1f} | {same} "
                     f"| {row['fastest_of_ours_over_it']:.2f} | {accepted} | {equal} |")  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    main()
