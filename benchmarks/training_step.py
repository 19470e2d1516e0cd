"""Where the time of a training step goes, and what the optimiser costs against torch's own Muon.

    python benchmarks/training_step.py recipes/smollm2-math.yaml --steps 3
    python benchmarks/training_step.py recipes/lab.yaml --cell markov-b16-s0 --steps 40

One process, one thread unless OMP_NUM_THREADS says more. Every stage of the recipe takes a few steps, once with this
project's Muon and once with `torch.optim.Muon`; medians over steps, the first of which is left out. A small corpus is
recorded beforehand unless `--corpus` names one: speed depends on the lengths of its responses, not on what they say.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from carryover.config import Recipe
from carryover.data.prompts import load_prompts
from carryover.data.record import record
from carryover.decode.sampling import Sampling
from carryover.evaluate.environment import environment
from carryover.lab import lab_prompts
from carryover.target import Target
from carryover.train import optimizer, trainer, transition

STAGES = ("baseline", "continued", "carryover")
seconds: dict[str, float] = defaultdict(float)


def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, its time added to a part."""

    def watched(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            seconds[name] += time.perf_counter() - began

    return watched


class TorchMuon(torch.optim.Muon):
    """What this project used before."""

    def __init__(self, matrices: Any, lr: float, weight_decay: float) -> None:
        super().__init__(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")


def watch() -> None:
    """Puts clocks around the parts of a step."""
    t: Any = trainer
    t.read_prefix = timed("target reads the text", trainer.read_prefix)
    t.transition = timed("first draft and verification", trainer.transition)
    t.draft = timed("draft with a loss", trainer.draft)
    t.second_draft = timed("draft with a loss", trainer.second_draft)
    t.block_loss = timed("loss", trainer.block_loss)
    transition.verify = timed("of which the target verifies", transition.verify)
    made: Any = trainer.MuonAdamW
    made.step = timed("optimiser", made.step)


class Clock(trainer.TrainerCallback):
    """Seconds of every step and of its parts."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        seconds.clear()
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append({"step": time.perf_counter() - self.began, **seconds})


def measure(
    recipe: Recipe, stage: Any, corpus: Path, start: Path | None, target: Target, out: Path
) -> dict[str, float]:
    clock = Clock()
    made = trainer.DrafterTrainer

    class Watched(made):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.add_callback(clock)

    setattr(trainer, "DrafterTrainer", Watched)  # noqa: B010
    try:
        trainer.train(recipe, stage, out, start=start, corpus=corpus, target=target, progress=False)
    finally:
        setattr(trainer, "DrafterTrainer", made)  # noqa: B010
    rest = clock.steps[1:]
    found = {name: statistics.median(step.get(name, 0.0) for step in rest) for name in sorted(set().union(*rest))}
    known = ("target reads the text", "first draft and verification", "draft with a loss", "loss", "optimiser")
    return {**found, "backward and the rest": found["step"] - sum(found.get(name, 0.0) for name in known)}


def small_corpus(target: Target, recipe: Recipe, folder: Path) -> Path:
    path, lab = folder / "recorded.jsonl", target.name == "lab"
    prompts = recipe.record.prompts
    if lab:
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lab_prompts("train", 200)))
        prompts = (str(folder / "prompts.jsonl"),)
    asked = load_prompts(prompts, recipe.record.tasks, 200 if lab else 24)
    record(target, asked, path, Sampling(recipe.record.temperature), 128 if lab else 160, batch_size=48, progress=False)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--cell", help="of a grid, with its seed: CELL-sSEED")
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--stage", action="append", choices=STAGES)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    overrides = [*args.overrides, *(f"train.{stage}.steps={args.steps + 1}" for stage in STAGES)]
    overrides += [f"train.{stage}.eval_steps=0" for stage in STAGES]
    recipe = Recipe.load_grid(args.recipe, overrides)[args.cell or ""]
    target = Target.load(recipe.target, recipe.target_dtype)
    watch()
    ours = optimizer.Muon
    table: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = args.corpus or small_corpus(target, recipe, folder)
        start = trainer.train(recipe, "baseline", folder / "start", corpus=corpus, target=target, progress=False)
        for stage in args.stage or STAGES:
            for which, kind in (("ours", ours), ("torch", TorchMuon)):
                setattr(optimizer, "Muon", kind)  # noqa: B010
                out, begin = folder / f"{stage}-{which}", None if stage == "baseline" else start
                table[stage][which] = measure(recipe, stage, corpus, begin, target, out)
            both = table[stage]
            times, torchs = both["ours"]["step"], both["torch"]["step"]
            print(f"\n{stage}: {times:.3f} s a step, {torchs:.3f} with torch.optim.Muon ({torchs / times:.2f} times)")
            print("| part | seconds | share |\n|---|---|---|")
            for part, spent in both["ours"].items():
                if part != "step":
                    print(f"| {part} | {spent:.3f} | {spent / both['ours']['step']:.0%} |")
            print(f"| optimiser, torch.optim.Muon | {both['torch']['optimiser']:.3f} | |", flush=True)
    print(json.dumps({"recipe": args.recipe, "stages": table, "environment": environment(target)}))


if __name__ == "__main__":
    main()
