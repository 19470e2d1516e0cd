"""The tables of a report as rows of text, for the terminal and for the page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import rich.box
import rich.table
from rich.markup import escape

RESULTS = ("method", "tokens / verification", "tokens / s", "speedup", "draft", "verify", "carried rows", "output")
GAINS = ("comparison", "task", "acceptance", "speed")


class Table(NamedTuple):
    """Texts: column heads, and rows of the same length."""

    heads: Sequence[str]
    rows: list[list[str]]


def results_table(results: Mapping[str, Any]) -> Table:
    """One row per run, over all prompts."""
    return Table(RESULTS, [_result(run["name"], run["overall"]) for run in results["runs"]])


def task_table(results: Mapping[str, Any]) -> Table:
    """Acceptance length by task: one row per task, one column per drafter run."""
    runs = [run for run in results["runs"] if run["drafter"] is not None]
    rows = [
        [task, str(stats["prompts"]), *(_acceptance(run["tasks"][task]) for run in runs)]
        for task, stats in results["runs"][0]["tasks"].items()
    ]
    return Table(("task", "prompts", *(run["name"] for run in runs)), rows)


def gains_table(results: Mapping[str, Any], overall_only: bool = False) -> Table:
    """One row per comparison and task, the gains over all prompts first. Two drafters that propose different numbers of
    tokens are not set against each other; results.json does that too."""
    alike = [c for c in results["comparisons"] if _like_with_like(c["a"], c["b"])]
    overall = [c for c in alike if c["task"] == "overall"]
    by_task = [c for c in alike if c["task"] != "overall" and not overall_only]
    rows = [
        [f"{c['a']} against {c['b']}", c["task"], _gain(c, "acceptance_gain"), _gain(c, "speedup_gain")]
        for c in (*overall, *by_task)
    ]
    return Table(GAINS, rows)


def _like_with_like(a: str, b: str) -> bool:
    """Whether two runs propose as many tokens, or are one drafter that proposes more and fewer."""
    counted = re.compile(r"(.*?)( \((?:\d+|auto) proposals?\))?")
    (name_a, few_a), (name_b, few_b) = (m.groups() for m in map(counted.fullmatch, (a, b)) if m)
    return few_a == few_b or name_a == name_b


def diagnostics_tables(d: Mapping[str, Any]) -> dict[str, Table]:
    """The tables of diagnostics.json by title; each fits into 80 characters."""
    return {
        "The gain, taken apart: tokens per verification at the same states": _apart_table(d["overall"]),
        "Matched-anchor recall, points of 100": _recall_table(d["recall"]["matched"]),
        "By task": _diagnosed_tasks(d),
        "Correlation with the gain": _correlation_table(d),
        "Recall@1 by what the carry row of the position had guessed, points of 100": _rows_table(d["rows"]),
        "Local replay gain by what the last round re-converged": _replay_table(d["states"]),
        "Attention, percent of the mass": _attention_table(d["attention"]),
    }


def _apart_table(s: Mapping[str, Any]) -> Table:
    """What training with carry did to the drafter without it, what the rows give it, and what a user gets."""
    row = [_number(s[key] + 1) for key in ("replay_baseline", "replay_off", "replay_on")]
    row += [_gain(s, key) for key in ("replay_training", "replay_ratio", "gain")]
    return Table(("base", "off", "on", "training: off/base", "rows: on/off", "decoding: on/base"), [row])


def _recall_table(r: Mapping[str, Any]) -> Table:
    """One row per position and one for all, recall at 1 but for the last column."""
    rows = []
    for source, names in ((r, [str(k) for k in range(1, len(r["n"]) + 1)]), (r["pooled"], ["all"])):
        for k, name in enumerate(names):
            shares = [_points(source[drafter]["1"][k]) for drafter in ("on", "off", "baseline")]
            gains = [_paired(source, "on_minus_off", cut, k) for cut in ("1", "16")]
            rows.append([name, str(source["n"][k]), *shares, *gains])
    return Table(("position", "states", "on", "off", "base", "on - off @1", "on - off @16"), rows)


def _paired(r: Mapping[str, Any], name: str, cut: str, k: int) -> str:
    value, (low, high) = r[name][cut][k], r[f"{name}_ci95"][cut][k]
    return "–" if value is None or low is None else f"{100 * value:+.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def _points(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def _diagnosed_tasks(r: Mapping[str, Any]) -> Table:
    keys = ("reconvergence", "reconvergence_per_baseline_length", "post_rejection", "rejected_rows", "replay_gain")
    rows = [
        [task, _gain(s, "gain").split(" [")[0], *(_number(s[key]) for key in keys)]
        for task, s in (*r["tasks"].items(), ("overall", r["overall"]))
    ]
    head = ("task", "gain", "re-converged", "/ base", "behind", "rejected", "on - off")
    return Table(head, rows)


def _correlation_table(r: Mapping[str, Any]) -> Table:
    both = r["correlation"], r["correlation_without_translation"]
    names = [key for key in both[0] if key != "tasks" and not key.endswith("_ci95")]
    rows = [[name.replace("_", " "), *(_correlation(c, name) for c in both)] for name in names]
    return Table(("over tasks", f"{both[0]['tasks']} tasks", "without translation"), rows)


def _correlation(c: Mapping[str, Any], name: str) -> str:
    if c.get(name) is None:
        return "–"
    low, high = c[f"{name}_ci95"]
    return f"{c[name]:+.2f}" + ("" if low in (None, high) else f" [{low:+.2f}, {high:+.2f}]")


def _rows_table(rows: Mapping[str, Any]) -> Table:
    names = {"exact": "right", "near": "right within one", "missed": "wrong", "uncarried": "no row"}
    shown = []
    for kind, name in names.items():
        r = rows[kind]
        low, high = r["on_minus_off_ci95"]
        gain = "–" if low is None else f"{100 * r['on_minus_off']:+.1f} [{100 * low:.1f}, {100 * high:.1f}]"
        shown.append([name, str(r["n"]), _points(r["on"]), _points(r["off"]), gain])
    return Table(("carry row", "positions", "on", "off", "on - off"), shown)


def _replay_table(s: Mapping[str, Any]) -> Table:
    rows = [
        [str(value), str(states), _number(gain), _range(ends, 2)]
        for value, states, gain, ends in zip(s["reconverged"], s["states"], s["gain"], s["gain_ci95"], strict=True)
    ]
    return Table(("re-converged rows", "states", "accepted on - off", "95 %"), rows)


def _attention_table(a: Mapping[str, Any]) -> Table:
    layers = zip(a["carry_by_layer"], a["per_carry_row_by_layer"], a["per_recent_row_by_layer"], strict=True)
    rows = [[f"layer {i}", *map(_points, figures)] for i, figures in enumerate(layers)]
    rows.append(["all", *(_points(a[key]) for key in ("carry", "per_carry_row", "per_recent_row"))])
    return Table(("", "on carry rows", "per carry row", "per recent context row"), rows)


def to_rich(table: Table, title: str = "") -> rich.table.Table:
    """For a terminal: the first column wraps where the terminal is narrow, figures never do."""
    shown = rich.table.Table(
        title=escape(title), title_justify="left", box=rich.box.SIMPLE_HEAD, pad_edge=False, padding=0
    )
    for i, head in enumerate(table.heads):
        shown.add_column(
            head, justify="right" if i else "left", no_wrap=i > 0, overflow="fold" if i == 0 else "ellipsis"
        )
    for row in table.rows:
        shown.add_row(*map(escape, row))
    return shown


def terminal_table(results: Mapping[str, Any]) -> rich.table.Table:
    """The columns of `results_table` that fit into 80 characters."""
    _, rows = results_table(results)
    keep = {"method": 0, "tokens /\nverification": 1, "tokens / s": 2, "speedup": 3, "output": RESULTS.index("output")}
    return to_rich(Table(list(keep), [[row[i] for i in keep.values()] for row in rows]))


def _result(name: str, s: Mapping[str, Any]) -> list[str]:
    return [
        name,
        _acceptance(s),
        _number(s["tokens_per_second"], 1),
        f"{_number(s['speedup'])} {_range(s['speedup_ci95'], s['prompts'])}".strip(),
        _percent(s["draft_share"]),
        _percent(s["verify_share"]),
        _number(s["carried_rows"], 1),
        _output(s),
    ]


def _output(s: Mapping[str, Any]) -> str:
    if s["identical"] is None:
        return "sampled"
    return "identical" if not s["divergent"] else f"{s['divergent']} differ"


def _acceptance(s: Mapping[str, Any]) -> str:
    return f"{_number(s['acceptance_length'])} {_range(s['acceptance_length_ci95'], s['prompts'])}".strip()


def _range(ends: Sequence[float | None], prompts: int) -> str:
    """An interval; a single prompt has none."""
    low, high = ends
    if low is None or high is None or prompts < 2 or low == high:
        return ""
    return f"[{low:.2f}, {high:.2f}]"


def _gain(c: Mapping[str, Any], key: str) -> str:
    if c[key] is None:
        return "–"
    low, high = c[f"{key}_ci95"]
    return f"{100 * c[key]:+.1f} %" + ("" if low in (None, high) else f" [{100 * low:+.1f}, {100 * high:+.1f}]")


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"
