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

from carryover.config import Recipe, drafter_config
from carryover.data.chat import render_prompt
from carryover.data.prompts import SUITES, load_prompts
from carryover.decode.engine import Engine, Request
from carryover.decode.trace import Generation
from carryover.drafter.modeling import Drafter
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
    recipe = Recipe.model_validate({
        "target": args.target, "data": {"corpus": "unused"},
        "train": {"baseline": {"steps": 1}, "carryover": {"steps": 1}},
        "drafter": {"algorithm": "dflash", "layers": args.layers, "block_size": 16, "mask_token_id": args.mask_token},
    })  # fmt: skip
    torch.manual_seed(0)
    drafter = Drafter(drafter_config(recipe, target)).to(target.dtype).eval()
    assert target.tokenizer is not None
    ids = render_prompt(target.tokenizer, load_prompts(SUITES["smollm2_demo"])[0].turns[:1])
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
