"""How far a round is from what the machine could do: bytes and operations, the floor they imply, measured times.

    python benchmarks/roofline.py --target smollm2 --dtype bfloat16 --rounds 40

The floor of a forward is the longer of two times: reading its weights and cached keys and values once, at the memory
bandwidth measured here, and its matrix products, at the rate measured here for matrices of its shapes. Everything else
(norms, activations, launches, Python) is what the floor leaves out. The drafter is random: its speed does not depend on
its weights, and nearly every round carries all rows. Medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import prompt_ids, random_drafter
from torch import nn

from carryover.decode.engine import Engine, Request
from carryover.decode.trace import Generation
from carryover.evaluate.environment import environment
from carryover.precision import has_bf16_units
from carryover.target import Target
from carryover.weights import INPUT, PACKED_ALWAYS, PLAIN, Products


def median_seconds(call: Callable[[], Any], times: int = 9) -> float:
    call()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def bandwidth() -> float:
    """Bytes per second of reading memory, a buffer far larger than any cache."""
    buffer = torch.ones(512 * 2**20 // 4)
    return buffer.numel() * 4 / median_seconds(lambda: buffer.sum())


def matrix_seconds(shapes: list[tuple[int, int]], rows: int, dtype: torch.dtype) -> float:
    """Seconds of the products `[rows, i] x [i, o]`, each kind of shape timed alone on weights in cache, summed; the
    weights stored by output, by input or packed, whichever is quickest."""
    total = 0.0
    for shape in set(shapes):
        x, w = torch.randn(rows, shape[0], dtype=dtype), torch.randn(shape[1], shape[0], dtype=dtype)
        plans = (
            (PLAIN, (INPUT, INPUT, INPUT), PACKED_ALWAYS) if has_bf16_units() or dtype == torch.float32 else (PLAIN,)
        )
        products = [Products(w, None, plan) for plan in plans]
        total += shapes.count(shape) * min(median_seconds(lambda x=x, p=p: p(x), 15) for p in products)  # type: ignore[misc]
    return total


def shapes_of(module: nn.Module) -> list[tuple[int, int]]:
    return [(m.in_features, m.out_features) for m in module.modules() if isinstance(m, nn.Linear)]


def seconds_by_rows(target: Target, ids: list[int], rounds: int) -> dict[int, float]:
    """Medians of a verification of so many rows, in turns; 1 is plain decoding. The proposals are random."""
    engine, longest = Engine(target), len(ids) + 16 * 5 * rounds
    batch = engine.new_batch([Request(ids, longest)], 1)
    engine.join(batch, Request(ids, longest), Generation(len(ids)))
    found: dict[int, list[float]] = {rows: [] for rows in (1, 2, 4, 8, 16)}
    for _ in range(rounds):
        for rows, times in found.items():
            proposals = torch.randint(target.vocab_size, (1, rows - 1))
            began = time.perf_counter()
            engine.commit(batch, proposals)
            times.append(time.perf_counter() - began)
    return {rows: statistics.median(times[1:]) for rows, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--mask-token", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--draft-vocab", type=int, help="tokens that can be proposed; default: all")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    target = Target.load(args.target, args.dtype)
    drafter, ids = random_drafter(target, args.layers, args.mask_token, args.draft_vocab), prompt_ids(target)

    measured: dict[str, list[float]] = {"plain": [], "verification": [], "draft": [], "draft without carry": []}
    outside: list[float] = []
    plain, engine = (Engine(target, one, compile=args.compile) for one in (None, drafter))
    off = Engine(target, drafter, carry=False, compile=args.compile)
    batches = {}
    for one in (plain, engine, off):
        one.warm_up(Request(ids, 4), len(ids) + 17 * args.rounds)
    for name, one in (("plain", plain), ("carry", engine)):
        request = Request(ids, 17 * args.rounds)
        batches[name] = one.new_batch([request], 1)
        one.join(batches[name], request, Generation(len(ids)))
    head, forward, inside = target.head, target.forward, [0.0]
    for i in range(args.rounds):
        measured["plain"].append(plain.round(batches["plain"])[0].verify_seconds)
        batch = batches["carry"]
        carried = batch.requests[0].carried
        for name in ("draft", "draft without carry") if i % 2 else ("draft without carry", "draft"):
            batch.requests[0].carried = carried if name == "draft" else 0
            began = time.perf_counter()
            (engine if name == "draft" else off).draft(batch)  # leaves no trace
            measured[name].append(time.perf_counter() - began)
        batch.requests[0].carried = carried
        began = time.perf_counter()
        round_ = engine.round(batch)[0]
        whole = time.perf_counter() - began
        measured["verification"].append(round_.verify_seconds)
        # Again, watching the parts that are forwards of a model: what is left is bookkeeping.
        inside[0] = 0.0

        def timed(call: Callable[..., Any]) -> Callable[..., Any]:
            def watched(*a: Any, **k: Any) -> Any:
                start = time.perf_counter()
                out = call(*a, **k)
                inside[0] += time.perf_counter() - start
                return out

            return watched

        target.forward, target.head = timed(forward), timed(head)  # type: ignore[method-assign]
        # A clock cannot be compiled, so a compiled draft is watched from outside.
        owner: Any = engine if args.compile else drafter
        models = ("_draft_block",) if args.compile else ("block", "key_values", "carried", "context")
        originals = {name: getattr(owner, name) for name in models}
        for name in models:
            setattr(owner, name, timed(originals[name]))
        began = time.perf_counter()
        engine.round(batch)
        whole = time.perf_counter() - began
        outside.append(1 - inside[0] / whole)
        target.forward, target.head = forward, head  # type: ignore[method-assign]
        for name in models:
            setattr(owner, name, originals[name])

    size = torch.finfo(target.dtype).bits // 8
    vocabulary = [(target.hidden_size, target.vocab_size)]
    proposed = [(target.hidden_size, args.draft_vocab or target.vocab_size)]
    rows = len(ids) + 8 * args.rounds  # cached, in the middle of the measurement
    config = target.config
    per_row = (
        2 * config.num_key_value_heads * getattr(config, "head_dim", target.hidden_size // config.num_attention_heads)
    )
    decoder, draft = shapes_of(target.decoder), [s for layer in drafter.layers for s in shapes_of(layer)]
    fusion, p = shapes_of(drafter.fc), drafter.config.num_proposals
    speed = bandwidth()
    parts = {
        "plain": (decoder + vocabulary, 1, rows * per_row * target.num_layers),
        "verification": (decoder + vocabulary, p + 1, rows * per_row * target.num_layers),
        "draft": (draft + fusion + proposed, p + 1, rows * per_row * args.layers),
    }
    table: dict[str, dict[str, float]] = {}
    for name, (shapes, width, cached) in parts.items():
        weights = sum(i * o for i, o in shapes)
        floors = (size * (weights + cached)) / speed, matrix_seconds(shapes, width, target.dtype)
        time_ = statistics.median(measured[name])
        table[name] = {
            "MB": size * (weights + cached) / 1e6, "GFLOP": 2 * weights * width / 1e9, "memory_ms": 1e3 * floors[0],
            "matrix_ms": 1e3 * floors[1], "measured_ms": 1e3 * time_, "over_floor": time_ / max(floors),
        }  # fmt: skip
    print(f"bandwidth {speed / 1e9:.1f} GB/s, {target.dtype}, {torch.get_num_threads()} threads")
    print(
        "| part | MB | GFLOP | memory floor, ms | matrix floor, ms | measured, ms | over the floor |\n"
        + "|---" * 7
        + "|"
    )
    for name, x in table.items():
        print(f"| {name} | {x['MB']:.0f} | {x['GFLOP']:.2f} | {x['memory_ms']:.1f} | {x['matrix_ms']:.1f} "
              f"| {x['measured_ms']:.1f} | {x['over_floor']:.2f} |")  # fmt: skip
    draft_, verify = table["draft"]["measured_ms"], table["verification"]["measured_ms"]
    without = 1e3 * statistics.median(measured["draft without carry"])
    shares = {
        "draft share of a round": draft_ / (draft_ + verify),
        "carry's share of a round": (draft_ - without) / (draft_ + verify),
        "outside model forwards": statistics.median(outside),
    }
    for name, share in shares.items():
        print(f"{name}: {share:.1%}")
    by_rows = seconds_by_rows(target, ids, max(4, args.rounds // 2)) if not args.compile else {}
    for rows, spent in by_rows.items():
        print(f"verification of {rows} rows: {1e3 * spent:.1f} ms, {spent / by_rows[1]:.2f} plain tokens")
    record = {"parts": table, "shares": shares, "by_rows": by_rows, "environment": environment(target)}
    print(json.dumps(record))


if __name__ == "__main__":
    main()
