"""One self-contained HTML page from the results and training logs of a run folder.

The page says what was measured and what the controls were, not only the figures; everything it shows comes out of
`results.json` and `train_log.jsonl`, which stay the record.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from ..errors import InputError
from ..evaluate.results import read_results
from ..files import write_text
from . import figures, tables

FEW_PROMPTS = 20
PAGE = "report.html"


def write_report(run: Path, title: str = "", out: Path | None = None) -> Path:
    """Writes `report.html` about every results.json and train_log.jsonl in or below `run`; returns its path.

    Raises InputError when there are no results, or they are not ones this project wrote.
    """
    if not run.is_dir():
        raise InputError(f"there is no folder {run}.")
    found = sorted(run.rglob("results.json"), key=lambda path: (len(path.parts), path))
    if not found:
        raise InputError(f"{run} holds no results.json; run `carryover evaluate --out {run} ...` first.")
    evaluations = []
    for path in found:
        try:
            evaluations.append(evaluation(path, run))
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{path} lacks {error} or has it in another form; it is damaged, or of another version: evaluate again."
            ) from error
    diagnosed = [diagnosis(path, run) for path in sorted(run.rglob("diagnostics.json"))]
    logs = {
        str(path.parent.relative_to(run)): read_log(path) for path in sorted(run.rglob("train_log.jsonl"), key=_age)
    }
    logs = {name: log for name, log in logs.items() if any("cross_entropy" in record for record in log)}
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    )
    page = template.render(
        title=title or f"Carryover report: {evaluations[0]['results']['target']}",
        evaluations=evaluations,
        diagnoses=diagnosed,
        training=figures.data_uri(figures.training(logs)) if logs else None,
    )
    out = out or run / PAGE
    write_text(out, page)
    return out


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a training log; a last line torn by a kill is left out."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if isinstance(record, dict):
            records.append(record)
    return records


def _age(path: Path) -> float:
    return path.stat().st_mtime


def evaluation(path: Path, run: Path) -> dict[str, Any]:
    """One section of the page: tables, plots, what to know about them."""
    results = read_results(path)
    runs = results["runs"]
    plots = {"time": figures.time_per_token(runs)}
    if figures.drafted(runs):
        plots |= {"position": figures.acceptance_by_position(runs), "task": figures.acceptance_by_task(runs)}
    return {
        "name": "" if path.parent == run else str(path.parent.relative_to(run)),
        "results": results,
        "measured": measured(results),
        "controls": controls(results),
        "cautions": cautions(results),
        "table": tables.results_table(results),
        "tasks": tables.task_table(results),
        "gains": tables.gains_table(results),
        "plots": {name: figures.data_uri(figure) for name, figure in plots.items()},
    }


def diagnosis(path: Path, run: Path) -> dict[str, Any]:
    """A section about a diagnostics.json. Raises InputError when it is not one."""
    try:
        d = json.loads(path.read_text(encoding="utf-8"))
        return {
            "name": "" if path.parent == run else str(path.parent.relative_to(run)),
            "d": d,
            "tables": tables.diagnostics_tables(d),
            "recall": figures.data_uri(figures.recall_by_position(d)),
            "attention": figures.data_uri(figures.attention_mass(d)),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(f"{path} is not a file of this `carryover diagnose`; run it again.") from error


# ---- in words ------------------------------------------------------------------------------------------------------
def measured(results: Mapping[str, Any]) -> str:
    """What was measured, how, and on what, in a few sentences."""
    env, plain = results["environment"], results["runs"][0]["overall"]
    temperature = results["temperature"]
    decoding = "greedy decoding" if temperature == 0 else f"sampling at temperature {temperature:g}"
    if temperature:
        drafts = results.get("draft_sampling", "greedy")
        decoding += f", lossless verification of {'sampled' if drafts == 'probabilistic' else 'greedy'} drafts"
    size = results.get("batch_size", 1)
    together = "batch of one" if size == 1 else f"{size} requests at a time, so that speeds are throughput"
    return (
        f"{plain['prompts']} prompts, at most {results['max_new_tokens']} new tokens each, {decoding}, seed "
        f"{results['seed']}, {together}, {env.get('dtype')} on {env.get('device')} ({env.get('cpu')}, "
        f"{env.get('threads')} threads). The methods took turns in one process. Acceptance length is "
        f"tokens emitted per target verification, bonus token included, the first token of a response not counted, "
        f"pooled over rounds. Speed is all tokens over all seconds, prefill included. Intervals are 95 % percentile "
        f"intervals of 2,000 bootstrap resamples of prompts; gains are paired over prompts."
    )


def controls(results: Mapping[str, Any]) -> str:
    """What the comparisons between drafters can and cannot say."""
    drafted = figures.drafted(results["runs"])
    if not any(run["carry"] for run in drafted):
        return "No run carries rejected states."
    without = [run["name"] for run in drafted if not run["carry"]]
    if not without:
        return "There is no drafter without carry among the runs, so this page says nothing about the gain of carry."
    return (
        f"Runs without carry: {', '.join(without)}. A gain over the checkpoint that Carryover training started from is "
        f"partly the effect of training longer; the control for that is the same checkpoint trained for the same extra "
        f"steps without carry. A run with carry off shows what the carry rows themselves do at inference."
    )


def cautions(results: Mapping[str, Any]) -> list[str]:
    """What weakens these figures; empty when nothing is known to."""
    env, runs, found = results["environment"], results["runs"], []
    prompts = runs[0]["overall"]["prompts"]
    exact = str(env.get("dtype", "")).endswith("float32")
    rounding = "" if exact else " Blocks and single tokens round differently; `--dtype float32` compares exactly."
    if prompts < FEW_PROMPTS:
        found.append(f"Only {prompts} prompts: the intervals are rough.")
    for run in runs:
        if run["overall"]["divergent"]:
            found.append(
                f"{run['name']}: {run['overall']['divergent']} of {prompts} outputs differ from plain decoding."
                + rounding
                + near_ties(results, run["name"])
            )
    looping = runs[0]["overall"].get("looping", 0)
    if looping > 0.05 * prompts:
        cut = ", and end there" if results.get("stop_loops") else "; loops are easy to draft and flatter every drafter"
        found.append(f"{looping} of {prompts} plain responses loop{cut}.")
    if env.get("sessions", 1) > 1:
        found.append(f"Timed in {env['sessions']} sessions, because the evaluation was interrupted.")
    load, cores = env.get("load_average"), env.get("cores")
    if load is not None and cores and load > max(1.0, cores / 2) and not math.isnan(load):
        found.append(f"The machine was busy at the start (load average {load:.1f} on {cores} cores).")
    if env.get("skipped_prompts"):
        found.append(f"{len(env['skipped_prompts'])} prompts did not fit into the target's context and were left out.")
    if env.get("cut_prompts"):
        found.append(f"Of {len(env['cut_prompts'])} prompts a later turn did not fit into the target's context.")
    return found


def near_ties(results: Mapping[str, Any], run: str) -> str:
    """How close the target's two candidates were where outputs part."""
    gaps = [d["logit_gap"] for d in results.get("divergences", []) if d["run"] == run]
    return f" Where they part, the target's logits of the two tokens are at most {max(gaps):.3g} apart." if gaps else ""
