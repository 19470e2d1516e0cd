"""`carryover diagnose` on a tiny target: what it writes, that it resumes, agrees with `evaluate`, and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from drafters import random_drafter
from tiny import save_target, tiny_target
from typer.testing import CliRunner

from carryover import cli
from carryover.data.prompts import Prompt
from carryover.drafter.modeling import Drafter
from carryover.errors import InputError
from carryover.evaluate import diagnose as module
from carryover.evaluate.diagnose import diagnose
from carryover.evaluate.run import Plan, evaluate, ids_of
from carryover.files import alone
from carryover.formats import save_drafter
from carryover.report import write_report
from carryover.target import Target

PROMPTS = [
    Prompt("a", "qa", ["w7 w8 w9"]),
    Prompt("b", "qa", ["w20 w21"]),
    Prompt("c", "chat", ["w30 w31 w32 w33", "w40"]),
    Prompt("d", "translation", ["w50"]),
]
PLAN = Plan(max_new_tokens=12, seed=3)
BASE = ("runs/base", random_drafter(1, target_layer_ids=[0, 2]))
CARRY = ("runs/carry", random_drafter(2, carry="embedding"))


def run(target: Target, out: Path, plan: Plan = PLAN, prompts: list[Prompt] = PROMPTS) -> dict[str, Any]:
    return diagnose(target, CARRY, BASE, prompts, out, plan, progress=False)


@pytest.fixture(scope="module")
def finished(target: Target, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("diagnosed")
    return out, run(target, out)


def test_the_file(finished: tuple[Path, dict[str, Any]], target: Target, tmp_path: Path) -> None:
    out, d = finished
    assert json.loads((out / "diagnostics.json").read_text()) == d
    assert list(d) == [
        "target", "drafter", "baseline", "proposals", "max_new_tokens", "seed", "environment", "recall", "tasks",
        "overall", "correlation", "correlation_without_translation", "states", "rows", "attention",
    ]  # fmt: skip
    assert (d["drafter"], d["baseline"], d["proposals"], d["seed"]) == ("runs/carry", "runs/base", 4, 3)
    assert d["overall"]["prompts"] == 4 and list(d["tasks"]) == ["qa", "chat", "translation"]
    assert d["correlation"]["tasks"] == 3 and d["correlation_without_translation"] == {"tasks": 2}
    states = d["overall"]["states"]
    assert d["recall"]["every"]["n"][0] == d["recall"]["matched"]["n"][0] == sum(d["states"]["states"]) == states > 20
    assert d["attention"]["rounds"] == states
    assert sum(d["attention"][key] for key in ("carry", "context", "block")) == pytest.approx(1)
    assert sum(r["n"] for r in d["rows"].values()) == sum(d["recall"]["every"]["n"])

    results = evaluate(target, dict([BASE, CARRY]), PROMPTS, tmp_path, PLAN, progress=False)
    for name, key in (("carry", "acceptance_length"), ("base", "baseline_acceptance_length")):
        stats = next(r for r in results["runs"] if r["name"] == name)
        for task, figures in d["tasks"].items():
            assert figures[key] == stats["tasks"][task]["acceptance_length"]
        assert d["overall"][key] == stats["overall"]["acceptance_length"]


def test_two_at_a_time_are_refused(target: Target, tmp_path: Path) -> None:
    with alone(tmp_path), pytest.raises(InputError, match="another process works on"):
        run(target, tmp_path)
    assert not any(tmp_path.iterdir())


def test_later_turns_continue_from_the_answers(finished: tuple[Path, dict[str, Any]], target: Target) -> None:
    records = [json.loads(line) for line in (finished[0] / "diagnostics.jsonl").read_text().splitlines()]
    assert [(r["prompt"], r["task"], len(r["responses"])) for r in records] == [
        ("a", "qa", 1), ("b", "qa", 1), ("c", "chat", 2), ("d", "translation", 1),
    ]  # fmt: skip
    first, second = records[2]["responses"]
    assert target.tokenizer is not None
    said = target.tokenizer.decode(first["tokens"], skip_special_tokens=True)
    assert second["prompt_tokens"] == len(ids_of(target, PLAN, PROMPTS[2].turns, [said]))


def test_a_killed_run_goes_on(
    finished: tuple[Path, dict[str, Any]], target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (finished[0] / "diagnostics.jsonl").read_text()
    run(target, tmp_path)
    lines = whole.splitlines(keepends=True)
    (tmp_path / "diagnostics.jsonl").write_text("".join(lines[:2]) + lines[2][:50])
    probed, probe = [], module.probe

    def counted(*args: Any) -> Any:
        probed.append(args[3].id)
        return probe(*args)

    monkeypatch.setattr(module, "probe", counted)
    again = run(target, tmp_path)
    assert probed == ["c", "d"] and (tmp_path / "diagnostics.jsonl").read_text() == whole
    assert again["environment"]["sessions"] == 2
    assert {k: v for k, v in again.items() if k != "environment"} == {
        k: v for k, v in finished[1].items() if k != "environment"
    }
    with pytest.raises(InputError, match="max_new_tokens 12, now 13"):
        run(target, tmp_path, Plan(max_new_tokens=13, seed=3))
    (tmp_path / "diagnostics.jsonl").write_text("{}\n" + lines[1])
    with pytest.raises(InputError, match="damaged at line 1"):
        run(target, tmp_path)


def test_what_cannot_be_diagnosed(target: Target, tmp_path: Path) -> None:
    def refused(pair: list[tuple[str, Drafter]], match: str, **kwargs: Any) -> None:
        with pytest.raises(InputError, match=match):
            diagnose(target, pair[0], pair[1], PROMPTS, tmp_path / match[:9], progress=False, **kwargs)

    refused([BASE, CARRY], "runs/base has no carry")
    refused([CARRY, ("b8", random_drafter(1, block_size=8))], r"has blocks of 5 \(fill_in\), but the baseline b8 has")
    refused([CARRY, ("n", random_drafter(1, block_size=5, slots="next_token"))], r"has blocks of 5 \(next_token\)")
    refused([CARRY, CARRY], "runs/carry carries itself; name the drafter it started from")
    refused([CARRY, BASE], "no draft had carry rows", plan=Plan(max_new_tokens=2))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="is a file"):
        run(target, tmp_path / "file")


# ---- the command and the page --------------------------------------------------------------------------------------
def test_command_and_report(tmp_path: Path) -> None:
    folder = save_target(tiny_target(), tmp_path / "target")
    fits = Target.load(folder)
    known = {"max_position_embeddings": fits.max_length, "target_fingerprint": fits.fingerprint()}
    save_drafter(random_drafter(1, **known), tmp_path / "base")
    save_drafter(random_drafter(2, carry="embedding", **known), tmp_path / "carry")
    rows = [{"id": f"p{i}", "task": ("qa", "rag")[i % 2], "prompt": f"w{i + 7} w{2 * i + 9}"} for i in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ["--target", str(folder), "--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "8"]
    out = tmp_path / "run"

    def diagnose_(drafter: str, baseline: str, *more: str) -> Any:
        pair = ["--drafter", str(tmp_path / drafter), "--baseline", str(tmp_path / baseline)]
        return CliRunner().invoke(cli.app, ["diagnose", *common, *pair, "--out", str(out), *more])

    shown = diagnose_("carry", "base")
    assert shown.exit_code == 0, shown.output
    for part in ("Matched-anchor recall", "qa", "layer 1", "re-converged rows", "right within one"):
        assert part in shown.stdout
    printed = json.loads(diagnose_("carry", "base", "--json").stdout)
    assert printed == json.loads((out / "diagnostics.json").read_text()) and printed["overall"]["prompts"] == 4
    wrong = diagnose_("base", "carry")
    assert wrong.exit_code == 2 and wrong.stderr.startswith("error: ") and "has no carry" in wrong.stderr
    assert wrong.stderr.count("\n") == 1
    save_drafter(random_drafter(2, carry="hint", **known), tmp_path / "hint")
    hinting = diagnose_("hint", "base")
    assert hinting.exit_code == 2 and "carries token hints" in hinting.stderr

    evaluated = CliRunner().invoke(
        cli.app, ["evaluate", *common, "--drafter", str(tmp_path / "carry"), "--out", str(out)]
    )
    assert evaluated.exit_code == 0, evaluated.output
    text = write_report(out).read_text()
    assert "Why carry helps" in text and "Recall by position" in text and "right within one" in text
    assert len(re.findall("data:image/svg", text)) == 3 + 2
    (out / "diagnostics.json").write_text('{"recall": {}}')
    with pytest.raises(InputError, match="not a file of this `carryover diagnose`"):
        write_report(out)
