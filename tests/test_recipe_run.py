"""A recipe from start to end on a tiny target: every step once, resumable, and only for one recipe a folder."""

from __future__ import annotations

import fcntl
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from tiny import tiny_target
from typer.testing import CliRunner

from carryover import cli
from carryover import run as module
from carryover.config import Recipe
from carryover.data.prompts import load_prompts
from carryover.data.record import record
from carryover.decode.sampling import Sampling
from carryover.errors import InputError
from carryover.files import alone
from carryover.report import grid
from carryover.run import chosen, plan, run, run_grid
from carryover.target import Target


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama", vocab=40, layers=6)


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{i}", "task": ("qa", "rag")[i % 2], "prompt": f"w{i + 7} w{2 * i + 9}"} for i in range(8)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "target": "tiny",
        "drafter": {"algorithm": "markov", "layers": 1, "block_size": 4, "captured": 2, "mask_token_id": 5,
                    "markov": {"rank": 4}},
        "data": {"max_length": 64},
        "record": {"prompts": str(prompts), "limit": 4, "max_new_tokens": 12},
        "train": {"steps": 2, "anchors": 4, "baseline": {"steps": 3}},
        "evaluate": {"prompts": str(prompts), "limit": 4, "max_new_tokens": 8, "temperatures": [0, 0.7],
                     "batch_size": 3},
    }  # fmt: skip


def test_a_recipe_runs_once(settings: dict[str, Any], target: Target, tmp_path: Path, monkeypatch: Any) -> None:
    recipe, out, shown = Recipe.model_validate(settings), tmp_path / "out", io.StringIO()
    page = run(recipe, out, Console(file=shown), target)
    assert page == out / "report.html" and page.exists()
    assert len((out / "recorded.jsonl").read_text().splitlines()) == 4
    names = ["autoregressive", "baseline", "continued", "carryover (carry off)", "carryover"]
    for temperature in ("0", "0.7"):
        results = json.loads((out / f"t{temperature}" / "results.json").read_text())
        assert [r["name"] for r in results["runs"]] == names and results["batch_size"] == 3
        assert results["temperature"] == float(temperature)
    assert all(f"{i + 1}. {title}" in " ".join(shown.getvalue().split()) for i, title in enumerate(plan(recipe)))

    def must_not(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(module, "train", must_not)
    trace = (out / "t0" / "trace.jsonl").read_text()
    run(recipe, out, Console(file=io.StringIO()), target)
    assert (out / "t0" / "trace.jsonl").read_text() == trace
    other = Recipe.model_validate({**settings, "seed": 1})
    with pytest.raises(InputError, match=r"another recipe \(seed\)"):
        run(other, out, Console(file=io.StringIO()), target)


def test_a_given_corpus_is_not_recorded(settings: dict[str, Any], target: Target, tmp_path: Path) -> None:
    first = Recipe.model_validate(settings)
    run(first, tmp_path / "a", Console(file=io.StringIO()), target)
    given = Recipe.model_validate(
        {**settings, "data": {**settings["data"], "corpus": str(tmp_path / "a" / "recorded.jsonl")}}
    )
    assert len(plan(given)) == len(plan(first)) - 1
    run(given, tmp_path / "b", Console(file=io.StringIO()), target)
    assert not (tmp_path / "b" / "recorded.jsonl").exists()
    runs = [json.loads((tmp_path / d / "t0" / "results.json").read_text())["runs"] for d in "ab"]
    assert [r["overall"]["acceptance_length"] for r in runs[0]] == [r["overall"]["acceptance_length"] for r in runs[1]]


def test_several_temperatures_are_several_responses(
    settings: dict[str, Any], target: Target, tmp_path: Path, monkeypatch: Any
) -> None:
    """A file for each, with other random numbers; one corpus; recorded once, also by a grid."""
    recipe = Recipe.model_validate({**settings, "record": {**settings["record"], "temperature": [0, 0.7, 0.7]}})
    assert "at temperatures 0, 0.7, 0.7" in plan(recipe)[0]
    out = tmp_path / "out"
    run(recipe, out, Console(file=io.StringIO()), target)
    files = [out / "recorded" / name for name in ("1-t0.jsonl", "2-t0.7.jsonl", "3-t0.7.jsonl")]
    assert sorted((out / "recorded").glob("*.jsonl")) == files
    rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    assert len(rows[0]) == 4 and len({tuple(row["id"] for row in sorted(r, key=lambda r: r["id"])) for r in rows}) == 1
    assert rows[1] != rows[2]
    fewer = Recipe.model_validate({**settings, "record": {**settings["record"], "temperature": [0, 0.7]}})
    with pytest.raises(InputError, match=r"does not ask for \(3-t0\.7\.jsonl"):  # it would be learnt from
        module.record_responses(fewer, target, out / "recorded")
    alone = tmp_path / "alone.jsonl"
    prompts = load_prompts(settings["record"]["prompts"], limit=4)
    record(target, prompts, alone, Sampling(0.7), 12, 2, progress=False)
    assert alone.read_text() == files[2].read_text()
    grid_out = tmp_path / "grid"
    run_grid({"a-s0": recipe}, grid_out, Console(file=io.StringIO()), target)
    for folder in (out, grid_out):
        assert json.loads((folder.joinpath(*["a-s0"] * (folder == grid_out)) / "baseline" / "run.json").read_text())
    assert all((grid_out / "recorded" / f.name).read_text() == f.read_text() for f in files)
    monkeypatch.setattr(module, "record", lambda *args, **kwargs: None)
    monkeypatch.setattr(module, "train", lambda *args, **kwargs: 1 / 0)
    run(recipe, out, Console(file=io.StringIO()), target)  # all of it is there


def test_what_cannot_be_run_is_said_before_anything_is_done(
    settings: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"evaluate\.prompts is empty"):
        plan(Recipe.model_validate({**settings, "evaluate": {}}))
    missing = {**settings, "evaluate": {"prompts": str(tmp_path / "missing.jsonl")}}
    with pytest.raises(InputError, match=r"missing\.jsonl"):  # not after hours of training
        run(Recipe.model_validate(missing), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    typo = {**settings, "record": {**settings["record"], "prompts": str(tmp_path / "nope.jsonl")}}
    with pytest.raises(InputError, match=r"nope\.jsonl"):
        run(Recipe.model_validate(typo), tmp_path / "out")
    too_many = {**settings, "drafter": {**settings["drafter"], "draft_vocab_size": 41}}
    with pytest.raises(InputError, match="more than the target's 40"):
        run(Recipe.model_validate(too_many), tmp_path / "out", target=target)
    wrong = Recipe.model_validate({**settings, "drafter": {**settings["drafter"], "start": "tagret"}})
    with pytest.raises(InputError, match=r"drafter\.start is not random, target or a fitting drafter: .*'tagret'"):
        run(wrong, tmp_path / "out", target=target)
    with pytest.raises(InputError, match=r"drafter\.start is not random"):
        run_grid({"a-s0": Recipe.model_validate(settings), "b-s0": wrong}, tmp_path / "out", target=target)
    assert module.missing(wrong) == ["tagret"]
    assert module.overlap(wrong) == ["4 of 4 held-out prompts are trained on as well; they flatter every drafter."]
    more = {"prompts": str(tmp_path / "prompts.jsonl")}  # all eight; four of them are recorded
    assert module.overlap(Recipe.model_validate({**settings, "evaluate": more}))[0].startswith("4 of 8 held-out")
    assert module.overlap(Recipe.model_validate(missing)) == []
    assert not (tmp_path / "out").exists()  # so that the mended recipe may use it
    with pytest.raises(InputError, match=r"carry\.interface is none"):
        plan(Recipe.model_validate({**settings, "carry": {"interface": "none"}}))
    assert module.missing(Recipe.model_validate(typo)) == [str(tmp_path / "nope.jsonl")]
    assert module.missing(Recipe.model_validate(settings)) == []
    watched = {**settings, "train": {**settings["train"], "eval_steps": 2, "eval_prompts": "gsm8k_dev"}}
    assert module.missing(Recipe.model_validate(watched)) == []  # a packaged suite
    watched["train"]["eval_prompts"] = "dev.jsonl"
    assert set(module.missing(Recipe.model_validate(watched))) == {"dev.jsonl"}
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        run(Recipe.model_validate(settings), tmp_path / "file")


def test_a_grid_is_recorded_once_and_joined(settings: dict[str, Any], target: Target, tmp_path: Path) -> None:
    path, out = tmp_path / "grid.yaml", tmp_path / "out"
    drafter = {"layers": 1, "captured": 2, "mask_token_id": 5}
    cells = {
        "markov-b5": {"drafter": {"algorithm": "markov", "block_size": 4, "markov": {"rank": 4}}},
        "dflash-b4": {"drafter": {"algorithm": "dflash", "block_size": 4}},
    }
    path.write_text(yaml.safe_dump({**settings, "drafter": drafter, "cells": cells, "seeds": [0, 3]}, sort_keys=False))
    recipes = Recipe.load_grid(path, ["train.steps=1"])
    assert list(recipes) == ["markov-b5-s0", "dflash-b4-s0", "markov-b5-s3", "dflash-b4-s3"]
    assert [r.seed for r in recipes.values()] == [0, 0, 3, 3]
    assert [r.drafter.slots for r in recipes.values()] == ["next_token", "fill_in"] * 2
    assert all(r.train.carryover.steps == 1 and r.drafter.layers == 1 for r in recipes.values())
    shown = io.StringIO()
    table = run_grid(recipes, out, Console(file=shown, width=200), target)
    assert shown.getvalue().count("answers 4 prompts") == 1 and not list(out.glob("*/recorded.jsonl"))

    joined = json.loads((out / "grid-t0.json").read_text())
    names = [run["name"] for run in joined["runs"]]
    stages = ("start", "continued", "carryover-off", "carryover")
    assert names == ["autoregressive"] + [f"{c}-{s}-s{n}" for n in (0, 3) for c in cells for s in stages]
    for name in recipes:
        cell, seed = name.split("-s")
        own = json.loads((out / name / "t0" / "results.json").read_text())
        (gain,) = (
            c for c in own["comparisons"] if (c["a"], c["b"], c["task"]) == ("carryover", "continued", "overall")
        )
        pair = (f"{cell}-carryover-s{seed}", f"{cell}-continued-s{seed}")
        (same,) = (c for c in joined["comparisons"] if (c["a"], c["b"]) == pair and c["task"] == "overall")
        assert same["acceptance_gain"] == gain["acceptance_gain"]
        row = next(line for line in table.read_text().splitlines() if line.startswith(f"| {cell} | {seed} "))
        length = {run["name"]: run["overall"]["acceptance_length"] for run in own["runs"]}
        assert f"| {length['baseline']:.2f} | {length['continued']:.2f} | {length['carryover']:.2f} |" in row
    assert "T=0.7" in table.read_text() and (out / "grid-t0.7.json").exists()

    results = (out / "grid-t0.json").read_text()
    run_grid(recipes, out, Console(file=io.StringIO()), target)  # nothing is done twice
    assert (out / "grid-t0.json").read_text() == results

    (out / "dflash-b4-s0" / "t1-2").mkdir()  # a user's own
    (out / "dflash-b4-s0" / "t1-2" / "results.json").write_text("{}")
    path = out / "dflash-b4-s0" / "t0" / "results.json"
    other = json.loads(path.read_text())
    path.write_text(results[:200])
    with pytest.raises(InputError, match=r"dflash-b4-s0/t0/results\.json is not a results file"):
        grid.write(out, list(recipes))
    unmeasured = json.loads(json.dumps(other))  # one token a response leaves no round to measure
    for stats in (s for r in unmeasured["runs"] for s in (r["overall"], *r["tasks"].values())):
        stats["acceptance_length"] = None
    for comparison in unmeasured["comparisons"]:
        comparison |= {"acceptance_gain": None, "acceptance_gain_ci95": [None, None]}
    path.write_text(json.dumps(unmeasured))
    grid.write(out, list(recipes))
    assert "| dflash-b4 | 0 |  |  |  |  | – | – |" in table.read_text()
    other["runs"][0]["tasks"]["rag"]["prompts"] += 1
    path.write_text(json.dumps(other))
    with pytest.raises(InputError, match=r"dflash-b4-s0/t0 was decoded on other prompts than the cells before it"):
        grid.write(out, list(recipes))


def test_a_grid_runs_in_parts(settings: dict[str, Any], target: Target, tmp_path: Path) -> None:
    path, out = tmp_path / "grid.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump({**settings, "cells": {"a": {}, "b": {}}, "seeds": [0, 1]}))
    recipes = Recipe.load_grid(path, ["train.steps=1"])
    assert chosen(recipes, []) == ["a-s0", "b-s0", "a-s1", "b-s1"]
    assert chosen(recipes, ["b-s0", "a"]) == ["a-s0", "b-s0", "a-s1"]
    with pytest.raises(InputError, match="no cell 'c'; the cells are a, b, each alone or with -s0, -s1"):
        chosen(recipes, ["a", "c"])
    with pytest.raises(InputError, match="no grid"):
        chosen({"": recipes["a-s0"]}, ["a"])

    quiet = Console(file=io.StringIO())
    run_grid(recipes, out, quiet, target, names=["b-s1"])
    assert [p.name for p in out.iterdir() if p.is_dir()] == ["b-s1"]
    run_grid(recipes, out, quiet, target, names=["a-s1"])
    runs = {run["name"] for run in json.loads((out / "grid-t0.json").read_text())["runs"]}
    assert {"a-carryover-s1", "b-carryover-s1"} < runs and not any(name.endswith("-s0") for name in runs)

    shown = CliRunner().invoke(cli.app, ["run", str(path), "--out", str(out), "--cell", "a", "--dry-run"])
    assert shown.exit_code != 0 and "another recipe (train.carryover.steps" in " ".join(shown.output.split())
    shown = CliRunner().invoke(cli.app, ["run", str(path), "--out", str(tmp_path), "--cell", "a-s1", "--dry-run"])
    assert shown.exit_code == 0 and "cell a-s1" in shown.output and "cell b" not in shown.output


def test_cells_share_the_stages_that_are_the_same(
    settings: dict[str, Any], target: Target, tmp_path: Path, monkeypatch: Any
) -> None:
    path, out = tmp_path / "grid.yaml", tmp_path / "out"
    faster = {"train": {"continued": {"learning_rate": 0.01}, "carryover": {"learning_rate": 0.01}}}
    cells = {"a": {}, "b": {"carry": {"interface": "projector"}}, "c": faster, "d": {"drafter": {"block_size": 5}}}
    path.write_text(yaml.safe_dump({**settings, "cells": cells, "seeds": [0, 1]}, sort_keys=False))
    recipes = Recipe.load_grid(path, ["train.steps=1"])
    trained, real = list[str](), module.train

    def counted(recipe: Recipe, stage: Any, folder: Path, *args: Any, **kwargs: Any) -> Path:
        trained.append(f"{folder.parent.name} {stage}")
        return real(recipe, stage, folder, *args, **kwargs)

    monkeypatch.setattr(module, "train", counted)
    shown = io.StringIO()
    (out / "b-s0" / "baseline.part").mkdir(parents=True)  # a copy that was cut short
    run_grid(recipes, out, Console(file=shown, width=200), target, names=["a-s0", "b-s0", "c-s0", "d-s0", "a-s1"])
    stages = {"a-s0": 3, "b-s0": 1, "c-s0": 2, "d-s0": 3, "a-s1": 3}  # the last ones of each
    assert trained == [f"{cell} {stage}" for cell, count in stages.items() for stage in module.STAGES[-count:]]
    assert shown.getvalue().count("taken from") == 3 and not list(out.glob("*/*.part"))
    monkeypatch.setattr(module, "take", lambda *args: False)
    run_grid(recipes, tmp_path / "apart", Console(file=io.StringIO()), target, names=["b-s0"])
    shared, own = (json.loads((o / "b-s0" / "t0" / "results.json").read_text()) for o in (out, tmp_path / "apart"))
    assert [r["overall"]["rounds"] for r in shared["runs"]] == [r["overall"]["rounds"] for r in own["runs"]]


def test_only_the_same_is_shared(settings: dict[str, Any], target: Target, tmp_path: Path) -> None:
    """Not a stage of other rows, of a baseline that came out otherwise, or whose drafter is damaged."""
    path, corpus, quiet = tmp_path / "grid.yaml", tmp_path / "corpus.jsonl", Console(file=io.StringIO())
    run_grid({"r-s0": Recipe.model_validate(settings)}, tmp_path / "recording", quiet, target)
    recorded = (tmp_path / "recording" / "recorded.jsonl").read_text()
    corpus.write_text(recorded)
    cells = {name: {"carry": {"interface": "projector", "projector": kind}} for name, kind in zip(
        "abcd", ["fc_copy", "bottleneck", "bottleneck", "fc_copy"], strict=True)}  # fmt: skip
    given = {**settings, "data": {**settings["data"], "corpus": str(corpus)}}
    path.write_text(yaml.safe_dump({**given, "cells": cells, "seeds": [0]}, sort_keys=False))
    recipes, out = Recipe.load_grid(path), tmp_path / "out"

    def made(cell: str) -> list[str]:
        """Of each stage the digests of its start and rows."""
        runs = [json.loads((out / f"{cell}-s0" / stage / "run.json").read_text()) for stage in module.STAGES]
        return [f"{record['start']} {record['corpus']}" for record in runs]

    run_grid(recipes, out, quiet, target, names=["a-s0", "b-s0"])
    assert made("a")[:2] == made("b")[:2]  # whatever the carry section says
    corpus.write_text("".join(recorded.splitlines(keepends=True)[:-1]))
    run_grid(recipes, out, quiet, target, names=["c-s0"])
    assert len({line.split()[1] for line in made("c")}) == 1 and made("c")[0] != made("a")[0]
    with pytest.raises(InputError, match=r"cell a-s0: .*other settings \(corpus\); name another --out, or delete"):
        run_grid(recipes, out, quiet, target, names=["a-s0"])
    corpus.write_text(recorded)
    for cell in "ab":
        weights = out / f"{cell}-s0" / "continued" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-9])
    run_grid(recipes, out, quiet, target, names=["d-s0"])
    assert made("d")[:2] == made("a")[:2] and (out / "d-s0" / "continued" / "train_log.jsonl").exists()
    assert any((out / "d-s0" / "continued").glob("checkpoint-*")) and not any(
        (out / "d-s0" / "baseline").glob("check*")
    )


def test_a_run_learns_from_its_own_prompts_only(settings: dict[str, Any], target: Target, tmp_path: Path) -> None:
    """A recording that answers others as well, held-out ones perhaps, is not trained on."""
    recipe = Recipe.model_validate(settings)
    record(target, load_prompts(tmp_path / "prompts.jsonl"), tmp_path / "out" / "recorded.jsonl", Sampling(0.7),
           recipe.record.max_new_tokens, recipe.seed)  # fmt: skip
    with pytest.raises(InputError, match=r"answers '.*', which is not among the prompts; name another --out"):
        run(recipe, tmp_path / "out", Console(file=io.StringIO()), target)
    assert not (tmp_path / "out" / "baseline").exists()


def test_markup_in_names_is_text(settings: dict[str, Any], target: Target, tmp_path: Path) -> None:
    (tmp_path / "[").mkdir()
    asked = tmp_path / "[" / "x].jsonl"  # rich would take [/x] for the end of a style
    asked.write_text((tmp_path / "prompts.jsonl").read_text())
    given = {**settings, "record": {"prompts": f"{tmp_path}/[/x].jsonl", "max_new_tokens": 12}}
    shown = io.StringIO()
    run(Recipe.model_validate(given), tmp_path / "out", Console(file=shown, width=300), target)
    assert "[/x].jsonl" in "".join(shown.getvalue().split())


def test_what_drafters_learnt_from_does_not_grow(settings: dict[str, Any], target: Target, tmp_path: Path) -> None:
    path, out, quiet = tmp_path / "grid.yaml", tmp_path / "out", Console(file=io.StringIO())
    path.write_text(yaml.safe_dump({**settings, "cells": {"a": {}, "b": {}}, "seeds": [0]}))
    recipes = Recipe.load_grid(path, ["train.steps=1"])
    run_grid(recipes, out, quiet, target, names=["a-s0"])
    before = (out / "recorded.jsonl").read_bytes()
    more = Recipe.load_grid(path, ["train.steps=1", "record.limit=6"])
    with pytest.raises(InputError, match=r"cell a-s0: .*another recipe \(record\.limit\)"):
        run_grid(more, out, quiet, target, names=["b-s0"])
    other = Recipe.load_grid(path, ["train.steps=1", "evaluate.limit=2"])
    with pytest.raises(InputError, match=r"cell a-s0: .*another recipe \(evaluate\.limit\)"):
        run_grid(other, out, quiet, target, names=["b-s0"])
    prompts = tmp_path / "prompts.jsonl"
    lines = prompts.read_text().splitlines(keepends=True)
    prompts.write_text("".join(lines) + json.dumps({"id": "new", "task": "qa", "prompt": "w5"}) + "\n")
    all_of_them = {name: r.model_copy(update={"record": r.record.model_copy(update={"limit": None})}) for name, r in
                   recipes.items()}  # fmt: skip
    with pytest.raises(InputError, match=r"learnt from .*recorded\.jsonl, which answers 4 prompts, but .* gives 9"):
        module.record_responses(all_of_them["a-s0"], target, out / "recorded.jsonl")
    assert (out / "recorded.jsonl").read_bytes() == before


def test_other_seeds_of_a_grid_learn_from_its_recording(
    settings: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    path, out, quiet = tmp_path / "grid.yaml", tmp_path / "out", Console(file=io.StringIO())
    path.write_text(yaml.safe_dump({**settings, "cells": {"a": {}}, "seeds": [0]}))
    run_grid(Recipe.load_grid(path, ["train.steps=1"]), out, quiet, target)
    before = (out / "recorded.jsonl").read_bytes()
    run_grid(Recipe.load_grid(path, ["train.steps=1", "seeds=[1]"]), out, quiet, target)
    assert (out / "recorded.jsonl").read_bytes() == before
    recipes = [Recipe.load(out / f"a-s{seed}" / "recipe.yaml") for seed in (0, 1)]
    assert [r.seed for r in recipes] == [0, 1] and recipes[0].data.corpus == recipes[1].data.corpus


def test_processes_share_a_grid(
    settings: dict[str, Any], target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another process holds is left to it; a recording is waited for."""
    path, out, shown = tmp_path / "grid.yaml", tmp_path / "out", io.StringIO()
    path.write_text(yaml.safe_dump({**settings, "cells": {"a": {}, "b": {}}, "seeds": [0]}))
    recipes = Recipe.load_grid(path, ["train.steps=1"])
    (out / "a-s0").mkdir(parents=True)
    with alone(out / "a-s0"):
        run_grid(recipes, out, Console(file=shown), target)
        with pytest.raises(InputError, match=r"another process works on .*a-s0; wait until it ends, or name another"):
            run(module.shared_corpus(recipes["a-s0"], out / "recorded.jsonl"), out / "a-s0", target=target)
        with pytest.raises(InputError, match="another process works on"):
            module.train(recipes["a-s0"], "baseline", out / "a-s0", corpus=out / "recorded.jsonl", target=target)
    assert "another process is at it" in shown.getvalue() and not any((out / "a-s0").iterdir())
    assert (out / "b-s0" / "report.html").exists()

    lines, real, asked = (out / "recorded.jsonl").read_text(), fcntl.flock, list[int]()
    with (out / "recorded.jsonl").open("rb") as held:
        real(held, fcntl.LOCK_EX)

        def flock(place: int, how: int) -> None:
            asked.append(how)
            if not how & fcntl.LOCK_NB:
                held.close()  # the other process ends
            real(place, how)

        monkeypatch.setattr(fcntl, "flock", flock)
        module.record_responses(recipes["a-s0"], target, out / "recorded.jsonl")
    assert asked == [fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_EX]
    assert (out / "recorded.jsonl").read_text() == lines


def test_a_run_may_be_moved_and_spelled_otherwise(
    settings: dict[str, Any], target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, quiet = tmp_path / "grid.yaml", Console(file=io.StringIO())
    path.write_text(yaml.safe_dump({**settings, "cells": {"a": {}}, "seeds": [0]}))
    monkeypatch.chdir(tmp_path)
    recipes = Recipe.load_grid(path, ["train.steps=1"])
    run_grid(recipes, Path("out"), quiet, target)
    results = (tmp_path / "out" / "grid-t0.json").read_text()
    monkeypatch.setattr(module, "train", None)
    run_grid(recipes, tmp_path / "out", quiet, target)
    (tmp_path / "out").rename(tmp_path / "moved")
    run_grid(recipes, Path("moved"), quiet, target)
    before, after = (json.loads(text)["runs"] for text in (results, (tmp_path / "moved/grid-t0.json").read_text()))
    assert before == after


def test_the_start_of_a_finished_baseline_is_not_needed(
    settings: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    quiet, out = Console(file=io.StringIO()), tmp_path / "out"
    run(Recipe.model_validate(settings), tmp_path / "first", quiet, target)
    (tmp_path / "first" / "baseline").rename(tmp_path / "start")
    begun = {**settings, "drafter": {**settings["drafter"], "start": str(tmp_path / "start")}}
    recipe = Recipe.model_validate(begun)
    run(recipe, out, quiet, target)
    shutil.rmtree(tmp_path / "start")
    assert run(recipe, out, quiet, target).exists()
    recorded = (out / "recorded.jsonl").read_text()
    (out / "recorded.jsonl").write_text(recorded.replace("[", "[9, ", 1))  # its rows still are
    with pytest.raises(InputError, match=r"baseline was trained with other settings \(corpus\)"):
        run(recipe, out, quiet, target)
    (out / "recorded.jsonl").write_text(recorded)
    (out / "baseline" / "finished").unlink()
    with pytest.raises(InputError, match=r"drafter\.start is not random"):
        run(recipe, out, quiet, target)


def test_a_run_begun_before_a_key_existed_goes_on(settings: dict[str, Any], target: Target, tmp_path: Path) -> None:
    recipe, out = Recipe.model_validate(settings), tmp_path / "out"
    run(recipe, out, Console(file=io.StringIO()), target)
    done = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    began = yaml.safe_load((out / "recipe.yaml").read_text())
    del (
        began["train"]["carryover"]["unroll"],
        began["drafter"]["start"],
        began["evaluate"]["stop_loops"],
        began["carry"],
    )
    (out / "recipe.yaml").write_text(yaml.safe_dump(began))
    record = json.loads((out / "carryover" / "run.json").read_text())
    del record["train"]["unroll"], record["drafter"]["start"], record["carry"]
    (out / "carryover" / "run.json").write_text(json.dumps(record))
    (out / "carryover" / "finished").unlink()
    run(recipe, out, Console(file=io.StringIO()), target)
    assert (out / "carryover" / "finished").exists()
    assert {path: path.stat().st_mtime_ns for path in done if "checkpoint" in str(path)} == {
        path: stamp for path, stamp in done.items() if "checkpoint" in str(path)
    }
    for section, key, value in (("drafter", "start", "target"), ("carry", "interface", "plain")):
        changed = recipe.model_copy(update={section: getattr(recipe, section).model_copy(update={key: value})})
        with pytest.raises(InputError, match=rf"another recipe \({section}\.{key}\)"):
            run(changed, out, Console(file=io.StringIO()), target)


def test_what_is_wrong_with_a_grid_is_named(settings: dict[str, Any], target: Target, tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"

    def load(**keys: Any) -> dict[str, Recipe]:
        path.write_text(yaml.safe_dump({**settings, **keys}))
        return Recipe.load_grid(path)

    assert list(load()) == [""]
    with pytest.raises(InputError, match="needs seeds"):
        load(cells={"a": {}})
    with pytest.raises(InputError, match="cells must map names"):
        load(seeds=[1])
    with pytest.raises(InputError, match=r"cell a: unknown key drafter\.layer"):
        load(cells={"a": {"drafter": {"layer": 2}}}, seeds=[0])
    with pytest.raises(InputError, match="is a grid"):
        Recipe.load(path)
    for cell in ("../a", "a/b", "a b", "a-s1", "", "a" * 101):
        with pytest.raises(InputError, match="cells name folders"):
            load(cells={cell: {}}, seeds=[0])
    for seeds in ([], [0, 0], [0, False], [0.0], "0"):
        with pytest.raises(InputError, match=r"needs seeds, a list of whole numbers|each seed once"):
            load(cells={"a": {}}, seeds=seeds)
    with pytest.raises(InputError, match="at least one cell"):
        load(cells={}, seeds=[0])
    with pytest.raises(InputError, match="the seeds of a grid are its key seeds"):
        load(cells={"a": {"seed": 3}}, seeds=[0])
    load(cells={"a": {}, "b": {}}, seeds=[0, 1])
    with pytest.raises(InputError, match="the seeds of a grid are its key seeds"):
        Recipe.load_grid(path, ["seed=3"])
    assert [r.seed for r in Recipe.load_grid(path, ["seeds=[4]", "train.steps=1"]).values()] == [4, 4]
    for section, change in {
        "record": {"record": {"temperature": 0.0}},
        "evaluate": {"evaluate": {"limit": 2}},
        r"data\.template": {"data": {"template": {"enable_thinking": False}}},
    }.items():
        with pytest.raises(InputError, match=f"b-s0 changes {section}, which"):
            run_grid(load(cells={"a": {}, "b": change}, seeds=[0]), tmp_path / "out", target=target)
    absent = {"data": {**settings["data"], "corpus": str(tmp_path / "none.jsonl")}}
    with pytest.raises(InputError, match=r"cell b-s0: data\.corpus names .*none\.jsonl"):
        run_grid(load(cells={"a": {}, "b": absent}, seeds=[0]), tmp_path / "out", target=target)
    absent = {"train": {"eval_steps": 1, "eval_prompts": str(tmp_path / "none.jsonl")}}
    with pytest.raises(InputError, match=r"cell b-s0: .*none\.jsonl"):
        run_grid(load(cells={"a": {}, "b": absent}, seeds=[0]), tmp_path / "out", target=target)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out" / "a-s0" / "baseline").mkdir(parents=True)
    for damage in (b"", b"target: [", b"\xff"):
        (tmp_path / "out" / "a-s0" / "recipe.yaml").write_bytes(damage)
        with pytest.raises(InputError, match=r"cell a-s0: .*recipe\.yaml is damaged"):
            run_grid(load(cells={"a": {}}, seeds=[0]), tmp_path / "out", target=target)
