"""Plain decoding against `model.generate` of transformers: same target, same prompts, same process, in turns.

    python benchmarks/plain_decoding.py --target smollm2 --tokens 64 --repeats 5

Prints tokens per second (minimum, median, maximum over repeats) of both, the ratio of the medians, and whether the
tokens are equal. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from carryover.data.chat import render_prompt
from carryover.data.prompts import SUITES, load_prompts
from carryover.decode.engine import Engine
from carryover.target import Target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    target = Target.load(args.target, args.dtype)
    assert target.tokenizer is not None
    chosen = load_prompts(SUITES["smollm2_demo"])[: args.prompts]
    prompts = [render_prompt(target.tokenizer, prompt.turns[:1]) for prompt in chosen]
    engine = Engine(target)

    def ours(ids: list[int]) -> list[int]:
        return engine.generate(ids, args.tokens).tokens

    def transformers(ids: list[int]) -> list[int]:
        out = target.model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
            max_new_tokens=args.tokens, pad_token_id=0,
        )  # fmt: skip
        return out[0, len(ids) :].tolist()

    methods = {"ours": ours, "transformers": transformers}
    speeds: dict[str, list[float]] = {name: [] for name in methods}
    equal = True
    for repeat in range(args.repeats + 1):  # the first one warms up
        seconds, tokens = dict.fromkeys(methods, 0.0), dict.fromkeys(methods, 0)
        for ids in prompts:
            outputs = {}
            for name, run in methods.items():
                began = time.perf_counter()
                outputs[name] = run(ids)
                seconds[name] += time.perf_counter() - began
                tokens[name] += len(outputs[name])
            equal = equal and outputs["ours"] == outputs["transformers"]
        for name in methods:
            if repeat:
                speeds[name].append(tokens[name] / seconds[name])
    for name, values in speeds.items():
        print(f"{name:13s} {min(values):7.2f} {statistics.median(values):7.2f} {max(values):7.2f} tokens/s")
    ratio = statistics.median(speeds["ours"]) / statistics.median(speeds["transformers"])
    print(f"ratio {ratio:.3f}, tokens {'equal' if equal else 'DIFFERENT'}, threads {torch.get_num_threads()}")


if __name__ == "__main__":
    main()
