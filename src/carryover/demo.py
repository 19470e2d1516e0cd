"""`carryover demo`: the whole story in one sitting on a CPU, on the two embedded targets.

As it is, it decodes: plainly, with the packaged drafters, and with carry switched off, on the lab target and on
SmolLM2, a real language model; that takes three minutes. With `--train` it first makes drafters of the lab target, to
show every step: record its responses, train a baseline, train it on with and without carry for equally many steps.

Every step is resumable and the amount of work is counted in steps, never in time, so that a run can be repeated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from .config import Recipe
from .data.prompts import SUITES, Prompt, load_prompts
from .data.record import record
from .decode.sampling import Sampling
from .errors import InputError
from .evaluate.run import Plan, evaluate
from .files import write_text
from .formats import decoding_drafter
from .lab import write_prompts
from .report import cautions, write_report
from .report.tables import gains_table, terminal_table, to_rich
from .run import announced, stage
from .target import Target


@dataclass(frozen=True)
class DemoPlan:
    """How much of everything. The defaults take three minutes on two cores, with training ten."""

    train: bool = False  # a drafter of the lab target, before decoding
    seed: int = 0
    train_prompts: int = 1600
    eval_prompts: int = 64
    new_tokens: int = 128  # longest response of the lab target
    baseline_steps: int = 1500
    extra_steps: int = 500  # of `continued` and of `carryover`, each
    smollm2_prompts: int = 12  # of the packaged 24
    smollm2_tokens: int = 64


FAST = DemoPlan(train_prompts=16, eval_prompts=2, new_tokens=16, baseline_steps=2, extra_steps=1, smollm2_prompts=0)
LAB = (
    "lab-markov-start",
    "lab-markov-continued",
    "lab-markov-carryover",
)  # packaged drafters, in the order of comparison
SMOLLM2 = ("smollm2-markov-continued", "smollm2-markov-carryover")


def run_demo(out: Path, plan: DemoPlan = DemoPlan(), console: Console | None = None) -> Path:
    """Runs what `out` does not hold yet and returns the path of the report page.

    Without SmolLM2 prompts in the plan that part is left out. Raises InputError when `out` belongs to another plan.
    """
    console, began = console or Console(), time.monotonic()
    claim(out, plan)
    target = Target.load("lab", dtype="float32")
    train_file, eval_file = write_prompts(out / "prompts", plan.train_prompts, plan.eval_prompts, plan.seed)
    drafters = train_lab_drafters(out, plan, target, train_file, console) if plan.train else LAB
    every = Plan(plan.new_tokens, seed=plan.seed, carry_off=True)
    with announced(console, f"The lab target answers {plan.eval_prompts} prompts: plainly and with each drafter"):
        shown = [decode(target, drafters, load_prompts(eval_file), out / "lab", every)]
    if plan.smollm2_prompts:
        smollm2 = Target.load("smollm2", dtype="float32")
        prompts = load_prompts(SUITES["smollm2_demo"], limit=plan.smollm2_prompts, seed=plan.seed)
        every = replace(every, max_new_tokens=plan.smollm2_tokens, stop_loops=True)
        with announced(console, f"SmolLM2-135M answers {len(prompts)} prompts in the same ways"):
            shown.append(decode(smollm2, SMOLLM2, prompts, out / "smollm2", every))
        show_texts(console, smollm2, prompts, out / "smollm2")
    page = write_report(out, "Carryover demo")
    for results in shown:
        console.print(terminal_table(results), to_rich(gains_table(results, overall_only=True)))
        for caution in cautions(results):
            console.print(f"note: {caution}", markup=False, highlight=False)
    console.print(f"{(time.monotonic() - began) / 60:.1f} minutes. The report: {page}", highlight=False)
    return page


def train_lab_drafters(
    out: Path, plan: DemoPlan, target: Target, train_file: Path, console: Console
) -> tuple[Path, Path, Path]:
    """Records, trains a baseline, its control and its Carryover; returns the three drafters."""
    recorded = out / "recorded.jsonl"
    with announced(console, f"1. The lab target answers {plan.train_prompts} prompts"):
        record(target, load_prompts(train_file), recorded, Sampling(0.7), plan.new_tokens, plan.seed, batch_size=64)
    recipe = lab_recipe(plan, target.num_layers)
    with announced(console, f"2. Baseline: a DFlash drafter from scratch, {plan.baseline_steps} steps"):
        baseline = stage(recipe, "baseline", out / "baseline", target, recorded)
    with announced(console, f"3. Control: the same drafter, {plan.extra_steps} steps more, without carry"):
        continued = stage(recipe, "continued", out / "continued", target, recorded, baseline)
    with announced(console, f"4. Carryover: the same drafter, {plan.extra_steps} steps more, on its rejected states"):
        carryover = stage(recipe, "carryover", out / "carryover", target, recorded, baseline)
    return baseline, continued, carryover


def decode(
    target: Target, drafters: Sequence[str | Path], prompts: Sequence[Prompt], out: Path, plan: Plan
) -> dict[str, Any]:
    return evaluate(target, {str(path): decoding_drafter(path, target) for path in drafters}, prompts, out, plan)


def claim(out: Path, plan: DemoPlan) -> None:
    """Marks `out` as the folder of this plan. Raises InputError when it is another's."""
    path, text = out / "plan.json", json.dumps(asdict(plan), indent=1)
    if path.exists() and path.read_text() != text:
        raise InputError(f"{out} holds a demo with other amounts; name another --out, or delete it.")
    out.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def lab_recipe(plan: DemoPlan, target_layers: int) -> Recipe:
    """DFlash with two layers and 15 proposals, on the last three layers that can be captured. Recipes for real
    targets are in the folder `recipes`."""
    captured = list(range(target_layers - 4, target_layers - 1))
    return Recipe.model_validate({
        "target": "lab",
        "target_dtype": "float32",
        "seed": plan.seed,
        "drafter": {"algorithm": "dflash", "layers": 2, "block_size": 16, "target_layer_ids": captured},
        "data": {"corpus": "recorded.jsonl", "max_length": 192, "sequence_length": 192},
        # Many small steps of Muon: a drafter has to become useful within minutes of a CPU.
        "train": {
            "optimizer": "muon",
            "learning_rate": 1e-2,
            "schedule": "linear",
            "batch_size": 2,
            "anchors": 8,
            "logging_steps": 20,
            "save_steps": 250,
            "baseline": {"steps": plan.baseline_steps},
            "carryover": {"steps": plan.extra_steps},
        },
    })  # fmt: skip


def show_texts(console: Console, target: Target, prompts: Sequence[Prompt], out: Path) -> None:
    """What the target wrote, once for each method where the texts differ."""
    assert target.tokenizer is not None
    texts: dict[str, dict[str, str]] = {}
    for line in (out / "trace.jsonl").read_text().splitlines():
        r = json.loads(line)
        texts.setdefault(r["prompt"], {})[r["method"]] = str(target.tokenizer.decode(r["generation"]["tokens"]))
    for prompt in prompts:
        for method, text in _distinct(texts.get(prompt.id, {})).items():
            console.print(f"[bold]{method}[/bold]", f"> {_one_line(prompt)}\n{text}\n", sep="\n", highlight=False)


def _distinct(by_method: dict[str, str]) -> dict[str, str]:
    """The texts, methods that wrote the same joined."""
    methods: dict[str, list[str]] = {}
    for method, text in by_method.items():
        methods.setdefault(text, []).append(method)
    return {" = ".join(names): text for text, names in methods.items()}


def _one_line(prompt: Prompt) -> str:
    text = " ".join(prompt.turns[0].split())
    return text if len(text) <= 100 else text[:99] + "…"
