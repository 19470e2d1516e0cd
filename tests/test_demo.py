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
from carryover.demo import FAST, LAB, SMOLLM2, DemoPlan, lab_recipe, run_demo
from carryover.errors import InputError
from carryover.formats import load_drafter
from carryover.formats.files import packaged
from carryover.target import Target

TRAINED = replace(FAST, train=True)


def test_the_packaged_drafters_decode(tmp_path: Path) -> None:
    shown = io.StringIO()
    page = run_demo(tmp_path, replace(FAST, eval_prompts=8, new_tokens=128), Console(file=shown, width=120))
    results = json.loads((tmp_path / "lab" / "results.json").read_text())
    start, continued, off, carryover = LAB[0], LAB[1], f"{LAB[2]} (carry off)", LAB[2]
    assert [run["name"] for run in results["runs"]] == ["autoregressive", start, continued, off, carryover]
    assert all(run["overall"]["identical"] == 8 for run in results["runs"])
    length = {run["name"]: run["overall"]["acceptance_length"] for run in results["runs"]}
    assert length[carryover] > max(length[continued], length[off]) > 3  # docs/lab.md: 4.5 against 3.9 on 400 prompts
    assert page.exists() and "lab-markov-carryover" in shown.getvalue()


def test_packaged_drafters_fit_their_targets() -> None:
    assert set(packaged()) == {*LAB, *SMOLLM2}
    for name in LAB:
        drafter = load_drafter(name, Target.load("lab"))
        assert (drafter.config.carry != "none") == name.endswith("carryover")


def test_demo_and_demo_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    page = run_demo(tmp_path, TRAINED, Console(file=shown, width=100))
    results = json.loads((tmp_path / "lab" / "results.json").read_text())
    names = ["autoregressive", "baseline", "continued", "carryover (carry off)", "carryover"]
    assert [run["name"] for run in results["runs"]] == names
    assert all(run["overall"]["identical"] == TRAINED.eval_prompts for run in results["runs"])
    assert page == tmp_path / "report.html" and "Training" in page.read_text()
    assert "autoregressive" in shown.getvalue() and "report.html" in "".join(shown.getvalue().split())
    asked = [load_prompts(tmp_path / "prompts" / f"{split}_prompts.jsonl") for split in ("train", "eval")]
    assert not {p.turns[0] for p in asked[0]} & {p.turns[0] for p in asked[1]}

    def must_not(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(run_module, "train", must_not)
    before = (tmp_path / "lab" / "trace.jsonl").read_text()
    run_demo(tmp_path, TRAINED, Console(file=io.StringIO()))
    assert (tmp_path / "lab" / "trace.jsonl").read_text() == before
    with pytest.raises(InputError, match="other amounts"):
        run_demo(tmp_path, replace(TRAINED, eval_prompts=3))


def test_stages_are_compared_fairly() -> None:
    """The control takes as many steps as carryover, from the same settings; only carryover has the carry interface."""
    recipe = lab_recipe(DemoPlan(), 4)
    assert recipe.train.continued.model_dump().items() <= recipe.train.carryover.model_dump().items()
    assert recipe.drafter.slots == "fill_in" and recipe.carry.interface == "embedding"


@pytest.mark.slow
def test_smollm2_writes_the_same_text_with_the_packaged_drafters(tmp_path: Path) -> None:
    shown = io.StringIO()
    run_demo(tmp_path, replace(FAST, smollm2_prompts=4, smollm2_tokens=24), Console(file=shown, width=200))
    results = json.loads((tmp_path / "smollm2" / "results.json").read_text())
    assert [run["overall"]["identical"] for run in results["runs"]] == [4] * 4
    carryover = results["runs"][-1]
    assert carryover["carry"] and carryover["overall"]["carried_rows"] > 0
    assert carryover["overall"]["acceptance_length"] > 1.3  # docs/smollm2.md
