"""Prompt files: what is read, what is refused and with which line, and how a limit is spread over tasks."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from carryover.data.prompts import SUITES, Prompt, load_prompts
from carryover.errors import InputError


def write(path: Path, *records: dict | str) -> Path:
    text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_reads_files_gz_and_folders_alike(tmp_path):
    a = write(tmp_path / "a.jsonl", {"id": "1", "task": "qa", "prompt": "hello", "source": "s", "licence": "MIT"}, "")
    b = write(tmp_path / "b.jsonl.gz", {"turns": ["one", "two"]})
    first = Prompt("1", "qa", ["hello"], "s", "MIT")
    second = Prompt("b:1", "b", ["one", "two"])
    assert load_prompts(a) == [first]
    assert load_prompts(str(b)) == [second]
    assert load_prompts(tmp_path) == load_prompts([a, b]) == [first, second]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"id": "x", "prompt": "  "}, r"bad\.jsonl:2 has an empty prompt"),
        ({"id": "x", "turns": ["hi", ""]}, r"bad\.jsonl:2 has an empty prompt"),
        ({"id": "x", "text": "hi"}, r"bad\.jsonl:2 needs `prompt`"),
        ({"id": "x", "turns": []}, r"bad\.jsonl:2 needs `prompt`"),
        ({"id": "x", "prompt": 5}, r"bad\.jsonl:2 needs `prompt`"),
        ({"id": "first", "prompt": "hi"}, r"bad\.jsonl:2 repeats the id 'first' of .*bad\.jsonl:1"),
        ('{"id": "x", "prom', r"bad\.jsonl:2 is not valid JSON"),
        ("[1, 2]", r"bad\.jsonl:2 must be a JSON object"),
        ('{"n": ' + "9" * 5000 + "}", r"bad\.jsonl:2 is not valid JSON"),
        ("[" * 200_000, r"bad\.jsonl:2 is not valid JSON"),
        ('{"id": "x", "prompt": "a \\ud800 b"}', r"bad\.jsonl:2 holds half a character"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    with pytest.raises(InputError, match=message):
        load_prompts(write(tmp_path / "bad.jsonl", {"id": "first", "prompt": "hello"}, line))


def test_missing_and_empty_places(tmp_path):
    with pytest.raises(InputError, match="no file or folder"):
        load_prompts(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match=r"holds no \.jsonl"):
        load_prompts(tmp_path)
    with pytest.raises(InputError, match="no prompts in"):
        load_prompts(write(tmp_path / "empty.jsonl"))
    with pytest.raises(InputError, match="cannot read"):
        whole = gzip.compress(b'{"prompt": "x"}\n' * 999)
        (tmp_path / "wrong.jsonl.gz").write_bytes(whole[:20] + bytes(12) + whole[32:])
        load_prompts(tmp_path / "wrong.jsonl.gz")
    with pytest.raises(InputError, match="cannot read"):
        (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "x"}\n' * 99)[:-9])
        load_prompts(tmp_path / "torn.jsonl.gz")


def test_task_filter(tmp_path):
    path = write(tmp_path / "p.jsonl", *({"id": f"{t}{i}", "task": t, "prompt": "x"} for t in "ab" for i in range(3)))
    assert [p.id for p in load_prompts(path, tasks=["b"])] == ["b0", "b1", "b2"]
    with pytest.raises(InputError, match="no prompts of task 'c'; the tasks are a, b"):
        load_prompts(path, tasks=["a", "c"])


def test_limit_is_balanced_deterministic_and_in_file_order(tmp_path):
    sizes = {"many": 50, "some": 10, "few": 2}
    path = write(
        tmp_path / "p.jsonl", *({"id": f"{t}{i}", "task": t, "prompt": "x"} for t, n in sizes.items() for i in range(n))
    )
    everything = load_prompts(path)
    chosen = load_prompts(path, limit=14, seed=1)
    assert Counter(p.task for p in chosen) == {"many": 6, "some": 6, "few": 2}
    assert chosen == [p for p in everything if p in chosen] == load_prompts(path, limit=14, seed=1)
    assert chosen != load_prompts(path, limit=14, seed=2)
    larger = load_prompts(path, limit=20, seed=1)
    assert {p.id for p in chosen} <= {p.id for p in larger}  # raising the limit continues a recording
    assert load_prompts(path, limit=99) == everything


def test_packaged_questions_of_mathematics_for_training_and_for_measuring():
    names = ("gsm8k_train", "gsm8k_dev", "gsm8k_test", "smollm2_demo")
    train, development, test, demo = (load_prompts(name) for name in names)
    assert (len(train), len(development), len(test)) == (2768, 24, 80)
    assert {p.licence for p in train + development + test} == {"MIT"}
    assert len({p.turns[0] for p in train + development + test + demo}) == 2768 + 24 + 80 + len(demo)


def test_packaged_suite():
    prompts = load_prompts("smollm2_demo")
    assert "smollm2_demo" in SUITES and 20 <= len(prompts) <= 30
    assert {p.licence for p in prompts} <= {"MIT", "Apache-2.0", "CC0-1.0"} and all(p.source for p in prompts)
    assert len({p.task for p in prompts}) >= 5 and max(len(p.turns[0]) for p in prompts) < 600


def test_a_name_of_zero_is_a_name_and_overall_is_taken(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": 0, "task": 0, "prompt": "a"}\n{"id": null, "prompt": "b"}\n')
    assert [(p.id, p.task) for p in load_prompts(path)] == [("0", "0"), ("p:2", "p")]
    for name, line in (("q", '{"task": "overall", "prompt": "a"}'), ("overall", '{"prompt": "a"}')):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(line + "\n")
        with pytest.raises(InputError, match=r"jsonl:1 has the task 'overall', .*give it another"):
            load_prompts(path)
