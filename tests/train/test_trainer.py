"""The trainer: the loss falls, stages start where they should, and a resumed or split-up run gives the same weights."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny import tiny_target

from carryover.config import CarryConfig, Recipe
from carryover.data.corpus import load_corpus, pack
from carryover.decode.engine import Engine
from carryover.drafter.modeling import Drafter
from carryover.errors import InputError
from carryover.formats import load_drafter
from carryover.target import Target, default_device
from carryover.train.start import with_carry
from carryover.train.trainer import last_checkpoint, train


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama", vocab=40, layers=6)


@pytest.fixture(scope="module")
def corpus(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy responses of the tiny target."""
    path = tmp_path_factory.mktemp("corpus") / "recorded.jsonl"
    g = torch.Generator().manual_seed(0)
    lines = []
    for i in range(24):
        prompt = torch.randint(6, 39, (int(torch.randint(4, 9, (1,), generator=g)),), generator=g).tolist()
        response = Engine(target).generate(prompt, 12 + i % 7).tokens
        lines.append(json.dumps({"id": str(i), "task": "t", "prompt_ids": prompt, "response_ids": response}))
    path.write_text("\n".join(lines) + "\n")
    return path


def recipe(corpus: Path, tmp_path: Path, algorithm: str = "dflash", **train_keys: Any) -> Recipe:
    settings = {
        "target": "tiny", "seed": 3, "data": {"corpus": [str(corpus)], "max_length": 64},
        "drafter": {"algorithm": algorithm, "layers": 2, "block_size": 6, "captured": 2, "mask_token_id": 5},
        "train": {"steps": 8, "learning_rate": 0.01, "batch_size": 2, "anchors": 4, "logging_steps": 2, "save_steps": 3,
                  **train_keys},
    }  # fmt: skip
    if algorithm == "markov":
        settings["drafter"]["markov"] = {"rank": 4}
    path = tmp_path / f"{abs(hash(json.dumps(settings, default=str)))}.yaml"
    path.write_text(yaml.safe_dump(settings))
    return Recipe.load(path)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return Drafter.from_pretrained(folder).state_dict()


def log(folder: Path, key: str) -> list[float]:
    return [r[key] for r in map(json.loads, (folder / "train_log.jsonl").read_text().splitlines()) if key in r]


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_loss_falls_and_every_stage_starts_from_its_checkpoint(target: Target, corpus: Path, tmp_path: Path) -> None:
    r = recipe(corpus, tmp_path, "markov", steps=40)
    base = train(r, "baseline", tmp_path / "base", target=target, progress=False)
    ce = log(base, "cross_entropy")
    assert ce[-1] < 0.8 * ce[0]
    assert log(base, "l1")[-1] < log(base, "l1")[0]
    carried = train(r, "carryover", tmp_path / "carry", start=base, target=target, progress=False)
    continued = train(r, "continued", tmp_path / "cont", start=base, target=target, progress=False)
    assert log(carried, "cross_entropy")[0] < 0.9 * ce[0] and log(continued, "cross_entropy")[0] < 0.9 * ce[0]
    assert weights(carried)["carry.embedding"].abs().sum() > 0
    assert "carry.embedding" not in weights(continued)
    assert 0 <= log(carried, "rules_differ")[0] <= 1
    assert all(a >= 1 for a in log(carried, "first_draft_acceptance"))


@pytest.mark.parametrize("algorithm", ["dflash", "markov"])
def test_a_reduced_vocabulary_is_trained_and_kept_by_every_stage(
    algorithm: str, target: Target, corpus: Path, tmp_path: Path
) -> None:
    r = recipe(corpus, tmp_path, algorithm, steps=30)
    r = Recipe.model_validate({**r.model_dump(), "drafter": {**r.drafter.model_dump(), "draft_vocab_size": 12}})
    base = train(r, "baseline", tmp_path / "base", target=target, progress=False)
    kept = weights(base)["draft_vocab"]
    counts = torch.zeros(40, dtype=torch.long)
    for line in corpus.read_text().splitlines():
        for token in json.loads(line)["response_ids"]:
            counts[token] += 1
    assert len(kept) == 12 and set(target.stop_ids) <= set(kept.tolist())
    others = [i for i in kept.tolist() if i not in target.stop_ids]
    assert min(counts[others]) >= max(c for i, c in enumerate(counts.tolist()) if i not in kept)
    assert log(base, "cross_entropy")[-1] < 0.9 * log(base, "cross_entropy")[0]
    for stage in ("continued", "carryover"):
        out = train(r, stage, tmp_path / stage, start=base, target=target, progress=False)
        assert torch.equal(weights(out)["draft_vocab"], kept)
    whole = recipe(corpus, tmp_path, algorithm, steps=30)  # the start proposes twelve tokens, and this recipe says any
    with pytest.raises(InputError, match=r"draft_vocab_size 12, not 0"):
        train(whole, "carryover", tmp_path / "other", start=base, target=target, progress=False)
    ids = json.loads(corpus.read_text().splitlines()[0])["prompt_ids"]
    drafted = Engine(target, load_drafter(tmp_path / "carryover", target)).generate(ids, 12)
    assert drafted.tokens == Engine(target).generate(ids, 12).tokens
    assert {t for x in drafted.rounds for t in x.proposals} <= set(kept.tolist())


@pytest.mark.parametrize("stage", ["baseline", "continued", "carryover"])
def test_kept_features_change_nothing(
    stage: Any, target: Target, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over two epochs, interrupted in the first; the target reads each row once, and for carryover every time. Rows one
    at a time: beside others, padding rounds differently."""
    short = recipe(corpus, tmp_path, steps=2)
    start = None if stage == "baseline" else train(short, "baseline", tmp_path / "b", target=target, progress=False)
    plain = recipe(corpus, tmp_path, "dflash", steps=20, batch_size=1)
    kept = recipe(corpus, tmp_path, "dflash", steps=20, batch_size=1, keep_features=True)
    whole = train(plain, stage, tmp_path / "whole", start=start, target=target, progress=False)
    calls, forward = [], target.forward

    def counted(tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tokens.shape[0])
        if len(calls) == 7 and stage != "carryover":
            raise KeyboardInterrupt  # as if killed: nothing of this row is stored
        return forward(tokens, *args, **kwargs)

    monkeypatch.setattr(target, "forward", counted)
    out = tmp_path / "kept"
    try:
        train(kept, stage, out, start=start, target=target, progress=False)
    except KeyboardInterrupt:
        train(kept, stage, out, start=start, resume=True, target=target, progress=False)
    assert equal(weights(whole), weights(out))
    rows = len(pack(load_corpus(corpus, target, kept.data, quiet=True), 64, kept.seed))
    if stage != "carryover":
        assert len(calls) == rows + 1 < 20  # the interrupted one again
    assert not list(out.glob("features-*"))
    (out / "features-0.bin").write_bytes(b"left by a kill")
    train(kept, stage, out, start=start, resume=True, target=target, progress=False)
    assert not list(out.glob("features-*")) and equal(weights(whole), weights(out))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("stage", ["baseline", "carryover"])
def test_resume_equals_an_uninterrupted_run(
    stage: Any, optimizer: str, target: Target, corpus: Path, tmp_path: Path
) -> None:
    short = recipe(corpus, tmp_path, steps=2)
    start = (
        train(short, "baseline", tmp_path / "start", target=target, progress=False) if stage == "carryover" else None
    )
    for save_steps, last in ((3, 6), (5, 5)):  # in the middle of an epoch, and at its end
        r = recipe(corpus, tmp_path, optimizer=optimizer, save_steps=save_steps, proposal_temperature=1.0, unroll=2)
        whole = train(r, stage, tmp_path / f"whole{last}", start=start, target=target, progress=False)
        kept = tmp_path / f"cut{last}"
        train(r, stage, kept, start=start, target=target, progress=False)
        (kept / "checkpoint-8" / "trainer_state.json").write_text("{")  # as if killed while writing step 8
        assert last_checkpoint(kept) == kept / f"checkpoint-{last}"
        train(r, stage, kept, start=start, resume=True, target=target, progress=False)
        assert equal(weights(whole), weights(kept))
        assert log(kept, "step") == log(whole, "step")  # none twice


def test_accumulating_micro_batches_equals_one_larger_batch(target: Target, corpus: Path, tmp_path: Path) -> None:
    losses, results = [], []
    for name, size, accumulation in (("one", 4, 1), ("split", 1, 4)):
        r = recipe(corpus, tmp_path, steps=3, batch_size=size, accumulation=accumulation, anchors=1000, logging_steps=1)
        folder = train(r, "baseline", tmp_path / name, target=target, progress=False)
        losses.append(log(folder, "loss"))
        results.append(weights(folder))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    for key in results[0]:
        assert torch.allclose(results[0][key], results[1][key], atol=2e-4), key


def test_a_baseline_begins_where_another_drafter_ended(target: Target, corpus: Path, tmp_path: Path) -> None:
    shape = {"algorithm": "dflash", "layers": 2, "block_size": 6, "captured": 2, "mask_token_id": 5}
    r = recipe(corpus, tmp_path, "markov", steps=30, loss={"ce": 0.0, "l1": 0.0, "kl": 1.0})
    small = r.model_copy(update={"drafter": r.drafter.model_copy(update={"draft_vocab_size": 12})})
    markov = train(small, "baseline", tmp_path / "markov", target=target, progress=False)
    kl = log(markov, "kl")
    assert 0 < kl[-1] < 0.9 * kl[0] and log(markov, "l1") == []
    plain = recipe(corpus, tmp_path, steps=2, learning_rate=1e-9)
    start = type(plain.drafter)(**{**shape, "slots": "fill_in", "draft_vocab_size": 12, "start": str(markov)})
    begun = plain.model_copy(update={"drafter": start})
    out = train(begun, "baseline", tmp_path / "dflash", target=target, progress=False)
    theirs, mine = weights(markov), weights(out)
    assert torch.equal(mine["draft_vocab"], theirs["draft_vocab"])
    assert all(torch.allclose(value, theirs[key], atol=1e-6) for key, value in mine.items())
    assert load_drafter(out, target).config.slots == "fill_in"
    fresh = plain.model_copy(update={"drafter": start.model_copy(update={"start": "random"})})
    without = train(fresh, "baseline", tmp_path / "fresh", target=target, progress=False)
    assert log(out, "cross_entropy")[0] < log(without, "cross_entropy")[0]
    moved = shutil.copytree(markov, tmp_path / "moved")  # what the start is matters to a resumed run, not where it lies
    again = begun.model_copy(update={"drafter": start.model_copy(update={"start": str(moved)})})
    assert train(again, "baseline", out, resume=True, target=target, progress=False) == out
    with pytest.raises(InputError, match="trained with other settings"):
        train(fresh, "baseline", out, resume=True, target=target, progress=False)
    typo = begun.model_copy(update={"drafter": start.model_copy(update={"start": "tagret"})})
    with pytest.raises(InputError, match=r"drafter\.start is not random, target or a fitting drafter: .*'tagret'"):
        train(typo, "baseline", tmp_path / "typo", target=target, progress=False)
    assert not (tmp_path / "typo").exists()


def test_carry_starts_as_the_same_function(target: Target, corpus: Path, tmp_path: Path) -> None:
    base = train(recipe(corpus, tmp_path, steps=2), "baseline", tmp_path / "b", target=target, progress=False)
    r = recipe(corpus, tmp_path)
    carrying = with_carry(Drafter.from_pretrained(base), r)
    features = torch.randn(1, 3, 2 * target.hidden_size)
    assert torch.equal(carrying.carried(features), carrying.context(features))
    with pytest.raises(InputError, match="already carries"):
        with_carry(carrying, r)


def test_hints_start_as_the_baseline_and_are_learnt(target: Target, corpus: Path, tmp_path: Path) -> None:
    r = recipe(corpus, tmp_path, steps=3, logging_steps=1)
    r = r.model_copy(update={"carry": CarryConfig(interface="hint", hint="target_top1")})
    base = train(r, "baseline", tmp_path / "base", target=target, progress=False)
    fresh = with_carry(Drafter.from_pretrained(base), r)
    assert weights(base).keys() == fresh.state_dict().keys() - {"carry.scale"} and fresh.carry.scale == 0
    hinting = train(r, "carryover", tmp_path / "hint", start=base, target=target, progress=False)
    assert Drafter.from_pretrained(hinting).config.carry_hint == "target_top1"
    assert log(hinting, "hint_scale")[-1] == pytest.approx(float(weights(hinting)["carry.scale"])) != 0


def test_wrong_starts_are_refused_and_nothing_is_overwritten(target: Target, corpus: Path, tmp_path: Path) -> None:
    r = recipe(corpus, tmp_path, steps=3)
    with pytest.raises(InputError, match="--start"):
        train(r, "carryover", tmp_path / "x", target=target)
    base = train(r, "baseline", tmp_path / "y", target=target, progress=False)
    before = weights(base)
    with pytest.raises(InputError, match="--resume"):
        train(r, "baseline", base, target=target)
    with pytest.raises(InputError, match="continued"):
        train(r, "baseline", tmp_path / "z", start=base, target=target)
    assert equal(before, weights(base))
    assert last_checkpoint(base) == base / "checkpoint-3"
    damaged = base / "checkpoint-3" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:100])
    recorded = (base / "recipe.yaml").read_text()
    with pytest.raises(InputError, match=r"model\.safetensors cannot be read"):
        train(r, "baseline", base, resume=True, target=target)
    assert (base / "recipe.yaml").read_text() == recorded and equal(before, weights(base))


def test_later_stages_take_no_other_drafter_than_their_start(target: Target, corpus: Path, tmp_path: Path) -> None:
    """Settings of the drafter that a start cannot follow are named, not dropped; what is left out is the start's."""
    r = recipe(corpus, tmp_path, steps=1)
    base = train(r, "baseline", tmp_path / "base", target=target, progress=False)
    config = Drafter.from_pretrained(base).config
    own = {"intermediate_size": config.intermediate_size, "num_attention_heads": config.num_attention_heads}
    same = r.model_copy(update={"drafter": r.drafter.model_copy(update=own)})
    train(same, "continued", tmp_path / "same", start=base, target=target, progress=False)
    others: list[tuple[dict[str, Any], str]] = [
        ({"intermediate_size": 24}, "intermediate_size"),
        ({"num_attention_heads": 2}, "num_attention_heads"),
        ({"head_dim": 4}, "head_dim"),
        ({"rope_theta": 77.0}, r"rope_theta [0-9.]+, not 77\.0"),
        ({"sliding_causal": True}, "sliding_causal False, not True"),
        ({"layer_types": ("sliding_attention",) * r.drafter.layers, "sliding_window": 8}, "layer_types .*sliding_win"),
    ]
    for change, words in others:
        other = r.model_copy(update={"drafter": r.drafter.model_copy(update=change)})
        for stage in ("continued", "carryover"):
            with pytest.raises(InputError, match=rf"is not what the recipe's drafter section describes \(.*{words}"):
                train(other, stage, tmp_path / "other", start=base, target=target)  # type: ignore[arg-type]
    assert not (tmp_path / "other").exists()


def test_the_folder_of_a_run_is_no_stage(target: Target, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "baseline").mkdir(parents=True)
    (tmp_path / "run" / "recipe.yaml").write_text("mine")
    for resume in (False, True):
        with pytest.raises(InputError, match=r"is the folder of `carryover run`, not of one stage; name another"):
            train(recipe(corpus, tmp_path, steps=1), "baseline", tmp_path / "run", resume=resume, target=target)
    assert (tmp_path / "run" / "recipe.yaml").read_text() == "mine"


def test_a_drafter_that_does_not_fit_into_memory_is_named(target: Target, corpus: Path, tmp_path: Path) -> None:
    r = recipe(corpus, tmp_path, steps=1)
    huge = r.model_copy(update={"drafter": r.drafter.model_copy(update={"intermediate_size": 10**13})})
    with pytest.raises(InputError, match="a drafter of this size cannot be made"):
        train(huge, "baseline", tmp_path / "huge", target=target)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_damaged_optimizer_is_named_and_the_checkpoint_before_it_is_enough(
    name: str, target: Target, corpus: Path, tmp_path: Path
) -> None:
    r = recipe(corpus, tmp_path)
    whole = train(r, "baseline", tmp_path / "whole", target=target, progress=False)
    out = train(r, "baseline", tmp_path / "cut", target=target, progress=False)
    file = out / "checkpoint-8" / name
    for damage in (file.read_bytes()[: file.stat().st_size // 2], b"", None):
        file.write_bytes(damage) if damage is not None else file.unlink()
        with pytest.raises(InputError, match=rf"{name} is missing or damaged; delete the folder .*checkpoint-8"):
            train(r, "baseline", out, resume=True, target=target, progress=False)
    shutil.rmtree(out / "checkpoint-8")
    assert equal(weights(train(r, "baseline", out, resume=True, target=target, progress=False)), weights(whole))


def test_another_run_is_not_gone_on_with(target: Target, corpus: Path, tmp_path: Path) -> None:
    r = recipe(corpus, tmp_path, steps=3)
    base = train(r, "baseline", tmp_path / "base", target=target, progress=False)
    other = train(recipe(corpus, tmp_path, steps=2), "baseline", tmp_path / "other", target=target, progress=False)
    grown = tmp_path / "grown.jsonl"
    grown.write_text(corpus.read_text() + corpus.read_text().splitlines()[0] + "\n")
    out = train(r, "continued", tmp_path / "out", start=base, target=target, progress=False)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    changed: list[tuple[Recipe, Any, Path, Path, str]] = [
        (recipe(corpus, tmp_path, steps=3, anchors=5), "continued", base, corpus, r"train\.anchors"),
        (recipe(corpus, tmp_path, steps=5), "continued", base, corpus, r"train\.steps"),
        (r, "continued", other, corpus, "start"),
        (r, "continued", base, grown, "corpus"),
        (r, "carryover", base, corpus, "stage"),
    ]
    for settings, stage, start, data, message in changed:
        with pytest.raises(InputError, match=rf"other settings \(.*{message}.*name another --out"):
            train(settings, stage, out, start, resume=True, corpus=data, target=target, progress=False)
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    update = {"evaluate": r.evaluate.model_copy(update={"limit": 3}), "carry": CarryConfig(interface="projector")}
    unrelated = r.model_copy(update=update)  # a stage without carry does not depend on the carry section ...
    record = json.loads((out / "run.json").read_text())
    assert "carry" not in record
    record["carry"] = {"interface": "embedding"}  # ... which older runs recorded all the same
    (out / "run.json").write_text(json.dumps(record))
    train(unrelated, "continued", out, base, resume=True, target=target, progress=False)
    assert equal(weights(out), Drafter.from_pretrained(out / "checkpoint-3").state_dict())


@pytest.mark.parametrize("steps", [3, 12])  # within the first epoch, and at the end of one
def test_resuming_a_finished_run_changes_nothing(steps: int, target: Target, corpus: Path, tmp_path: Path) -> None:
    r = recipe(corpus, tmp_path, steps=steps, schedule="constant_with_warmup", save_steps=2)
    out = train(r, "baseline", tmp_path / "out", target=target, progress=False)
    before, logged = weights(out), log(out, "step")
    for lost in (False, True):  # the second time as if killed before the drafter was written
        if lost:
            (out / "model.safetensors").unlink()
        train(r, "baseline", out, resume=True, target=target, progress=False)
        assert equal(weights(out), before) and last_checkpoint(out) == out / f"checkpoint-{steps}"
        assert [s for s in log(out, "step") if s > steps] == [] and max(logged) == steps


def test_out_that_would_lose_something_is_refused(target: Target, corpus: Path, tmp_path: Path) -> None:
    r = recipe(corpus, tmp_path, steps=2)
    base = train(r, "baseline", tmp_path / "base", target=target, progress=False)
    with pytest.raises(InputError, match="--out and --start are both"):
        train(r, "continued", base, start=base, target=target)
    for state in ("{", "{}", "null", '{"global_step": "x", "max_steps": 2}'):
        (base / "checkpoint-2" / "trainer_state.json").write_text(state)
        assert last_checkpoint(base) is None
        with pytest.raises(InputError, match="already holds checkpoints of a run"):
            train(r, "baseline", base, target=target)
    shutil.rmtree(base / "checkpoint-2")
    for resume in (False, True):
        with pytest.raises(InputError, match="name another --out"):
            train(r, "baseline", base, resume=resume, target=target)
    assert Drafter.from_pretrained(base)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="is a file"):
        train(r, "baseline", tmp_path / "file", target=target)


def test_checkpoints_without_a_state_are_skipped_and_kept(tmp_path: Path) -> None:
    good = '{"global_step": 2, "max_steps": 4}'
    for name, state in (
        ("checkpoint-2", good),
        ("checkpoint-4", '{"tor'),
        ("checkpoint-best", good),
        ("checkpoint-9z", good),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").write_text(state)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    assert (tmp_path / "checkpoint-4" / "trainer_state.json").read_text() == '{"tor'


def test_ctrl_c_finishes_the_step_and_leaves_a_checkpoint(
    target: Target, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os
    import signal

    from carryover.train import trainer as module

    r = recipe(corpus, tmp_path, save_steps=100)
    compute = module.DrafterTrainer.compute_loss
    calls = []

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return compute(self, *args, **kwargs)

    monkeypatch.setattr(module.DrafterTrainer, "compute_loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(r, "baseline", tmp_path / "stopped", target=target, progress=False)
    assert last_checkpoint(tmp_path / "stopped") == tmp_path / "stopped" / "checkpoint-4"
    monkeypatch.undo()
    train(r, "baseline", tmp_path / "stopped", resume=True, target=target, progress=False)
    summaries = log(tmp_path / "stopped", "train_runtime")
    assert len(summaries) == 1 and log(tmp_path / "stopped", "step")[-1] > 4  # that of the interrupted part is gone
    train(r, "baseline", tmp_path / "stopped", resume=True, target=target, progress=False)
    assert log(tmp_path / "stopped", "train_runtime") == summaries  # and that of a finished one stays
    whole = train(r, "baseline", tmp_path / "whole", target=target, progress=False)
    assert equal(weights(whole), weights(tmp_path / "stopped"))


def test_the_target_is_loaded_beside_the_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_device() == ("cuda:0" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert default_device() == "cuda:0"
    monkeypatch.setenv("LOCAL_RANK", "3")  # as torchrun sets it
    assert default_device() == "cuda:3"


def test_a_random_interface_depends_on_the_seed_alone(target: Target, corpus: Path, tmp_path: Path) -> None:
    """A bottleneck's: whatever drew random numbers before, and an interrupted stage goes on."""
    r = recipe(corpus, tmp_path, steps=4, save_steps=2)
    r = r.model_copy(update={"carry": CarryConfig(interface="projector", projector="bottleneck")})
    base = train(r, "baseline", tmp_path / "base", target=target, progress=False)
    drafter = Drafter.from_pretrained(base)
    torch.manual_seed(1)
    first = with_carry(drafter, r).state_dict()
    torch.manual_seed(2)
    assert equal(with_carry(drafter, r).state_dict(), first)
    whole = train(r, "carryover", tmp_path / "whole", base, target=target, progress=False)
    shutil.copytree(whole, tmp_path / "cut", ignore=shutil.ignore_patterns("checkpoint-4"))
    (tmp_path / "cut" / "model.safetensors").unlink()
    cut = train(r, "carryover", tmp_path / "cut", base, resume=True, target=target, progress=False)
    assert equal(weights(cut), weights(whole))


def test_training_that_diverges_stops(target: Target, corpus: Path, tmp_path: Path) -> None:
    r = recipe(corpus, tmp_path, learning_rate=1e30, max_grad_norm=1e30, save_steps=500)
    with pytest.raises(InputError, match=r"training diverged: .* is (nan|inf) at step \d; lower the learning rate"):
        train(r, "baseline", tmp_path / "out", target=target, progress=False)
    assert not (tmp_path / "out" / "model.safetensors").exists()
    r = recipe(corpus, tmp_path, learning_rate=1e30, max_grad_norm=1e30, logging_steps=500)
    for _ in range(2):  # not even when nothing was logged, nor by going on
        with pytest.raises(InputError, match="training diverged"):
            train(r, "baseline", tmp_path / "silent", resume=True, target=target, progress=False)
        assert not any((tmp_path / "silent").rglob("model.safetensors"))


def test_a_missing_development_file_is_named_before_the_folder_is_claimed(
    target: Target, corpus: Path, tmp_path: Path
) -> None:
    r = recipe(corpus, tmp_path, eval_steps=2, eval_prompts=str(tmp_path / "none.jsonl"))
    with pytest.raises(InputError, match=r"none\.jsonl"):
        train(r, "baseline", tmp_path / "out", target=target, progress=False)
    assert not (tmp_path / "out").exists()


def test_others_may_read_a_drafter(target: Target, corpus: Path, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        out = train(recipe(corpus, tmp_path, steps=1), "baseline", tmp_path / "out", target=target, progress=False)
    finally:
        os.umask(before)
    assert (out / "model.safetensors").stat().st_mode & 0o777 == 0o644
