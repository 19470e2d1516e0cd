"""The demo with a few steps of everything: it ends in a page, does nothing twice, and keeps to its plan."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from carryover import run as run_module
from carryover.data.prompts import load_prompts
from carryover.demo import FAST, DemoPlan, lab_recipe, run_demo, smollm2_recipe
from carryover.errors import InputError


def test_demo_and_demo_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    page = run_demo(tmp_path, FAST, Console(file=shown, width=100))
    results = json.loads((tmp_path / "lab" / "results.json").read_text())
    names = ["autoregressive", "baseline", "continued", "carryover (carry off)", "carryover"]
    assert [run["name"] for run in results["runs"]] == names
    assert all(run["overall"]["identical"] == FAST.eval_prompts for run in results["runs"])
    assert page == tmp_path / "report.html" and "Training" in page.read_text()
    assert "autoregressive" in shown.getvalue() and "report.html" in "".join(shown.getvalue().split())
    asked = [load_prompts(tmp_path / "prompts" / f"{split}_prompts.jsonl") for split in ("train", "eval")]
    assert not {p.turns[0] for p in asked[0]} & {p.turns[0] for p in asked[1]}

    def must_not(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(run_module, "train", must_not)
    before = (tmp_path / "lab" / "trace.jsonl").read_text()
    run_demo(tmp_path, FAST, Console(file=io.StringIO()))
    assert (tmp_path / "lab" / "trace.jsonl").read_text() == before
    with pytest.raises(InputError, match="other amounts"):
        run_demo(tmp_path, replace(FAST, eval_prompts=3))


def test_stages_are_compared_fairly() -> None:
    """The control takes as many steps as carryover, from the same settings; only carryover has the carry interface."""
    for recipe in (lab_recipe(DemoPlan(), 4), smollm2_recipe(DemoPlan())):
        shared = recipe.train.continued.model_dump()
        assert shared.items() <= recipe.train.carryover.model_dump().items()
        assert recipe.drafter.slots == "fill_in" and recipe.carry.interface == "embedding"


@pytest.mark.slow
def test_smollm2_writes_the_same_text_with_a_drafter(tmp_path: Path) -> None:
    plan = replace(FAST, smollm2_prompts=22, smollm2_steps=2, smollm2_tokens=12)
    shown = io.StringIO()
    run_demo(tmp_path, plan, Console(file=shown, width=200))
    assert "2 of 2 texts are those of plain decoding, token for token." in shown.getvalue()
    results = json.loads((tmp_path / "smollm2" / "results.json").read_text())
    assert results["runs"][1]["carry"] and results["runs"][1]["overall"]["carried_rows"] > 0
