"""The command line: what works end to end on a tiny target, and that mistakes are one sentence and the right code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import random_drafter
from tiny import save_target, tiny_target
from typer.testing import CliRunner

import carryover
from carryover import cli
from carryover.decode.engine import Engine
from carryover.formats import load_drafter, save_drafter
from carryover.target import Target

GOLDEN = Path(__file__).parent / "golden"


def call(*arguments: Any, code: int = 0) -> str:
    """Runs a command, expects its exit code, and returns stdout; for code 2 the one sentence on stderr."""
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    if code != 2:
        return result.stdout
    assert "Traceback" not in result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr


class Files:
    """A saved tiny target, two drafters for it, prompts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = save_target(tiny_target(), folder / "target")
        fits = Target.load(self.target)
        known = {"max_position_embeddings": fits.max_length, "target_fingerprint": fits.fingerprint()}
        self.base, self.carry = folder / "base", folder / "carry"
        save_drafter(random_drafter(1, **known), self.base)
        save_drafter(random_drafter(2, carry="embedding", **known), self.carry)
        self.prompts = folder / "prompts.jsonl"
        rows = [{"id": f"p{i}", "task": ("qa", "rag")[i % 2], "prompt": f"w{i + 7} w{2 * i + 9}"} for i in range(6)]
        self.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("cli"))


# ---- what works ----------------------------------------------------------------------------------------------------
def test_evaluate_and_report(files: Files, tmp_path: Path) -> None:
    command = ("evaluate", "--target", files.target, "--drafter", files.base, "--drafter", files.carry, "--prompts",
               files.prompts, "--out", tmp_path, "--limit", 4, "--max-new-tokens", 8, "--carry-off")  # fmt: skip
    shown = call(*command)
    assert "autoregressive" in shown and "identical" in shown and "carry against base" in " ".join(shown.split())
    results = json.loads((tmp_path / "results.json").read_text())
    assert [run["name"] for run in results["runs"]] == ["autoregressive", "base", "carry (carry off)", "carry"]
    assert results["runs"][3]["drafter"] == str(files.carry) and results["runs"][0]["overall"]["prompts"] == 4
    assert json.loads(call(*command, "--json")) == results  # finished: read again, and nothing but JSON on stdout
    assert str(tmp_path / "report.html") in "".join(call("report", tmp_path).split("\n"))
    assert "carry (carry off)" in (tmp_path / "report.html").read_text()


def test_evaluate_one_task(files: Files, tmp_path: Path) -> None:
    call("evaluate", "--target", files.target, "--prompts", files.prompts, "--out", tmp_path, "--task", "rag",
         "--max-new-tokens", 4)  # fmt: skip
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results["runs"][0]["tasks"]) == ["rag"] and results["runs"][0]["overall"]["prompts"] == 3
    assert results["comparisons"] == []


def test_generate_prints_what_the_engine_decodes(files: Files, tmp_path: Path) -> None:
    target = Target.load(files.target)
    assert target.tokenizer is not None
    ids = cli_prompt_ids(target, "w8 w9")
    expected = Engine(target, load_drafter(files.carry, target)).generate(ids, 10)
    text = target.tokenizer.decode(expected.tokens, skip_special_tokens=True)
    plainly = ("generate", "--target", files.target, "--prompt", "w8 w9", "--max-new-tokens", 10)
    command, trace = (*plainly, "--drafter", files.carry), tmp_path / "trace.jsonl"
    assert call(*command, "--trace", trace) == text + "\n"
    rounds = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [(r["proposals"], r["accepted"], r["committed"], r["carried"]) for r in rounds] == [
        (r.proposals, r.accepted, r.committed, r.carried) for r in expected.rounds
    ]
    record = json.loads(call(*command, "--json"))
    assert record["text"] == text and record["token_ids"] == expected.tokens
    assert record["acceptance_length"] == sum(len(r.committed) for r in expected.rounds) / len(expected.rounds)
    assert call(*plainly) == text + "\n"


def test_generate_several_turns_and_penalties(files: Files, tmp_path: Path) -> None:
    from carryover.data.chat import conversation, render_prompt
    from carryover.decode.processors import Penalties

    target = Target.load(files.target)
    assert target.tokenizer is not None
    engine = Engine(target, load_drafter(files.carry, target), penalties=Penalties(1.2, 0.5, 0.25, 3))
    turns, replies, rounds = ["w8 w9", "w10", "w11 w12"], [], 0
    for _ in turns:
        generation = engine.generate(render_prompt(target.tokenizer, conversation(turns, replies)), 10)
        replies.append(target.tokenizer.decode(generation.tokens, skip_special_tokens=True))
        rounds += len(generation.rounds)
    command = ("generate", "--target", files.target, "--drafter", files.carry, "--max-new-tokens", 10,
               *(part for turn in turns for part in ("--prompt", turn)), "--repetition-penalty", 1.2,
               "--presence-penalty", 0.5, "--frequency-penalty", 0.25, "--min-new-tokens", 3)  # fmt: skip
    trace = tmp_path / "trace.jsonl"
    assert call(*command, "--trace", trace) == "".join(reply + "\n" for reply in replies)
    assert call(*command, "--no-stream") == "".join(reply + "\n" for reply in replies)
    assert [json.loads(line)["text"] for line in call(*command, "--json").splitlines()] == replies
    assert len(trace.read_text().splitlines()) == rounds
    assert "repetition penalty must be above 0" in call(*command, "--repetition-penalty", 0, code=2)
    call(*command, "--proposals", 2, "--trace", trace)
    assert max(len(json.loads(line)["proposals"]) for line in trace.read_text().splitlines()) == 2
    assert "proposals must be 1 to" in call(*command, "--proposals", 99, code=2)
    assert "name one with --drafter" in call(*command[:3], "--prompt", "w8", "--proposals", 2, code=2)


def test_a_drafter_with_hints(files: Files, tmp_path: Path) -> None:
    """Checked, converted there and back, and decoded with few of its rows."""
    fits = Target.load(files.target)
    known = {"max_position_embeddings": fits.max_length, "target_fingerprint": fits.fingerprint()}
    save_drafter(random_drafter(3, carry="hint", carry_hint="target_top1", **known), tmp_path / "hint")
    call("check", tmp_path / "hint", "--target", files.target)
    call("convert", tmp_path / "hint", tmp_path / "zlab", "--to", "zlab")
    before, after = load_drafter(tmp_path / "hint"), load_drafter(tmp_path / "zlab")
    assert (after.config.carry, after.config.carry_hint) == ("hint", "target_top1")
    assert torch.equal(after.carry.scale, before.carry.scale) and before.carry.scale != 0
    results = json.loads(call(
        "evaluate", "--target", files.target, "--drafter", tmp_path / "zlab", "--prompts", files.prompts, "--out",
        tmp_path / "run", "--limit", 2, "--max-new-tokens", 8, "--carry-rows", 0, "--carry-rows", 1, "--json",
    ))  # fmt: skip
    assert [run["name"] for run in results["runs"][1:]] == ["zlab (0 carry rows)", "zlab (1 carry row)", "zlab"]
    assert all(run["overall"]["divergent"] == 0 for run in results["runs"])


def cli_prompt_ids(target: Target, text: str) -> list[int]:
    from carryover.data.chat import render_prompt

    assert target.tokenizer is not None
    return render_prompt(target.tokenizer, [text])


def test_record_then_train(files: Files, tmp_path: Path) -> None:
    out = tmp_path / "recorded.jsonl"
    command = ("record", "--target", files.target, "--prompts", files.prompts, "--out", out, "--max-new-tokens", 12)
    assert "6 responses written" in call(*command)
    assert "0 responses written, 6 were there" in call(*command)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"target: {files.target}\ndata: {{corpus: {out}, max_length: 64}}\n"
        "drafter: {algorithm: dflash, layers: 1, block_size: 4, captured: 2, mask_token_id: 6}\n"
        "train: {anchors: 4, baseline: {steps: 9}, carryover: {steps: 1}}\n"
    )
    call("train", recipe, "--stage", "baseline", "--out", tmp_path / "b", "--set", "train.baseline.steps=1")
    call("train", recipe, "--stage", "carryover", "--out", tmp_path / "c", "--start", tmp_path / "b")
    assert load_drafter(tmp_path / "c").config.carry == "embedding"
    refused = call("train", recipe, "--stage", "baseline", "--out", tmp_path / "b", code=2)
    assert "already holds checkpoints" in refused


def test_check(files: Files, tmp_path: Path) -> None:
    assert "fits" in call("check", files.base, "--target", files.target)
    other = tmp_path / "other"
    save_drafter(random_drafter(0, vocab_size=100, num_target_layers=9), other)
    shown = call("check", other, "--target", files.target, code=1)
    assert "100 rows" in shown and "9 layers" in shown and shown.count("mismatch:") == 2
    record = json.loads(call("check", other, "--target", files.target, "--json", code=1))
    assert len(record["mismatches"]) == 2


def test_convert_there_and_back(files: Files, tmp_path: Path) -> None:
    call("convert", files.carry, tmp_path / "zlab", "--to", "zlab")
    call("convert", tmp_path / "zlab", tmp_path / "back", "--to", "carryover")
    before, after = load_drafter(files.carry).state_dict(), load_drafter(tmp_path / "back").state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    call("convert", files.carry, tmp_path / "half", "--to", "carryover", "--dtype", "bfloat16")
    half = load_drafter(tmp_path / "half").state_dict()
    assert before.keys() == half.keys() and half["fc.weight"].dtype == torch.bfloat16
    assert all(torch.equal(half[k], before[k].bfloat16()) for k in before if before[k].is_floating_point())


def test_convert_to_fewer_tokens(files: Files, tmp_path: Path) -> None:
    corpus = tmp_path / "recorded.jsonl"
    responses = [[9, 9, 12, 2], [9, 12, 30, 2]]
    corpus.write_text("".join(json.dumps({"prompt_ids": [7, 8], "response_ids": r}) + "\n" for r in responses))
    command = ["convert", files.carry, tmp_path / "few", "--to", "carryover", "--draft-vocab", 3]
    assert "needs --target and --corpus" in call(*command, code=2)
    assert "more than the target's 96" in call(*command[:-1], 97, "--target", files.target, "--corpus", corpus, code=2)
    assert "name --draft-vocab too" in call(*command[:-2], "--corpus", corpus, code=2)
    call(*command, "--target", files.target, "--corpus", corpus)
    kept = load_drafter(tmp_path / "few").draft_vocab
    assert kept is not None and kept.tolist() == [2, 9, 12]  # the end token and the two most frequent ones
    answer = ("generate", "--target", files.target, "--prompt", "w9 w10", "--max-new-tokens", 12, "--json")
    assert (
        json.loads(call(*answer, "--drafter", tmp_path / "few"))["token_ids"] == json.loads(call(*answer))["token_ids"]
    )


def test_parity(tmp_path: Path) -> None:
    cases = sorted(path.parent for path in GOLDEN.glob("*/case.json"))[:1]
    assert cases
    assert "passed" in call("parity", *cases)
    assert "passed" in call("parity", GOLDEN / "README.md", *cases)  # as `tests/golden/*` gives them
    assert "is a file; name the folder" in call("parity", GOLDEN / "README.md", code=2)
    broken = tmp_path / "broken"
    shutil.copytree(cases[0], broken)
    from safetensors.torch import load_file, save_file

    io = load_file(broken / "io.safetensors")
    io["expected_hidden"] = io["expected_hidden"] + 1e-3
    save_file(io, broken / "io.safetensors")
    assert "FAILED" in call("parity", broken, code=1)
    assert json.loads(call("parity", broken, "--json", code=1))[0]["passed"] is False


def test_lab_prompts(tmp_path: Path) -> None:
    call("lab", "--prompts-only", "--out", tmp_path, "--train-prompts", 9, "--eval-prompts", 8)
    train = [json.loads(line)["prompt"] for line in (tmp_path / "train_prompts.jsonl").read_text().splitlines()]
    held_out = [json.loads(line)["prompt"] for line in (tmp_path / "eval_prompts.jsonl").read_text().splitlines()]
    assert len(set(train)) == 9 and len(set(held_out)) == 8 and not set(train) & set(held_out)
    again = ("lab", "--prompts-only", "--out", tmp_path, "--eval-prompts", 8, "--train-prompts")
    call(*again, 9)
    assert "holds other prompts than these 10; name another --out" in call(*again, 10, code=2)
    assert len((tmp_path / "train_prompts.jsonl").read_text().splitlines()) == 9


def test_version() -> None:
    assert call("--version") == f"carryover {carryover.__version__}\n"


# ---- what is wrong -------------------------------------------------------------------------------------------------
def test_missing_files(files: Files, tmp_path: Path) -> None:
    generate = ("generate", "--target", files.target, "--prompt", "w8")
    assert "nowhere" in call("generate", "--target", tmp_path / "nowhere", "--prompt", "w8", code=2)
    assert "nowhere" in call(*generate, "--drafter", tmp_path / "nowhere", code=2)
    evaluate = ("evaluate", "--target", files.target, "--out", tmp_path / "out", "--prompts")
    assert "nowhere.jsonl" in call(*evaluate, tmp_path / "nowhere.jsonl", code=2)
    assert "no prompts of task 'maths'" in call(*evaluate, files.prompts, "--task", "maths", code=2)
    assert "nowhere" in call("report", tmp_path / "nowhere", code=2)
    assert "no target 'smolm2'; did you mean smollm2?" in call(
        "generate", "--target", "smolm2", "--prompt", "w", code=2
    )
    missing = call(*evaluate, tmp_path / "lab" / "eval_prompts.jsonl", code=2)
    assert f"`carryover lab --prompts-only --out {tmp_path / 'lab'}` writes the lab's" in missing
    assert "nowhere" in call("parity", tmp_path / "nowhere", code=2)
    assert "nowhere" in call("train", tmp_path / "nowhere", "--stage", "baseline", "--out", tmp_path / "o", code=2)
    suites = "gsm8k_dev, gsm8k_test, gsm8k_train, smollm2_demo"
    assert f"no packaged suite of that name ({suites})" in call(*evaluate, "smollm2_dem", code=2)


def test_a_trace_that_cannot_be_written_is_named_before_decoding(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "join", lambda *args: pytest.fail("decoded"))
    for place in (tmp_path / "nowhere" / "t.jsonl", tmp_path):
        assert str(place) in call("generate", "--target", files.target, "--prompt", "w8", "--trace", place, code=2)


def test_seed_and_device_out_of_range(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = ("generate", "--target", files.target, "--prompt", "w8")
    for seed in (-1, 2**32):
        result = CliRunner().invoke(cli.app, [*map(str, generate), "--seed", str(seed)])
        assert result.exit_code == 2 and "--seed" in result.stderr and "Traceback" not in result.output

    assert "there is no device 'gpu'; name cpu, cuda" in call(*generate, "--device", "gpu", code=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "'cuda' needs a CUDA build of torch and a GPU" in call(*generate, "--device", "cuda", code=2)


def test_prompts_that_cannot_be_decoded(files: Files) -> None:
    generate = ("generate", "--target", files.target, "--prompt")
    assert "prompt is empty" in call(*generate, " ", code=2)
    assert "context of 512" in call(*generate, " ".join(["w9"] * 600), code=2)


def test_settings_that_make_no_sense(files: Files) -> None:
    generate = ("generate", "--target", files.target, "--prompt", "w8")
    assert "temperature" in call(*generate, "--temperature", -1, code=2)
    assert "top_p" in call(*generate, "--top-p", 0, code=2)
    assert "--template must be JSON" in call(*generate, "--template", "{thinking", code=2)
    assert "must be a JSON object" in call(*generate, "--template", "3", code=2)


def test_recipes_that_make_no_sense(files: Files, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    train = ("train", recipe, "--stage", "baseline", "--out", tmp_path / "out")
    good = f"target: {files.target}\ndata: {{corpus: x.jsonl}}\ntrain: {{steps: 1}}\n"
    recipe.write_text(good + "drafter: {algorithm: dflash, blok_size: 4}\n")
    assert "unknown key drafter.blok_size; did you mean drafter.block_size" in call(*train, code=2)
    recipe.write_text(good + "drafter: {algorithm: dflash, layers: 1, captured: 2, mask_token_id: 96}\n")
    assert "mask_token_id 96 is no row of the target's embedding (0 to 95)" in call(*train, code=2)
    recipe.write_text(good + "drafter: {algorithm: dflash, layers: 1, captured: 2, mask_token_id: 6}\n")
    assert "there is no file or folder x.jsonl" in call(*train, code=2)
    no_corpus = ("--set", "data.corpus=[]", "--set", "record.prompts=p.jsonl")
    assert "there is no corpus; name recorded responses with --corpus" in call(*train, *no_corpus, code=2)
    assert "needs the checkpoint it starts from" in call(*train[:3], "continued", *train[4:], code=2)
    assert "must look like" in call(*train, "--set", "steps", code=2)


def test_checkpoints_that_do_not_fit_or_are_damaged(files: Files, tmp_path: Path) -> None:
    generate = ("generate", "--target", files.target, "--prompt", "w8", "--drafter")
    other = tmp_path / "other"
    known = {"max_position_embeddings": 512, "target_fingerprint": "another", "target_name": "qwen"}
    save_drafter(random_drafter(0, **known), other)
    assert "trained for another target (qwen)" in call(*generate, other, code=2)
    truncated = shutil.copytree(files.base, tmp_path / "truncated")
    weights = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "truncated" in call(*generate, truncated, code=2)
    unreadable = shutil.copytree(files.base, tmp_path / "unreadable")
    (unreadable / "config.json").write_text('{"model_type": ')
    assert "is not valid JSON" in call(*generate, unreadable, code=2)
    unmasked = shutil.copytree(files.base, tmp_path / "unmasked")
    config = json.loads((unmasked / "config.json").read_text())
    (unmasked / "config.json").write_text(json.dumps({**config, "mask_token_id": 4000}))
    assert "mask_token_id 4000 is no row" in call(*generate, unmasked, code=2)


def test_other_settings_for_a_finished_evaluation(files: Files, tmp_path: Path) -> None:
    command = ("evaluate", "--target", files.target, "--prompts", files.prompts, "--out", tmp_path, "--limit", 1)
    call(*command, "--max-new-tokens", 4)
    assert "other settings (max_new_tokens 4, now 5)" in call(*command, "--max-new-tokens", 5, code=2)


def test_nothing_that_exists_is_overwritten(files: Files, tmp_path: Path) -> None:
    full, file = shutil.copytree(files.base, tmp_path / "full"), tmp_path / "file"
    file.write_text("mine")
    for out in (full, file):
        for form in ("carryover", "zlab"):
            assert "nothing is overwritten" in call("convert", files.carry, out, "--to", form, code=2)
    evaluate = ("evaluate", "--target", files.target, "--prompts", files.prompts, "--out")
    assert "is a file; name a folder" in call(*evaluate, file, code=2)
    assert file.read_text() == "mine"
    assert (full / "model.safetensors").read_bytes() == (files.base / "model.safetensors").read_bytes()


def test_drafters_with_awkward_names_stay_apart(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(files.base, tmp_path / "autoregressive")
    shutil.copytree(files.carry, tmp_path / "d" / "co")
    shutil.copytree(files.base, tmp_path / "d" / "co (carry off)")
    evaluate = ("evaluate", "--target", files.target, "--prompts", files.prompts, "--limit", 2, "--max-new-tokens", 6,
                "--carry-off", "--json", "--out")  # fmt: skip
    chosen = [part for name in ("autoregressive", "d/co", "d/co (carry off)") for part in ("--drafter", name)]
    results = json.loads(call(*evaluate, "out", *chosen))
    names = [run["name"] for run in results["runs"]]
    assert len(set(names)) == len(names) == 5
    written = [json.loads(line)["method"] for line in Path("out/trace.jsonl").read_text().splitlines()]
    assert {name: written.count(name) for name in names} == dict.fromkeys(names, 2)
    for same in ("d/co", "d/co/", "./d/co"):
        assert "named twice" in call(*evaluate, "twice", "--drafter", "d/co", "--drafter", same, code=2)


def test_bad_usage() -> None:
    for arguments in (["generate", "--nothing"], ["nothing"], ["evaluate"], ["convert", "a", "b", "--to", "gguf"]):
        result = CliRunner().invoke(cli.app, arguments)
        assert result.exit_code == 2 and "Traceback" not in result.output, arguments


def test_debug_shows_the_traceback(files: Files) -> None:
    arguments = ["generate", "--debug", "--target", str(files.target), "--prompt", " "]
    result = CliRunner().invoke(cli.app, arguments)
    assert isinstance(result.exception, ValueError) and "prompt is empty" in str(result.exception)


def test_interrupt_is_one_line(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "join", interrupted)
    result = CliRunner().invoke(cli.app, ["generate", "--target", str(files.target), "--prompt", "w8"])
    assert result.exit_code == 130 and result.stderr.startswith("interrupted") and result.stderr.count("\n") == 1


def test_help_is_quick() -> None:
    """No command's help imports torch or transformers."""
    import subprocess
    import sys

    script = (
        "import sys; from carryover import cli; from typer.testing import CliRunner; "
        "assert CliRunner().invoke(cli.app, ['evaluate', '--help']).exit_code == 0; "
        "print([m for m in ('torch', 'transformers', 'matplotlib', 'scipy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"
