"""The whole evaluation on a tiny target: what it writes, what it counts, and that a killed one continues."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_target

from carryover.data.prompts import Prompt
from carryover.decode.engine import Engine
from carryover.decode.sampling import Sampling
from carryover.drafter.config import DrafterConfig
from carryover.drafter.modeling import Drafter
from carryover.errors import InputError
from carryover.evaluate.divergence import first_difference
from carryover.evaluate.run import Plan, evaluate, few, ids_of, prompt_seed, read_trace, short_names
from carryover.report import cautions
from carryover.target import Target

PROMPTS = [
    Prompt("a", "qa", ["w7 w8 w9"]),
    Prompt("b", "qa", ["w20 w21"]),
    Prompt("c", "chat", ["w30 w31 w32 w33", "w40"]),
    Prompt("d", "chat", ["w50"]),
]
TIMES = {"tokens_per_second", "speedup", "speedup_ci95", "draft_share", "verify_share", "prefill_share"}
PLAN = Plan(max_new_tokens=12)


def drafter_for(target: Target, seed: int, carry: str = "none") -> Drafter:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Drafter(
            DrafterConfig(
                vocab_size=target.vocab_size, hidden_size=target.hidden_size, intermediate_size=32,
                num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                num_target_layers=target.num_layers, target_layer_ids=[1, 3], block_size=4, slots="fill_in",
                mask_token_id=6, carry=carry, initializer_range=0.3,
            )
        ).eval()  # fmt: skip


@pytest.fixture(scope="module")
def drafters(target: Target) -> dict[str, Drafter]:
    return {"runs/base": drafter_for(target, 1), "runs/carry": drafter_for(target, 2, "embedding")}


def untimed(results: dict[str, Any]) -> dict[str, Any]:
    """The figures that do not depend on the clock."""
    return {
        run["name"]: {
            task: {k: v for k, v in stats.items() if k not in TIMES}
            for task, stats in {**run["tasks"], "overall": run["overall"]}.items()
        }
        for run in results["runs"]
    }


def test_results_file(target: Target, drafters: dict[str, Drafter], tmp_path: Path) -> None:
    results = evaluate(target, drafters, PROMPTS, tmp_path, Plan(max_new_tokens=12, carry_off=True), progress=False)
    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert results.keys() >= {"target", "temperature", "max_new_tokens", "seed", "environment", "runs", "comparisons"}
    assert (results["target"], results["temperature"], results["max_new_tokens"]) == (target.name, 0.0, 12)
    assert [(r["name"], r["drafter"], r["carry"]) for r in results["runs"]] == [
        ("autoregressive", None, False),
        ("base", "runs/base", False),
        ("carry (carry off)", "runs/carry", False),
        ("carry", "runs/carry", True),
    ]
    assert results["environment"]["dtype"] == "float32" and results["environment"]["sessions"] == 1
    for run in results["runs"]:
        assert list(run["tasks"]) == ["qa", "chat"] and run["overall"]["prompts"] == 4
        assert (run["overall"]["identical"], run["overall"]["divergent"]) == (4, 0)
        assert run["overall"]["tokens"] == run["tasks"]["qa"]["tokens"] + run["tasks"]["chat"]["tokens"]
        assert run["overall"]["acceptance_length"] == run["overall"]["tokens"] / run["overall"]["rounds"]
        shares = [run["overall"][f"{part}_share"] for part in ("draft", "verify", "prefill")]
        assert 0.5 < sum(shares) <= 1
    carried = {run["name"]: run["overall"]["carried_rows"] for run in results["runs"]}
    assert carried["carry"] > 1 and carried["base"] == carried["carry (carry off)"] == 0
    pairs = [(c["a"], c["b"]) for c in results["comparisons"] if c["task"] == "overall"]
    assert pairs == [("carry (carry off)", "base"), ("carry", "base"), ("carry", "carry (carry off)")]


def test_few_carry_rows(target: Target, drafters: dict[str, Drafter], tmp_path: Path) -> None:
    plan = Plan(max_new_tokens=12, carry_rows=(2, 1, 0, 2))
    results = evaluate(target, drafters, PROMPTS, tmp_path, plan, progress=False)
    assert [(r["name"], r["drafter"], r["carry"]) for r in results["runs"][2:]] == [
        ("carry (0 carry rows)", "runs/carry", False),
        ("carry (1 carry row)", "runs/carry", True),
        ("carry (2 carry rows)", "runs/carry", True),
        ("carry", "runs/carry", True),
    ]
    carried = [run["overall"]["carried_rows"] for run in results["runs"][2:]]
    assert carried[0] == 0 < carried[1] < 1 < carried[2] < 2 < carried[3]
    assert all(run["overall"]["divergent"] == 0 for run in results["runs"])


def test_fewer_proposals(target: Target, drafters: dict[str, Drafter], tmp_path: Path) -> None:
    """Of every drafter, right before it, and with its carry."""
    most = drafters["runs/base"].config.num_proposals
    results = evaluate(
        target, drafters, PROMPTS, tmp_path, Plan(max_new_tokens=12, proposals=(2, 1, 2)), progress=False
    )
    names = ["base (1 proposal)", "base (2 proposals)", "base", "carry (1 proposal)", "carry (2 proposals)", "carry"]
    assert [run["name"] for run in results["runs"][1:]] == names
    assert [run["carry"] for run in results["runs"][1:]] == [False] * 3 + [True] * 3
    for run in results["runs"][1:]:
        count = int(run["name"].split("(")[1][0]) if "(" in run["name"] else most
        assert len(run["overall"]["acceptance_by_position"]) == count and run["overall"]["divergent"] == 0
        assert (run["overall"]["carried_rows"] > 0) == run["carry"] and run["overall"]["carried_rows"] < count
    with pytest.raises(InputError, match=f"proposals must be 1 to {most}, what the drafter was trained for, got 99"):
        evaluate(target, drafters, PROMPTS, tmp_path / "most", Plan(proposals=(99,)), progress=False)
    assert not (tmp_path / "most").exists()


def test_figures_are_those_of_single_generations(target: Target, drafters: dict[str, Drafter], tmp_path: Path) -> None:
    """Every response is what the engine gives on its own, and the second turn goes on from what plain decoding said."""
    results = evaluate(target, drafters, PROMPTS, tmp_path, PLAN, progress=False)
    said: dict[str, list[str]] = {}
    for prompt in PROMPTS:
        said[prompt.id] = []
        for _ in prompt.turns:
            generation = Engine(target).generate(ids_of(target, PLAN, prompt.turns, said[prompt.id]), 12)
            said[prompt.id].append(target.tokenizer.decode(generation.tokens, skip_special_tokens=True))
    tokens = rounds = carried = 0
    for prompt in PROMPTS:
        for turn in range(len(prompt.turns)):
            ids = ids_of(target, PLAN, prompt.turns, said[prompt.id][:turn])
            for r in Engine(target, drafters["runs/carry"]).generate(ids, 12).rounds:
                tokens, rounds, carried = tokens + len(r.committed), rounds + 1, carried + r.carried
    overall = results["runs"][2]["overall"]
    assert (overall["tokens"], overall["rounds"]) == (tokens, rounds)
    assert overall["carried_rows"] == pytest.approx(carried / rounds)
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert len(lines) == 3 * 5  # methods x turns
    assert {(r["method"], r["prompt"], r["turn"]) for r in lines if r["prompt"] == "c"} == {
        (m, "c", t) for m in ("autoregressive", "base", "carry") for t in (0, 1)
    }


def test_methods_take_turns(target: Target, drafters: dict[str, Drafter], tmp_path: Path) -> None:
    evaluate(target, drafters, PROMPTS, tmp_path, PLAN, progress=False)
    order = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    first = {r["prompt"]: r["method"] for r in reversed(order)}
    assert first == {"a": "autoregressive", "b": "base", "c": "carry", "d": "autoregressive"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_killed_evaluation_continues(
    target: Target, drafters: dict[str, Drafter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    plan = Plan(max_new_tokens=12, sampling=Sampling(temperature), draft_sampling="probabilistic", seed=3)
    whole = evaluate(target, drafters, PROMPTS, tmp_path / "whole", plan, progress=False)

    calls, generate = 0, Engine.generate_many

    def dies(self: Engine, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3 + 3 + 2:  # two prompts, and amid the third
            raise KeyboardInterrupt
        return generate(self, *args, **kwargs)

    out = tmp_path / "killed"
    monkeypatch.setattr(Engine, "generate_many", dies)
    with pytest.raises(KeyboardInterrupt):
        evaluate(target, drafters, PROMPTS, out, plan, progress=False)
    assert len(read_trace(out / "trace.jsonl", ["autoregressive", "base", "carry"])) == 2
    with (out / "trace.jsonl").open("a") as file:  # a kill in the middle of writing the third prompt
        line = (out / "trace.jsonl").read_text().splitlines()[0].replace('"prompt": "a"', '"prompt": "c"')
        file.write(line + "\n" + line[:40])
    resumed = evaluate(target, drafters, PROMPTS, out, plan, progress=False)
    assert untimed(resumed) == untimed(whole)
    assert resumed["environment"]["sessions"] == 2
    assert (resumed["runs"][1]["overall"]["identical"] is None) == (temperature > 0)

    calls = -(10**6)
    again = evaluate(target, drafters, PROMPTS, out, plan, progress=False)
    assert calls == -(10**6) and again == resumed  # nothing was decoded or timed again


def test_batches_decode_what_single_requests_decode(
    target: Target, drafters: dict[str, Drafter], tmp_path: Path
) -> None:
    some = [*PROMPTS, Prompt("m", "t", ["w9 w10", "w11", "w12"]), Prompt("n", "t", ["w13", "w14"])]
    single = evaluate(target, drafters, some, tmp_path / "1", PLAN, progress=False)
    for size in (2, 64):
        plan = replace(PLAN, batch_size=size)
        together = evaluate(target, drafters, some, tmp_path / str(size), plan, progress=False)
        assert together["batch_size"] == size
        assert untimed(together) == untimed(single)


@pytest.mark.parametrize("cut", [1, 40, "line"])
def test_a_torn_prompt_of_several_turns_is_decoded_again(target: Target, tmp_path: Path, cut: int | str) -> None:
    """Without drafters nothing but the number of turns tells that a prompt is not finished."""
    some = [Prompt("m", "t", ["w9 w10", "w11", "w12"]), Prompt("n", "t", ["w13"])]
    whole = evaluate(target, {}, some, tmp_path, PLAN, progress=False)
    trace = tmp_path / "trace.jsonl"
    lines = trace.read_text().splitlines(keepends=True)
    assert len(lines) == 4
    for kept in range(1, 5):
        text = "".join(lines[:kept])
        trace.write_text(text if cut == "line" else text[:-cut])
        assert untimed(evaluate(target, {}, some, tmp_path, PLAN, progress=False)) == untimed(whole)
        assert len(trace.read_text().splitlines()) == 4
        assert untimed(evaluate(target, {}, some, tmp_path, PLAN, progress=False)) == untimed(whole)


def test_other_settings_are_refused(target: Target, drafters: dict[str, Drafter], tmp_path: Path) -> None:
    evaluate(target, drafters, PROMPTS[:1], tmp_path, PLAN, progress=False)
    with pytest.raises(InputError, match="other settings \\(max_new_tokens 12, now 13\\)"):
        evaluate(target, drafters, PROMPTS[:1], tmp_path, Plan(max_new_tokens=13), progress=False)
    with pytest.raises(InputError, match="other settings \\(prompts "):
        evaluate(target, drafters, PROMPTS[:2], tmp_path, PLAN, progress=False)
    other = {**drafters, "runs/base": drafter_for(target, 9)}
    with pytest.raises(InputError, match=r"other settings \(drafters\.runs/base "):
        evaluate(target, other, PROMPTS[:1], tmp_path, PLAN, progress=False)


def test_another_chat_template_or_end_is_another_evaluation(drafters: dict[str, Drafter], tmp_path: Path) -> None:
    target = tiny_target("llama")
    evaluate(target, {}, PROMPTS[:1], tmp_path, PLAN, progress=False)
    assert target.tokenizer is not None
    template = target.tokenizer.chat_template
    target.tokenizer.chat_template = template + "{# another #}"
    with pytest.raises(InputError, match=r"other settings \(chat_template "):
        evaluate(target, {}, PROMPTS[:1], tmp_path, PLAN, progress=False)
    target.tokenizer.chat_template = template
    ends = target.model.generation_config.eos_token_id
    target.model.generation_config.eos_token_id = [2, 3, 4, 5]
    with pytest.raises(InputError, match=r"other settings \(stop_ids "):
        evaluate(target, {}, PROMPTS[:1], tmp_path, PLAN, progress=False)
    target.model.generation_config.eos_token_id = ends
    settings = json.loads((tmp_path / "settings.json").read_text())  # of an earlier version, which had neither
    del settings["settings"]["chat_template"], settings["settings"]["stop_ids"]
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    evaluate(target, {}, PROMPTS[:1], tmp_path, PLAN, progress=False)


def test_the_same_drafters_elsewhere_go_on(target: Target, drafters: dict[str, Drafter], tmp_path: Path) -> None:
    before = evaluate(target, drafters, PROMPTS[:1], tmp_path, PLAN, progress=False)
    (tmp_path / "results.json").write_text("{")  # the trace has everything
    moved = {path.replace("runs", "elsewhere"): drafter for path, drafter in drafters.items()}
    after = evaluate(target, moved, PROMPTS[:1], tmp_path, PLAN, progress=False)
    assert [run["overall"] for run in after["runs"]] == [run["overall"] for run in before["runs"]]
    assert after["runs"][1]["drafter"] == "elsewhere/base"


def test_refusal_keeps_what_was_measured(target: Target, drafters: dict[str, Drafter], tmp_path: Path) -> None:
    evaluate(target, drafters, PROMPTS[:1], tmp_path, PLAN, progress=False)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    more = {**drafters, "runs/another": drafter_for(target, 9)}
    with pytest.raises(InputError, match=r"other settings \(drafters\.runs/another None, now .*; methods "):
        evaluate(target, more, PROMPTS[:1], tmp_path, PLAN, progress=False)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    settings = tmp_path / "settings.json"
    unreadable = '{"settings": {}, "environment": 1}', '{"settings": {}, "environment": {"sessions": "x"}}'
    for damage in ("", "{", "{}", "[]", *unreadable):
        settings.write_text(damage)
        with pytest.raises(InputError, match=r"settings\.json is damaged"):
            evaluate(target, drafters, PROMPTS[:1], tmp_path, PLAN, progress=False)
        assert (tmp_path / "trace.jsonl").read_bytes() == before["trace.jsonl"]


def test_damaged_trace_is_refused(target: Target, drafters: dict[str, Drafter], tmp_path: Path) -> None:
    evaluate(target, drafters, PROMPTS[:2], tmp_path, PLAN, progress=False)
    trace = tmp_path / "trace.jsonl"
    lines = trace.read_text().splitlines()
    for damage in (lines[0][:30], "{}", "[]", "1"):
        trace.write_text("\n".join([damage, *lines[1:]]) + "\n")
        with pytest.raises(InputError, match="damaged at line 1"):
            evaluate(target, drafters, PROMPTS[:2], tmp_path, PLAN, progress=False)


def test_prompts_that_do_not_fit_are_left_out_and_named(tmp_path: Path) -> None:
    target = tiny_target(max_position_embeddings=24)
    long = Prompt("long", "qa", [" ".join(["w9"] * 30)])
    later = Prompt("later", "qa", ["w9", " ".join(["w9"] * 30)])  # its second turn does not fit
    results = evaluate(target, {}, [PROMPTS[0], long, later], tmp_path / "a", PLAN, progress=False)
    assert results["environment"]["skipped_prompts"] == ["long"] and results["environment"]["cut_prompts"] == ["later"]
    assert "Of 1 prompts a later turn did not fit into the target's context." in cautions(results)
    assert results["runs"][0]["overall"]["prompts"] == 2
    with pytest.raises(InputError, match="none of 1 prompts fits"):
        evaluate(target, {}, [long], tmp_path / "b", PLAN, progress=False)


def test_short_names() -> None:
    assert short_names(["runs/a/base", "runs/a/carry"]) == ["base", "carry"]
    assert short_names(["runs/a/base", "runs/b/base"]) == ["a/base", "b/base"]
    assert short_names(["x/autoregressive"]) == ["x/autoregressive"]
    assert short_names([]) == []
    assert short_names(["x/a", "y/a (1 carry row)"], [few(1, "carry row")]) == ["x/a", "y/a (1 carry row)"]


def test_seeds_belong_to_prompts() -> None:
    assert prompt_seed(0, "a", 0) == prompt_seed(0, "a", 0)
    assert len({prompt_seed(s, p, t) for s in (0, 1) for p in "ab" for t in (0, 1)}) == 8


def test_divergence_is_located_and_measured(target: Target, drafters: dict[str, Drafter], tmp_path: Path) -> None:
    """A trace in which one token was changed by hand, in the second turn of a prompt."""
    assert target.tokenizer is not None
    evaluate(target, {"runs/base": drafters["runs/base"]}, PROMPTS, tmp_path, PLAN, progress=False)
    trace = tmp_path / "trace.jsonl"
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    changed = next(r for r in records if (r["method"], r["prompt"], r["turn"]) == ("base", "c", 1))
    tokens = changed["generation"]["tokens"]
    original, tokens[3] = tokens[3], (tokens[3] + 1) % target.vocab_size
    trace.write_text("".join(json.dumps(r) + "\n" for r in records))
    results = evaluate(target, {"runs/base": drafters["runs/base"]}, PROMPTS, tmp_path, PLAN, progress=False)
    overall = results["runs"][1]["overall"]
    assert (overall["identical"], overall["divergent"]) == (3, 1)

    said = next(r for r in records if (r["method"], r["prompt"], r["turn"]) == ("autoregressive", "c", 0))
    first = target.tokenizer.decode(said["generation"]["tokens"], skip_special_tokens=True)
    prompt = ids_of(target, PLAN, ["w30 w31 w32 w33", "w40"], [first])
    logits = target.model(torch.tensor([prompt + tokens[:3]])).logits[0, -1]
    [found] = results["divergences"]
    gap = found.pop("logit_gap")
    assert found == {"run": "base", "prompt": "c", "turn": 1, "position": 3}
    assert gap == pytest.approx(float(logits[original] - logits[tokens[3]]), abs=1e-4)
    assert gap > 0  # plain decoding took the larger one


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2], [1, 2]) is None and first_difference([1, 2], [1, 2, 3]) is None
