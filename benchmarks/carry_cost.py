"""What carry costs a draft: the same drafter at the same states, with its carry rows and without, in turns.

    python benchmarks/carry_cost.py --target smollm2 --layers 3 --rounds 60

The drafter is random (its speed does not depend on its weights), so nearly every round carries all P rows, the worst
case. Prints the median seconds of a draft with and without carry and of a verification, and the draft's share of a
round.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from common import prompt_ids, random_drafter

from carryover.decode.engine import Engine, Request
from carryover.decode.trace import Generation
from carryover.target import Target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--mask-token", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    target = Target.load(args.target, args.dtype)
    drafter, ids = random_drafter(target, args.layers, args.mask_token), prompt_ids(target)
    engine = Engine(target, drafter)
    off = Engine(target, drafter, carry=False)
    prompt = Request(ids, 16 * args.rounds)
    batch = engine.new_batch([prompt], 1)
    engine.join(batch, prompt, Generation(len(ids)))
    seconds: dict[str, list[float]] = {"with carry": [], "without": [], "verify": []}
    engine.round(batch)
    request = batch.requests[0]
    for i in range(args.rounds):
        carried = request.carried
        for name in ("with carry", "without") if i % 2 else ("without", "with carry"):
            request.carried = carried if name == "with carry" else 0
            began = time.perf_counter()
            (engine if name == "with carry" else off).draft(batch)  # drafting leaves no trace
            seconds[name].append(time.perf_counter() - began)
        request.carried = carried
        seconds["verify"].append(engine.round(batch)[0].verify_seconds)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in median.items():
        print(f"{name:11s} {1000 * value:7.2f} ms")
    shares = {name: median[name] / (median[name] + median["verify"]) for name in ("with carry", "without")}
    print(f"draft share of a round: {shares['with carry']:.3f} with carry, {shares['without']:.3f} without; ratio "
          f"{shares['with carry'] / shares['without']:.3f}; threads {torch.get_num_threads()}")  # fmt: skip


if __name__ == "__main__":
    main()
