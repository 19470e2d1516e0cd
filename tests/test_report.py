"""The report page: what it says about hand-made results, and that it needs nothing but itself."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from carryover.errors import InputError
from carryover.report import cautions, controls, measured, read_log, write_report
from carryover.report.figures import acceptance_by_position, data_uri, shares
from carryover.report.tables import gains_table, results_table, task_table, terminal_table, to_rich

ENVIRONMENT = {
    "cpu": "Test CPU", "threads": 2, "cores": 2, "dtype": "bfloat16", "device": "cpu", "load_average": 0.1,
    "sessions": 1, "skipped_prompts": [],
}  # fmt: skip


def stats(acceptance: float, speedup: float, carried: float = 0.0, divergent: int = 0) -> dict[str, Any]:
    drafted = acceptance > 1
    return {
        "prompts": 40, "tokens": 400, "rounds": int(400 / acceptance), "acceptance_length": acceptance,
        "acceptance_length_ci95": [acceptance - 0.125, acceptance + 0.25], "carried_rows": carried,
        "acceptance_by_position": [0.8, 0.5, 0.25] if drafted else [],
        "conditional_acceptance": [0.8, 0.625, 0.5] if drafted else [],
        "tokens_per_second": 20 * speedup, "speedup": speedup, "speedup_ci95": [speedup - 0.25, speedup + 0.25],
        "draft_share": 0.25 if drafted else 0.0, "verify_share": 0.5, "prefill_share": 0.125,
        "identical": 40 - divergent, "divergent": divergent, "looping": 0,
    }  # fmt: skip


def run(name: str, carry: bool = False, **kwargs: Any) -> dict[str, Any]:
    tasks = {"qa": stats(**kwargs), "<rag>": stats(**kwargs)}
    drafter = None if name == "autoregressive" else f"runs/{name}"
    return {"name": name, "drafter": drafter, "carry": carry, "tasks": tasks, "overall": stats(**kwargs)}


def example() -> dict[str, Any]:
    gain = {"acceptance_gain": 0.25, "acceptance_gain_ci95": [0.125, 0.5], "speedup_gain": -0.02}
    compared = {**gain, "speedup_gain_ci95": [-0.05, 0.01]}
    return {
        "target": "toy", "temperature": 0.0, "max_new_tokens": 64, "seed": 3, "draft_sampling": "greedy",
        "environment": dict(ENVIRONMENT),
        "runs": [
            run("autoregressive", acceptance=1.0, speedup=1.0),
            run("base", acceptance=2.0, speedup=1.5),
            run("carry", carry=True, acceptance=2.5, speedup=1.75, carried=9.5),
        ],
        "comparisons": [{"a": "carry", "b": "base", "task": task, **compared} for task in ("qa", "<rag>", "overall")],
    }  # fmt: skip


def write(folder: Path, results: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def test_tables() -> None:
    results = example()
    assert results_table(results).rows[2] == [
        "carry", "2.50 [2.38, 2.75]", "35.0", "1.75 [1.50, 2.00]", "25 %", "50 %", "9.5", "identical",
    ]  # fmt: skip
    assert task_table(results).rows[0] == ["qa", "40", "2.00 [1.88, 2.25]", "2.50 [2.38, 2.75]"]
    assert [row[1] for row in gains_table(results).rows] == ["overall", "qa", "<rag>"]
    assert gains_table(results, overall_only=True).rows == [
        ["carry against base", "overall", "+25.0 % [+12.5, +50.0]", "-2.0 % [-5.0, +1.0]"]
    ]
    assert terminal_table(results).row_count == 3


def test_figures_without_data_are_dashes() -> None:
    results = example()
    results["runs"][1]["overall"] |= {
        "acceptance_length": None, "acceptance_length_ci95": [None, None], "tokens_per_second": None, "speedup": None,
        "speedup_ci95": [None, None], "draft_share": None, "verify_share": None, "identical": None, "divergent": None,
    }  # fmt: skip
    assert results_table(results).rows[1] == ["base", "–", "–", "–", "–", "–", "0.0", "sampled"]


def test_shares_add_up() -> None:
    assert shares(stats(2.0, 1.5)) == {"draft": 0.25, "verify": 0.5, "prefill": 0.125, "rest": 0.125}


def test_words_say_what_was_measured() -> None:
    results = example()
    text = measured(results)
    assert "40 prompts" in text and "greedy decoding" in text and "bfloat16" in text and "2 threads" in text
    assert "trained for the same extra steps without carry" in controls(results)
    results["temperature"], results["draft_sampling"] = 1.0, "probabilistic"
    assert "sampling at temperature 1, lossless verification of sampled drafts" in measured(results)
    assert "batch of one" in text and "16 requests at a time" in measured({**results, "batch_size": 16})
    results["runs"] = [results["runs"][0], results["runs"][2]]
    assert "no drafter without carry" in controls(results)


def test_cautions() -> None:
    results = example()
    assert cautions(results) == []
    results["runs"][2]["overall"] |= {"divergent": 3}
    results["runs"][0]["overall"] |= {"prompts": 12, "looping": 2}
    results["environment"] |= {"sessions": 2, "load_average": 7.5, "skipped_prompts": ["a", "b"]}
    text = "\n".join(cautions(results))
    for part in ("Only 12 prompts", "carry: 3 of 12 outputs differ", "2 of 12 plain responses loop", "2 sessions",
                 "load average 7.5", "2 prompts did not fit"):  # fmt: skip
        assert part in text


def test_page_holds_everything_in_itself(tmp_path: Path) -> None:
    write(tmp_path / "t1", {**example(), "temperature": 1.0})
    (tmp_path / "baseline").mkdir()
    records = [{"step": s, "cross_entropy": 5 / s, "acceptance": 1 + s / 10} for s in (1, 2, 3)]
    (tmp_path / "baseline" / "train_log.jsonl").write_text("\n".join(map(json.dumps, records)) + '\n{"step": 4, "cro')
    page = write_report(tmp_path)
    text = page.read_text()
    assert page == tmp_path / "report.html"
    assert not re.search(r"(src|href)=\"(?!data:)", text) and "http" not in re.sub(r"data:image[^\"]+", "", text)
    images = [base64.b64decode(image).decode() for image in re.findall(r"data:image/svg\+xml;base64,([^\"]+)", text)]
    assert len(images) == 3 + 1 and all("</svg>" in image for image in images)
    assert "cross-entropy" in images[-1] and "baseline" in images[-1]
    assert "2.50 [2.38, 2.75]" in text and "+25.0 % [+12.5, +50.0]" in text and "Test CPU" in text
    assert "&lt;rag&gt;" in text and "<rag>" not in text
    assert "t1 (temperature 1.0)" in text


def test_names_mean_nothing_to_plots_and_tables(tmp_path: Path) -> None:
    """A dollar begins mathematics in matplotlib, a bracket markup in rich; what brackets hold would vanish."""
    results = example()
    for r in results["runs"]:
        r["tasks"]["a$x^$"] = r["tasks"].pop("qa")
    results["runs"][1]["name"] = "[bold]q$_$"
    write_report(write(tmp_path, results))
    shown = io.StringIO()
    Console(file=shown, width=200).print(terminal_table(results), to_rich(task_table(results), "[x] $y"))
    assert "[bold]q$_$" in shown.getvalue() and "a$x^$" in shown.getvalue() and "[x] $y" in shown.getvalue()


def test_runs_that_propose_as_many_are_compared() -> None:
    results, names = example(), ["base", "base (3 proposals)", "carry", "carry (1 proposal)", "carry (3 proposals)"]
    gain = results["comparisons"][-1]
    results["comparisons"] = [{**gain, "a": a, "b": b} for a in names for b in names if a != b]
    shown = {tuple(row[0].split(" against ")) for row in gains_table(results).rows}
    with_three, same = {"base (3 proposals)", "carry (3 proposals)"}, {n for n in names if n.startswith("carry")}
    pairs = [{"base", "carry"}, with_three, {"base", "base (3 proposals)"}, *({a, b} for a in same for b in same)]
    assert shown == {(a, b) for a in names for b in names if a != b and {a, b} in pairs}


def test_page_without_drafters(tmp_path: Path) -> None:
    results = example()
    results["runs"], results["comparisons"] = results["runs"][:1], []
    text = write_report(write(tmp_path, results)).read_text()
    assert "autoregressive" in text and "Acceptance by position" not in text


def test_plots_depend_on_nothing_but_the_data() -> None:
    once, twice = (data_uri(acceptance_by_position(example()["runs"])) for _ in range(2))
    assert once == twice


def test_torn_log_keeps_what_is_whole(tmp_path: Path) -> None:
    (tmp_path / "train_log.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert read_log(tmp_path / "train_log.jsonl") == [{"step": 1}, {"step": 2}]


def test_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no results\.json"):
        write_report(tmp_path)
    with pytest.raises(InputError, match="there is no folder"):
        write_report(tmp_path / "missing")
    (tmp_path / "results.json").write_text('{"runs": []}')
    with pytest.raises(InputError, match="is not a results file"):
        write_report(tmp_path)
