"""Tokens per second of batched decoding against one request at a time: same prompts, same process, in turns.

    python benchmarks/batch_throughput.py --target smollm2 --dtype bfloat16 --sizes 1 4 16 [--drafter DIR]

Prints medians over the repeats, the ratio to the first size, and whether every size gave the same tokens (in float32 it
has to; in bfloat16 near ties may fall the other way).
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from carryover.data.chat import render_prompt
from carryover.data.prompts import SUITES, load_prompts
from carryover.decode.engine import Engine, Request
from carryover.formats import decoding_drafter
from carryover.lab import lab_prompts
from carryover.target import Target


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--drafter")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    target = Target.load(args.target, args.dtype)
    assert target.tokenizer is not None
    if args.target == "lab":
        texts = [row["prompt"] for row in lab_prompts("eval", args.prompts)]
    else:
        texts = [prompt.turns[0] for prompt in load_prompts(SUITES["smollm2_demo"])][: args.prompts]
    requests = [Request(render_prompt(target.tokenizer, [text]), args.tokens, i) for i, text in enumerate(texts)]
    drafter = decoding_drafter(args.drafter, target) if args.drafter else None
    engine = Engine(target, drafter, timed=False)
    speeds: dict[int, list[float]] = {size: [] for size in args.sizes}
    outputs = {}
    for repeat in range(args.repeats + 1):  # the first one warms up
        for size in args.sizes:
            began = time.perf_counter()
            outputs[size] = {i: g.tokens for i, g in engine.generate_many(requests, size)}
            if repeat:
                tokens = sum(map(len, outputs[size].values()))
                speeds[size].append(tokens / (time.perf_counter() - began))
    first = statistics.median(speeds[args.sizes[0]])
    for size, found in speeds.items():
        median = statistics.median(found)
        same = sum(outputs[size][i] == outputs[args.sizes[0]][i] for i in outputs[size])
        print(f"batch {size:3d}: {min(found):8.1f} {median:8.1f} {max(found):8.1f} tokens/s, x {median / first:.2f}, "
              f"{same} of {len(requests)} outputs the same")  # fmt: skip
    print(f"{args.target}, {args.dtype}, {torch.get_num_threads()} threads, drafter: {args.drafter or 'none'}")


if __name__ == "__main__":
    main()
