"""Recording: the target's own tokens, whatever the batch; resumable after a kill; never mixed with others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny import TEXT_FAMILIES, WRAPPED_FAMILIES, tiny_target

from carryover.data.chat import conversation, render_prompt
from carryover.data.prompts import Prompt, load_prompts
from carryover.data.record import Recorded, manifest_path, record, respond_batch
from carryover.decode.engine import Engine
from carryover.decode.processors import Penalties
from carryover.decode.sampling import Sampling
from carryover.errors import InputError
from carryover.target import Target

GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.9, top_p=0.95)
NEW = 12


def prompts(count: int = 7, turns: int = 1) -> list[Prompt]:
    """Prompts of 1 to 9 words."""
    words = lambda i: " ".join(f"w{5 + (i * 11 + j * 7) % 90}" for j in range(1 + i * 5 % 9))  # noqa: E731
    return [
        Prompt(f"p{i}", "even" if i % 2 == 0 else "odd", [words(i + t) for t in range(turns)], "s", "MIT")
        for i in range(count)
    ]


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_id(path: Path) -> dict[str, dict]:
    found = {row["id"]: row for row in rows(path)}
    assert len(found) == len(rows(path)), "an id was recorded twice"
    return found


def run(
    target: Target, out: Path, which: list[Prompt], sampling: Sampling = GREEDY, batch_size: int = 3, **kwargs
) -> Recorded:
    return record(target, which, out, sampling, NEW, batch_size=batch_size, progress=False, **kwargs)


@pytest.mark.parametrize("family", [*TEXT_FAMILIES, *WRAPPED_FAMILIES])
def test_batch_equals_one_by_one_in_every_family(family):
    """Padding, finished neighbours and sliding windows (6, shorter than the prompts) leave no trace."""
    target = tiny_target(family)
    torch.manual_seed(1)
    ids = [torch.randint(5, 96, (n,)).tolist() for n in (3, 19, 1, 11)]
    batch = respond_batch(target, ids, [0] * 4, GREEDY, NEW)
    assert batch == [respond_batch(target, [p], [0], GREEDY, NEW)[0] for p in ids]
    assert batch == [Engine(target).generate(p, NEW).tokens for p in ids]


def test_greedy_equals_transformers(target, tmp_path):
    run(target, tmp_path / "r.jsonl", prompts())
    for row in rows(tmp_path / "r.jsonl"):
        ids = torch.tensor([row["prompt_ids"]])
        theirs = target.model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)[
            0, ids.shape[1] :
        ].tolist()
        assert row["response_ids"] == theirs


def test_penalties_are_those_of_transformers_and_part_of_the_record(target, tmp_path):
    out, penalties = tmp_path / "r.jsonl", Penalties(repetition=1.7, min_new_tokens=4)
    run(target, tmp_path / "without.jsonl", prompts())
    run(target, out, prompts()[:3], penalties=penalties)
    before = out.read_bytes()
    with pytest.raises(InputError, match=r"recorded with penalties \{'repetition': 1\.7.*not None"):
        run(target, out, prompts())
    with pytest.raises(InputError, match=r"recorded with penalties None, not \{'repetition'"):
        run(target, tmp_path / "without.jsonl", prompts(), penalties=penalties)
    assert out.read_bytes() == before
    run(target, out, prompts(), penalties=penalties)
    for row in rows(out):
        ids = torch.tensor([row["prompt_ids"]])
        theirs = target.model.generate(
            ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, repetition_penalty=1.7, min_new_tokens=4
        )
        assert row["response_ids"] == theirs[0, ids.shape[1] :].tolist()
    assert by_id(out) != by_id(tmp_path / "without.jsonl")  # otherwise this shows nothing


def stopping_target() -> Target:
    """A target in whose responses the end token is common."""
    target = tiny_target("llama")
    target.model.generation_config.eos_token_id = list(range(2, 14))
    return target


def test_a_row_says_everything_and_ends_with_its_end_token(tmp_path):
    target, out = stopping_target(), tmp_path / "r.jsonl"
    assert run(target, out, prompts(20), SAMPLED) == Recorded(written=20, found=0, too_long=0)
    found = by_id(out)
    assert {row["finish"] for row in found.values()} == {"stop", "length"}  # otherwise this test shows little
    for prompt in prompts(20):
        row = found[prompt.id]
        assert (row["task"], row["source"], row["licence"], row["prompt"]) == (prompt.task, "s", "MIT", prompt.turns[0])
        assert row["prompt_ids"] == render_prompt(target.tokenizer, prompt.turns)
        assert row["response"] == target.tokenizer.decode(row["response_ids"], skip_special_tokens=True)
        *inside, last = row["response_ids"]
        assert not target.stop_ids & set(inside)
        assert (last in target.stop_ids) == (row["finish"] == "stop")
        assert row["finish"] == "stop" or len(row["response_ids"]) == NEW


def test_sampled_responses_do_not_depend_on_the_batch(target, tmp_path):
    run(target, tmp_path / "a.jsonl", prompts(), SAMPLED, batch_size=1)
    run(target, tmp_path / "b.jsonl", prompts(), SAMPLED, batch_size=5)
    run(target, tmp_path / "c.jsonl", prompts()[2:4], SAMPLED)
    run(target, tmp_path / "d.jsonl", prompts(), SAMPLED, seed=1)
    a, b, c, d = (by_id(tmp_path / f"{name}.jsonl") for name in "abcd")
    assert a == b and c == {i: a[i] for i in ("p2", "p3")}
    assert all(a[i]["response_ids"] != d[i]["response_ids"] for i in a)


def test_sampling_follows_the_processed_distribution(target):
    """First tokens of many seeds against `Sampling.probabilities`, chi-square at the 0.1 % level."""
    sampling, ids = Sampling(temperature=1.5, top_k=6), [1, 3, 40, 2, 4]
    n = 600
    drawn = [r[0] for r in respond_batch(target, [ids] * n, list(range(n)), sampling, 1)]
    p = sampling.probabilities(target.head(target.forward(torch.tensor([ids])).hidden[0, -1]))
    counts = torch.bincount(torch.tensor(drawn), minlength=96)
    support = p > 0
    assert support.sum() == 6 and counts[~support].sum() == 0
    chi2 = ((counts - n * p)[support] ** 2 / (n * p)[support]).sum()
    assert chi2 < 20.5  # 5 degrees of freedom


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("cut", [0, 1, 37, "mid", "line"])
def test_killed_recording_resumes_to_the_same_result(target, tmp_path, sampling, cut):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "r.jsonl"
    run(target, whole, prompts(), sampling)
    written = whole.read_bytes()
    ends = [i + 1 for i, byte in enumerate(written) if byte == 10]
    keep = {"mid": ends[3] + 20, "line": ends[3]}.get(cut, cut)
    run(target, out, prompts()[:0], sampling)  # the manifest comes first
    out.write_bytes(written[:keep])
    found = sum(end <= keep for end in ends)
    assert run(target, out, prompts(), sampling) == Recorded(written=7 - found, found=found, too_long=0)
    assert by_id(out) == by_id(whole)
    assert out.read_bytes().startswith(written[: max((e for e in ends if e <= keep), default=0)])
    if cut == 0:
        assert out.read_bytes() == written


def test_an_interrupt_between_batches_keeps_what_is_there(target, tmp_path):
    out, calls = tmp_path / "r.jsonl", []

    def dies(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return respond_batch(*args)

    with pytest.raises(KeyboardInterrupt):
        run(target, out, prompts(), respond=dies)
    assert len(rows(out)) == 3 and manifest_path(out).exists()
    run(target, out, prompts())
    run(target, tmp_path / "whole.jsonl", prompts())
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_more_prompts_continue_a_recording(target, tmp_path):
    out = tmp_path / "r.jsonl"
    run(target, out, prompts(4))
    assert run(target, out, prompts(7)) == Recorded(written=3, found=4, too_long=0)
    run(target, tmp_path / "whole.jsonl", prompts(7))
    assert by_id(out) == by_id(tmp_path / "whole.jsonl")


def test_another_prompt_of_the_same_id_is_not_taken_for_answered(target, tmp_path):
    """Ids that are left out are FILE:LINE, which two files may share."""
    out, files = tmp_path / "r.jsonl", [tmp_path / name / "p.jsonl" for name in "ab"]
    for file, words in zip(files, (["w5", "w6"], ["w5", "w7"]), strict=True):
        file.parent.mkdir()
        file.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in words))
    run(target, out, load_prompts(files[0]))
    before = out.read_bytes(), manifest_path(out).read_bytes()
    with pytest.raises(InputError, match=r"r\.jsonl:2 answers another prompt of the id 'p:2'; give the prompts ids"):
        run(target, out, [*load_prompts(files[1]), *prompts(2)])
    assert (out.read_bytes(), manifest_path(out).read_bytes()) == before
    turns = [Prompt("t", "t", ["w5", "w6"])]
    run(target, tmp_path / "turns.jsonl", turns)
    with pytest.raises(InputError, match="answers another prompt of the id 't#2'"):
        run(target, tmp_path / "turns.jsonl", [Prompt("t", "t", ["w5", "w9"])])


def test_a_recording_for_these_prompts_only(target, tmp_path):
    out = tmp_path / "r.jsonl"
    run(target, out, prompts(4))
    before = out.read_bytes(), manifest_path(out).read_bytes()
    with pytest.raises(InputError, match=r"answers 'p[123]', which is not among the prompts; name another --out"):
        run(target, out, prompts(1), only=True)
    assert (out.read_bytes(), manifest_path(out).read_bytes()) == before
    assert run(target, out, prompts(7), only=True).written == 3


def test_another_recording_is_refused_and_untouched(target, tmp_path):
    out = tmp_path / "r.jsonl"
    run(target, out, prompts(2))
    before = out.read_bytes(), manifest_path(out).read_bytes()
    with pytest.raises(InputError, match="recorded with sampling"):
        run(target, out, prompts(3), SAMPLED)
    with pytest.raises(InputError, match="recorded with fingerprint"):
        run(tiny_target(seed=1), out, prompts(3))
    with pytest.raises(InputError, match="recorded with template"):
        run(target, out, prompts(3), options={"enable_thinking": False})
    with pytest.raises(InputError, match="recorded with seed"):
        run(target, out, prompts(3), seed=5)
    assert (out.read_bytes(), manifest_path(out).read_bytes()) == before

    out.write_bytes(before[0] + before[0])
    with pytest.raises(InputError, match="answers 'p0' a second time; take one of the two lines out"):
        run(target, out, prompts(3))
    out.write_bytes(before[0])
    manifest_path(out).unlink()
    with pytest.raises(InputError, match="without a manifest"):
        run(target, out, prompts(3))
    assert out.read_bytes() == before[0]
    with pytest.raises(InputError, match="cannot be compressed"):
        run(target, tmp_path / "r.jsonl.gz", prompts(3))


def test_a_corrupt_line_in_the_middle_is_an_error(target, tmp_path):
    out = tmp_path / "r.jsonl"
    run(target, out, prompts(3))
    lines = out.read_text().splitlines(keepends=True)
    out.write_text(lines[0] + lines[1][:30] + "\n" + lines[2])
    with pytest.raises(InputError, match=r"r\.jsonl:2 is not valid JSON"):
        run(target, out, prompts(3))


def test_turns_are_answered_in_sequence(target, tmp_path):
    out = tmp_path / "r.jsonl"
    some = [*prompts(3, turns=2), Prompt("single", "t", ["w9"])]
    assert run(target, out, some) == Recorded(written=7, found=0, too_long=0)
    found = by_id(out)
    assert set(found) == {"p0#1", "p0#2", "p1#1", "p1#2", "p2#1", "p2#2", "single"}
    for p in some[:3]:
        first, second = found[f"{p.id}#1"], found[f"{p.id}#2"]
        assert first["prompt_ids"] == render_prompt(target.tokenizer, p.turns[:1])
        history = conversation(p.turns, [first["response"]])
        assert second["prompt_ids"] == render_prompt(target.tokenizer, history) and second["prompt"] == p.turns[1]
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(line for line in lines if "#2" not in line))  # killed between the turns
    run(target, out, some)
    assert by_id(out) == found


def test_ids_of_turns_must_not_meet_ids_of_prompts(target, tmp_path):
    some = [Prompt("a", "t", ["w9", "w10"]), Prompt("a#1", "t", ["w11"])]
    with pytest.raises(InputError, match="two responses would have the id 'a#1'"):
        run(target, tmp_path / "r.jsonl", some)
    assert list(tmp_path.iterdir()) == []


def test_a_line_that_is_no_response_is_named(target, tmp_path):
    run(target, tmp_path / "r.jsonl", prompts())
    with (tmp_path / "r.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(InputError, match=r"r\.jsonl:8 is no recorded response"):
        run(target, tmp_path / "r.jsonl", prompts())


def test_what_cannot_be_recorded_leaves_nothing_behind(target, tmp_path):
    small = tiny_target("llama", max_position_embeddings=16)
    with pytest.raises(InputError, match="none of 2 prompts fits into the target's context \\(16 tokens\\)"):
        run(small, tmp_path / "r.jsonl", [Prompt(i, "t", ["w9 " * 20]) for i in "ab"])
    chat = tiny_target("llama")
    chat.tokenizer.chat_template = "{{ raise_exception('no ' + mood) }}"
    with pytest.raises(InputError, match="no grim"):
        run(chat, tmp_path / "r.jsonl", prompts(), options={"mood": "grim"})
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="is a folder; name a file in it"):
        run(target, tmp_path / "folder", prompts())


def test_context_end(tmp_path):
    """A response stops where the target's context ends; a prompt that fills it is left out and counted."""
    target = tiny_target("llama", max_position_embeddings=16)
    some = [Prompt("short", "t", ["w9"]), Prompt("long", "t", ["w9 " * 7]), Prompt("full", "t", ["w9 " * 12])]
    target.model.generation_config.eos_token_id = 95
    assert run(target, tmp_path / "r.jsonl", some) == Recorded(written=2, found=0, too_long=1)
    found = by_id(tmp_path / "r.jsonl")
    assert [len(found[i]["prompt_ids"]) + len(found[i]["response_ids"]) for i in ("short", "long")] == [16, 16]
    assert len(found["short"]["response_ids"]) == 11
