"""The plots of a report, drawn from RUNs of a results file and from training logs."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's colours, which stay apart for colour-blind readers.
COLOURS = ("#0072B2", "#E69F00", "#CC79A7", "#D55E00", "#009E73", "#56B4E9", "#000000")
PARTS = {"draft": "#D55E00", "verify": "#0072B2", "prefill": "#56B4E9", "rest": "#BBBBBB"}
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: small files, searchable pages
    "text.parse_math": False,  # a $ in a name is a dollar
    "svg.hashsalt": "carryover",  # the same data give the same file
}
Log = Sequence[Mapping[str, Any]]  # records of train_log.jsonl


def drafted(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [run for run in runs if run["drafter"] is not None]


def look(run: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One colour per drafter; with carry a solid line and filled marks, without a dashed line and hollow marks."""
    drafters = list(dict.fromkeys(r["drafter"] for r in drafted(runs)))
    colour = COLOURS[drafters.index(run["drafter"]) % len(COLOURS)]
    line, fill = ("-", colour) if run["carry"] else ("--", "white")
    return {"color": colour, "label": run["name"], "linestyle": line, "markerfacecolor": fill}


@rc_context(STYLE)
def acceptance_by_position(runs: Sequence[Mapping[str, Any]]) -> Figure:
    """Share of rounds that accepted each position, one line per drafter run."""
    figure, axes = canvas(6.2, 3.4)
    for run in drafted(runs):
        accepted = run["overall"]["acceptance_by_position"]
        axes.plot(range(1, len(accepted) + 1), accepted, marker="o", markersize=3.5, **look(run, runs))
    axes.set(xlabel="position in the block", ylabel="share of rounds that accepted it", ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    return figure


@rc_context(STYLE)
def acceptance_by_task(runs: Sequence[Mapping[str, Any]]) -> Figure:
    """Acceptance length with its 95 % interval, by task and overall, one mark per drafter run."""
    runs = drafted(runs)
    tasks = [*runs[0]["tasks"], "overall"]
    figure, axes = canvas(6.2, 1.0 + len(tasks) * max(0.34, 0.13 * len(runs)))
    for i, run in enumerate(runs):
        found = [(t, run["tasks"].get(task, run["overall"])) for t, task in enumerate(tasks)]
        found = [(t, stats) for t, stats in found if stats["acceptance_length"] is not None]
        places = [t + (i - (len(runs) - 1) / 2) * 0.7 / len(runs) for t, _ in found]
        middle = [stats["acceptance_length"] for _, stats in found]
        below = [stats["acceptance_length"] - stats["acceptance_length_ci95"][0] for _, stats in found]
        above = [stats["acceptance_length_ci95"][1] - stats["acceptance_length"] for _, stats in found]
        style = {**look(run, runs), "linestyle": "none"}
        axes.errorbar(middle, places, xerr=[below, above], marker="o", markersize=4.5, **style)
    axes.set(yticks=range(len(tasks)), yticklabels=tasks, xlabel="acceptance length (tokens per verification)")
    axes.invert_yaxis()
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return figure


@rc_context(STYLE)
def time_per_token(runs: Sequence[Mapping[str, Any]]) -> Figure:
    """Milliseconds per token of every run, split into drafting, verifying, prefill and the rest."""
    runs = [run for run in runs if run["overall"]["tokens_per_second"]]
    figure, axes = canvas(6.2, 1.1 + 0.4 * len(runs))
    left = [0.0] * len(runs)
    for part, shade in PARTS.items():
        widths = [1000 / run["overall"]["tokens_per_second"] * shares(run["overall"])[part] for run in runs]
        axes.barh([run["name"] for run in runs], widths, left=left, color=shade, label=part, height=0.6)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(xlabel="milliseconds per token")
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    return figure


def shares(stats: Mapping[str, Any]) -> dict[str, float]:
    """Where the time of a run went, adding up to 1."""
    found = {part: stats[f"{part}_share"] or 0.0 for part in ("draft", "verify", "prefill")}
    return {**found, "rest": max(0.0, 1 - sum(found.values()))}


@rc_context(STYLE)
def training(logs: Mapping[str, Log]) -> Figure:
    """Cross-entropy, and acceptance against the recorded text, over the steps of each training stage."""
    figure, (loss, acceptance) = canvas(7.6, 3.0, columns=2)
    for i, (name, log) in enumerate(logs.items()):
        for axes, key in ((loss, "cross_entropy"), (acceptance, "acceptance")):
            points = {record["step"]: record[key] for record in log if key in record}  # resumed steps: the last one
            axes.plot(list(points), list(points.values()), color=COLOURS[i % len(COLOURS)], label=name, linewidth=1)
    loss.set(xlabel="optimizer step", ylabel="cross-entropy (nats)")
    acceptance.set(xlabel="optimizer step", ylabel="training acceptance (tokens)")
    loss.legend()
    return figure


@rc_context(STYLE)
def recall_by_position(d: Mapping[str, Any]) -> Figure:
    """Matched-anchor recall at 1 and 16 of diagnostics.json, by position, with carry, without, and of the baseline."""
    figure, panels = canvas(7.6, 3.2, columns=2)
    recall = d["recall"]["matched"]
    for axes, cut in zip(panels, ("1", "16"), strict=True):
        for name, colour, line in (("on", COLOURS[0], "-"), ("off", COLOURS[0], "--"), ("baseline", COLOURS[1], "--")):
            points = [
                (k, r, e)
                for k, (r, e) in enumerate(zip(recall[name][cut], recall[f"{name}_error"][cut], strict=True), 1)
                if r is not None
            ]
            places, shares_, errors = zip(*points, strict=True)
            axes.errorbar(places, shares_, yerr=errors, color=colour, linestyle=line, label=name, marker="o",
                          markersize=3, linewidth=1.2, elinewidth=0.7)  # fmt: skip
        axes.set(xlabel="position in the block", ylabel=f"recall@{cut}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].legend()
    return figure


@rc_context(STYLE)
def attention_mass(d: Mapping[str, Any]) -> Figure:
    """Attention on carry rows: by slot of the block, and per row by its place, beside a recent context row's."""
    figure, (slots, rows) = canvas(7.6, 3.2, columns=2)
    a = d["attention"]
    for layer, by_slot in enumerate(a["carry_by_layer_and_slot"]):
        look_ = {"color": COLOURS[layer % len(COLOURS)], "linewidth": 1.2}
        slots.plot(range(len(by_slot)), by_slot, marker="o", markersize=3, label=f"layer {layer}", **look_)
        offsets = [(r, mass) for r, mass in enumerate(a["by_offset"][layer], 1) if mass is not None]
        rows.plot(*zip(*offsets, strict=True), marker="o", markersize=3, **look_)
        rows.axhline(a["per_recent_row_by_layer"][layer], linestyle=":", **look_)
    slots.set(xlabel="slot", ylabel="attention on all carry rows", ylim=(0, None))
    rows.set(xlabel="rejected row, j - n", ylabel="attention per row", ylim=(0, None))
    for axes in (slots, rows):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    slots.legend()
    return figure


def canvas(width: float, height: float, columns: int = 1) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns)


@rc_context(STYLE)
def data_uri(figure: Figure) -> str:
    """The figure as an SVG image that an HTML page holds in itself."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()
