"""The corpus: exact masks, what is cut and dropped and why, and packing that loses nothing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from templates import THINKING, word_tokenizer
from tiny import tiny_target

from carryover.config import DataConfig
from carryover.data.chat import conversation, render_prompt
from carryover.data.corpus import FEATURES, collate, load_corpus, pack, preview
from carryover.data.prompts import Prompt
from carryover.data.record import manifest_path, record
from carryover.decode.sampling import Sampling
from carryover.errors import InputError

RECORDED = {"id": "a", "task": "qa", "prompt": "w9 w10", "response_ids": [20, 21, 22, 2], "finish": "stop"}


def write(path: Path, *records: dict | str) -> Path:
    text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def settings(**values) -> DataConfig:
    return DataConfig(**{"max_length": 64, "sequence_length": 64, **values})


# ---- reading ---------------------------------------------------------------------------------------------------------
def test_recorded_rows_with_and_without_prompt_ids(target, tmp_path):
    """The published corpus has prompts as text; ours has their ids, which are then the truth."""
    path = write(tmp_path / "c.jsonl.gz", RECORDED, {**RECORDED, "id": "b", "prompt_ids": [7, 8]})
    data = load_corpus(path, target)
    prompt = [1, 3, 9, 10, 2, 4]  # <start> <user> w9 w10 <end> <assistant>
    assert data[0] == {
        "id": "a",
        "task": "qa",
        "input_ids": [*prompt, 20, 21, 22, 2],
        "loss_mask": [False] * 6 + [True] * 4,
    }
    assert data[1]["input_ids"] == [7, 8, 20, 21, 22, 2] and data[1]["loss_mask"] == [False] * 2 + [True] * 4
    assert preview(data, target.tokenizer) == "<start> <user> w9 w10 <end> <assistant>⟦w20 w21 w22 <end>⟧"


def test_conversations(target, tmp_path):
    messages = conversation(["w9", "w10"], ["w20 w21", "w22"])
    data = load_corpus(write(tmp_path / "c.jsonl", {"messages": messages, "id": "m"}), target)
    assert data[0]["input_ids"] == [1, 3, 9, 2, 4, 20, 21, 2, 3, 10, 2, 4, 22, 2]
    assert [i for i, m in enumerate(data[0]["loss_mask"]) if m] == [5, 6, 7, 12, 13]


def test_conversation_is_split_where_the_template_rewrites_history(tmp_path):
    target = tiny_target()
    target.tokenizer = tokenizer = word_tokenizer(THINKING)
    target.model.generation_config.eos_token_id = tokenizer.eos_token_id
    talk = conversation(["hello", "how are you"], ["hi", "fine thanks"])
    options = {"enable_thinking": False}
    data = load_corpus(write(tmp_path / "c.jsonl", {"id": "m", "messages": talk}), target, settings(template=options))
    assert data["id"][:] == ["m", "m#2"]
    for row, turn in zip(data, (1, 3), strict=True):
        start = row["loss_mask"].index(True)
        assert row["input_ids"][:start] == render_prompt(tokenizer, talk[:turn], options)
        words = tokenizer.convert_ids_to_tokens(row["input_ids"][start:])
        assert words == [*talk[turn]["content"].split(), "<|im_end|>"] and all(row["loss_mask"][start:])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "x", "resp', "is not valid JSON"),
        ({"text": "w9"}, "needs `response_ids`"),
        ({"messages": [{"content": "w9"}]}, "needs `response_ids`"),
        ({"messages": [{"role": "user", "content": "w9"}]}, "all zero"),
        ({**RECORDED, "response_ids": []}, "non-empty list"),
        ({**RECORDED, "response_ids": [1, "2"]}, "non-empty list"),
        ({**RECORDED, "response_ids": [20, 96]}, "outside the vocabulary of tiny-llama-0"),
        ({**RECORDED, "prompt_ids": [-1]}, "outside the vocabulary"),
        ({**RECORDED, "response_ids": [20, 21]}, "no end token of tiny-llama-0"),
        ({"response_ids": [20, 21]}, "needs `prompt_ids` or `prompt`"),
    ],
)
def test_bad_lines_are_named(target, tmp_path, line, message):
    with pytest.raises(InputError, match=rf"bad\.jsonl:2.*{message}"):
        load_corpus(write(tmp_path / "bad.jsonl", RECORDED, line), target, quiet=True)


def test_what_is_cut_and_dropped_and_why(target, tmp_path, capsys):
    """A prompt has 5 tokens here; documents keep 12, so at most 7 response tokens."""
    path = write(
        tmp_path / "c.jsonl",
        {"id": "whole", "prompt_ids": [5] * 5, "response_ids": list(range(20, 27))},
        {"id": "cut", "prompt_ids": [5] * 5, "response_ids": list(range(20, 28))},
        {"id": "short", "prompt_ids": [5] * 5, "response_ids": [20]},
        {"id": "least", "prompt_ids": [5] * 10, "response_ids": [20, 21, 22]},
        {"id": "prompt only", "prompt_ids": [5] * 12, "response_ids": [20, 21, 22]},
        {"id": "one left", "prompt_ids": [5] * 11, "response_ids": [20, 21, 22]},
    )
    data = load_corpus(path, target, settings(max_length=12))
    assert data["id"][:] == ["whole", "cut", "least"]
    assert data[1]["input_ids"] == [5] * 5 + list(range(20, 27))
    assert [sum(mask) for mask in data["loss_mask"]] == [7, 7, 2]
    assert capsys.readouterr().err == (
        "corpus: 3 documents, 36 tokens, 16 supervised, 2 truncated; "
        "dropped 1: fewer than 2 response tokens; dropped 2: prompt fills max_length 12\n"
    )
    assert load_corpus(path, target, settings(max_length=12, minimum_response_tokens=7), quiet=True)["id"][:] == [
        "whole",
        "cut",
    ]
    with pytest.raises(InputError, match=r"no usable document.*dropped 6"):
        load_corpus(path, target, settings(minimum_response_tokens=9), quiet=True)


def test_a_recording_belongs_to_its_target_and_template(target, tmp_path):
    out = tmp_path / "r.jsonl"
    record(target, [Prompt(f"p{i}", "t", [f"w{9 + i}"]) for i in range(3)], out, Sampling(), 6, progress=False)
    data = load_corpus(out, target, quiet=True)
    for row, line in zip(data, map(json.loads, out.read_text().splitlines()), strict=True):
        assert row["input_ids"] == line["prompt_ids"] + line["response_ids"]
        assert row["loss_mask"] == [False] * len(line["prompt_ids"]) + [True] * len(line["response_ids"])
    with pytest.raises(InputError, match=r"recorded from another target \(tiny-llama-0.*tiny-llama-1"):
        load_corpus(out, tiny_target(seed=1), quiet=True)
    with pytest.raises(InputError, match=r"another chat template.*enable_thinking"):
        load_corpus(out, target, settings(template={"enable_thinking": False}), quiet=True)

    packed = out.with_name("r.jsonl.gz")  # a compressed copy keeps its manifest
    packed.write_bytes(gzip.compress(out.read_bytes()))
    assert manifest_path(packed) == manifest_path(out)
    with pytest.raises(InputError, match="another target"):
        load_corpus(packed, tiny_target(seed=1), quiet=True)
    manifest_path(out).write_text("{")
    with pytest.raises(InputError, match=r"manifest .* is not valid JSON"):
        load_corpus(out, target, quiet=True)


# ---- packing ---------------------------------------------------------------------------------------------------------
def corpus(lengths: list[int], seed: int = 0) -> Dataset:
    """Documents of these lengths; token values are unique over the corpus, so that nothing can be confused."""
    columns: dict[str, list] = {name: [] for name in FEATURES}
    generator, first = torch.Generator().manual_seed(seed), 0
    for i, n in enumerate(lengths):
        columns["id"].append(str(i))
        columns["task"].append("t")
        columns["input_ids"].append(list(range(first, first + n)))
        columns["loss_mask"].append((torch.rand(n, generator=generator) < 0.5).tolist())
        first += n
    return Dataset.from_dict(columns, features=FEATURES)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("length", [30, 41, 200])
def test_packing_loses_nothing_and_keeps_documents_whole(length, seed):
    lengths = torch.randint(2, 31, (80,), generator=torch.Generator().manual_seed(3)).tolist()
    data = corpus(lengths)
    rows = pack(data, length, seed)
    found = []
    for i in range(len(rows)):
        row = rows[i]
        assert int(row.pop("row")) == i and rows.lengths()[i] == len(row["input_ids"])
        assert len(row["input_ids"]) <= length and {len(column) for column in row.values()} == {len(row["input_ids"])}
        for d in range(int(row["document"].max()) + 1):
            at = (row["document"] == d).nonzero()[:, 0]
            assert at.tolist() == list(range(int(at[0]), int(at[-1]) + 1))  # side by side
            assert row["positions"][at].tolist() == list(range(len(at)))  # positions start anew
            found.append((row["input_ids"][at].tolist(), row["loss_mask"][at].tolist()))
    assert sorted(found) == sorted(zip(data["input_ids"], data["loss_mask"], strict=True))


def test_packing_is_tight_and_deterministic():
    data = corpus([8, 7, 6, 5, 4, 3, 2, 10, 10, 5])
    assert len(pack(data, 10)) == 6  # 60 tokens: 10 | 10 | 8+2 | 7+3 | 6+4 | 5+5
    members = pack(data, 10, 1).members
    assert members == pack(data, 10, 1).members != pack(data, 10, 2).members
    with pytest.raises(InputError, match="10 tokens does not fit a row of 9"):
        pack(data, 9)
    assert len(pack(corpus([]), 10)) == 0


def test_packing_respects_a_selection():
    data = corpus([4, 4, 4, 9]).select([1, 3])
    assert sorted(len(row["input_ids"]) for row in (pack(data, 10)[i] for i in range(2))) == [4, 9]


def test_collate_pads_with_documents_that_nobody_sees():
    rows = pack(corpus([3, 2, 4]), 6)
    batch = collate([rows[i] for i in range(len(rows))])
    assert {name: (column.dtype, tuple(column.shape)) for name, column in batch.items()} == {
        "row": (torch.int64, (2,)),
        "input_ids": (torch.int64, (2, 6)),
        "positions": (torch.int64, (2, 6)),
        "document": (torch.int64, (2, 6)),
        "loss_mask": (torch.bool, (2, 6)),
    }
    assert batch["row"].tolist() == [0, 1]
    short = min(range(2), key=lambda i: len(rows[i]["input_ids"]))
    assert len(rows[short]["input_ids"]) == 3
    assert batch["document"][short].tolist() == [0, 0, 0, -1, -1, -1]
    assert batch["input_ids"][short, 3:].tolist() == [0, 0, 0] and not batch["loss_mask"][short, 3:].any()
    assert batch["document"][1 - short].tolist() == [0, 0, 0, 0, 1, 1]
    assert batch["positions"][1 - short].tolist() == [0, 1, 2, 3, 0, 1]


def test_the_target_reads_packed_documents_as_if_alone(target):
    """The columns that packing makes isolate documents in the target, whose features drafters are trained on."""
    from carryover.layer_ids import LayerIds
    from carryover.rows import context_rows

    data = corpus([5, 9, 7])
    batch = collate([pack(data, 30)[0], pack(data.select([0]), 30)[0]])
    rows = context_rows(batch["positions"], batch["document"])
    tokens = batch["input_ids"] % 96
    out = target.forward(
        tokens, layer_ids=LayerIds([1, 3]), positions=batch["positions"], masks=target.masks(rows, rows)
    )
    for d in range(3):
        at = batch["document"][0] == d
        alone = target.forward(tokens[0, at][None], layer_ids=LayerIds([1, 3]))
        torch.testing.assert_close(out.features[0, at], alone.features[0], rtol=1e-4, atol=1e-5)
