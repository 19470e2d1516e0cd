"""The training corpus: recorded responses or conversations as token ids with a loss mask, packed into rows.

Only token ids and masks are stored. Features of the target are computed while training (online target):
draft-verify-draft needs the live target anyway, because what it verifies changes with every step (SPEC 6.2).

Letters: `b` packed rows of a batch, `S` tokens of a row. Source: SPEC 2.4, 9.8 to 9.12.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.compute as pc
import torch
from datasets import Dataset, Features, List, Value, concatenate_datasets
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from ..config import DataConfig
from ..errors import InputError
from ..target import Target
from .chat import HistoryRewritten, render_conversation, render_prompt, template_fingerprint
from .jsonl import jsonl_files, read_jsonl
from .prompts import Paths
from .record import read_manifest

FEATURES = Features(
    {
        "id": Value("string"),
        "task": Value("string"),
        "input_ids": List(Value("int32")),
        "loss_mask": List(Value("bool")),
    }
)
CHUNK = 4096  # documents held as Python lists at a time


class Document(NamedTuple):
    """ids `[S]`, mask `[S]`: True where the target generated the token."""

    id: str
    task: str
    ids: list[int]
    mask: list[bool]


@dataclass
class Statistics:
    """What a corpus holds and what was left out of it, and why."""

    documents: int = 0
    tokens: int = 0
    supervised: int = 0
    truncated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        reasons = "".join(f"; dropped {count:,}: {reason}" for reason, count in self.dropped.items())
        return (
            f"corpus: {self.documents:,} documents, {self.tokens:,} tokens, {self.supervised:,} supervised, "
            f"{self.truncated:,} truncated{reasons}"
        )


def load_corpus(paths: Paths, target: Target, settings: DataConfig | None = None, quiet: bool = False) -> Dataset:
    """Reads recorded responses and conversations into a dataset of {id, task, input_ids, loss_mask}, in file order.

    A line is a recording (`response_ids`, with `prompt_ids`, or `prompt` to be rendered with the target's template) or
    has `messages`. settings: the recipe's data section. Prints statistics on stderr unless quiet. Raises InputError,
    with file and line, for lines that cannot be used, for a recording of another target, and when nothing is left.
    """
    settings = settings or DataConfig(sequence_length=DataConfig.model_fields["max_length"].default)
    statistics, parts, chunk = Statistics(), [], []
    for document in _documents(paths, target, settings):
        if kept := _cut(document, settings, statistics):
            chunk.append(kept)
        if len(chunk) == CHUNK:
            parts.append(_dataset(chunk))
            chunk = []
    if not paths:
        raise InputError(
            "there is no corpus; name recorded responses with --corpus or data.corpus (`carryover record`)."
        )
    if not statistics.documents:
        raise InputError(f"the corpus {paths} has no usable document ({statistics}).")
    if not quiet:
        print(statistics, file=sys.stderr)
    return concatenate_datasets([*parts, _dataset(chunk)] if chunk else parts)


def frequent_tokens(dataset: Dataset, vocab_size: int, count: int, always: Iterable[int] = ()) -> Tensor:
    """Ids of the `count` most frequent supervised tokens, ascending; `always` are among them, ties go to low ids."""
    seen = torch.zeros(vocab_size, dtype=torch.long)
    for batch in dataset.with_format("arrow", columns=["input_ids", "loss_mask"]).iter(CHUNK):
        ids, mask = (pc.list_flatten(batch[name]).to_numpy(zero_copy_only=False) for name in ("input_ids", "loss_mask"))
        seen += torch.bincount(torch.tensor(ids[mask.astype(bool)], dtype=torch.long), minlength=vocab_size)
    seen[list(always)] = seen.max() + 1
    return seen.argsort(descending=True, stable=True)[:count].sort().values


def preview(dataset: Dataset, tokenizer: Tokenizer, index: int = 0) -> str:
    """A document as text, each supervised span between ⟦ and ⟧: the quickest way to see that a mask is right."""
    row, text, start = dataset[index], "", 0
    ids, mask = row["input_ids"], row["loss_mask"]
    for i in range(1, len(ids) + 1):
        if i == len(ids) or mask[i] != mask[start]:
            span = tokenizer.decode(ids[start:i])
            text, start = text + (f"⟦{span}⟧" if mask[start] else str(span)), i
    return text


# ---- reading ---------------------------------------------------------------------------------------------------------
def _documents(paths: Paths, target: Target, settings: DataConfig) -> Iterator[Document]:
    for path in [paths] if isinstance(paths, str | Path) else paths:
        for file in jsonl_files(Path(path)):
            _check_manifest(file, target, settings)
            for where, record in read_jsonl(file):
                try:
                    yield from _parse(where, record, target, settings.template)
                except InputError as error:
                    raise error if str(error).startswith(where) else InputError(f"{where}: {error}") from error


def _check_manifest(file: Path, target: Target, settings: DataConfig) -> None:
    """A corpus with a manifest must be of this target and this template; one without is taken at its word."""
    manifest = read_manifest(file)
    if manifest is None:
        return
    if manifest.get("fingerprint") != target.fingerprint():
        raise InputError(
            f"{file} was recorded from another target ({manifest.get('target')}, fingerprint "
            f"{manifest.get('fingerprint')}) than {target.name} ({target.fingerprint()}); record anew."
        )
    assert target.tokenizer is not None
    if manifest.get("template") != template_fingerprint(target.tokenizer, settings.template):
        raise InputError(
            f"{file} was recorded with another chat template, or with other options of it "
            f"({manifest.get('template_options')}) than data.template {settings.template}; make them agree, or record "
            "again."
        )


def _parse(where: str, record: dict[str, Any], target: Target, options: Mapping[str, Any]) -> Iterator[Document]:
    name, task = str(record.get("id", where)), str(record.get("task", ""))
    assert target.tokenizer is not None
    if "response_ids" in record:
        response = _token_ids(record, "response_ids", target)
        if record.get("finish") == "stop" and response[-1] not in target.stop_ids:
            raise InputError(
                f"the response ends with token {response[-1]}, which is no end token of {target.name} "
                f"({sorted(target.stop_ids)}); it was recorded from another target."
            )
        if "prompt_ids" in record:
            prompt = _token_ids(record, "prompt_ids", target)
        elif isinstance(record.get("prompt"), str):
            prompt = render_prompt(target.tokenizer, [record["prompt"]], options)
        else:
            raise InputError("a recorded response needs `prompt_ids` or `prompt`.")
        yield Document(name, task, prompt + response, [False] * len(prompt) + [True] * len(response))
        return
    messages = record.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise InputError("needs `response_ids` (a recording) or `messages` (a list of {role, content}).")
    for i, (ids, mask) in enumerate(_conversation(messages, target, options)):
        yield Document(f"{name}#{i + 1}" if i else name, task, ids, mask)


def _conversation(
    messages: list[dict[str, Any]], target: Target, options: Mapping[str, Any]
) -> Iterator[tuple[list[int], list[bool]]]:
    """One sequence with all responses where the template allows it, else one per response, each with its history."""
    tokenizer, stops = target.tokenizer, target.stop_ids
    assert tokenizer is not None
    ends = [i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"]
    try:
        yield render_conversation(tokenizer, messages, options, stops)
    except HistoryRewritten:
        if len(ends) < 2:
            raise
        for end in ends:
            yield render_conversation(tokenizer, messages[:end], options, stops, last_only=True)


def _token_ids(record: dict[str, Any], key: str, target: Target) -> list[int]:
    ids = record[key]
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise InputError(f"{key} must be a non-empty list of token ids.")
    if not 0 <= min(ids) <= max(ids) < target.vocab_size:
        raise InputError(f"{key} has ids outside the vocabulary of {target.name} (0 to {target.vocab_size - 1}).")
    return ids


def _cut(document: Document, settings: DataConfig, statistics: Statistics) -> Document | None:
    """The document within max_length, or None if too little of a response is left to learn from."""
    least, longest = settings.minimum_response_tokens, settings.max_length
    if sum(document.mask) < least:
        statistics.dropped[f"fewer than {least} response tokens"] += 1
        return None
    if len(document.ids) > longest:
        document = Document(document.id, document.task, document.ids[:longest], document.mask[:longest])
        if sum(document.mask) < least:
            statistics.dropped[f"prompt fills max_length {longest}"] += 1
            return None
        statistics.truncated += 1
    statistics.documents += 1
    statistics.tokens += len(document.ids)
    statistics.supervised += sum(document.mask)
    return document


def _dataset(documents: Sequence[Document]) -> Dataset:
    columns = zip(*documents, strict=True)
    return Dataset.from_dict(dict(zip(FEATURES, map(list, columns), strict=True)), features=FEATURES)


# ---- packing ---------------------------------------------------------------------------------------------------------
class PackedRows(torch.utils.data.Dataset):
    """Rows of several whole documents each; `rows[i]` are the columns of a row as tensors `[S]` (see `collate`)."""

    def __init__(self, dataset: Dataset, members: list[list[int]]) -> None:
        self.dataset = dataset.with_format("numpy", columns=["input_ids", "loss_mask"])
        self.members = members

    def __len__(self) -> int:
        return len(self.members)

    def lengths(self) -> list[int]:
        """Tokens of each row."""
        of = pc.list_value_length(self.dataset.with_format("arrow")[:]["input_ids"]).to_pylist()
        return [sum(of[i] for i in row) for row in self.members]

    def digest(self) -> str:
        """Of all tokens and masks, in their order."""
        digest = hashlib.sha256(json.dumps(self.members).encode())
        for batch in self.dataset.with_format("arrow", columns=["input_ids", "loss_mask"]).iter(CHUNK):
            for name in ("input_ids", "loss_mask"):
                digest.update(pc.list_flatten(batch[name]).to_numpy(zero_copy_only=False).tobytes())
        return digest.hexdigest()[:16]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        documents = [self.dataset[i] for i in self.members[index]]
        lengths = [len(d["input_ids"]) for d in documents]
        return {
            "row": torch.tensor(index),
            "input_ids": torch.cat([torch.tensor(d["input_ids"], dtype=torch.long) for d in documents]),
            "positions": torch.cat([torch.arange(n) for n in lengths]),
            "document": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
            "loss_mask": torch.cat([torch.tensor(d["loss_mask"], dtype=torch.bool) for d in documents]),
        }


def pack(dataset: Dataset, sequence_length: int, seed: int = 0) -> PackedRows:
    """Packs whole documents into rows of at most `sequence_length` tokens, each into the fullest row with room for it.

    Longest documents first; `seed` draws ties and the order of rows. Raises InputError if a document does not fit.
    """
    lengths = pc.list_value_length(dataset.with_format("arrow")[:]["input_ids"]).to_pylist()
    if lengths and max(lengths) > sequence_length:
        raise InputError(
            f"a document of {max(lengths)} tokens does not fit a row of {sequence_length}; raise data.sequence_length "
            "or lower data.max_length."
        )
    generator = torch.Generator().manual_seed(seed)
    order = sorted(torch.randperm(len(lengths), generator=generator).tolist(), key=lambda i: -lengths[i])
    rows: list[list[int]] = []
    with_room: list[tuple[int, int]] = []  # (room, row), ascending
    for i in order:
        at = bisect.bisect_left(with_room, (lengths[i], -1))
        room, row = with_room.pop(at) if at < len(with_room) else (sequence_length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        if room > lengths[i]:
            bisect.insort(with_room, (room - lengths[i], row))
    return PackedRows(dataset, [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()])


PADDING = {"input_ids": 0, "positions": 0, "document": -1, "loss_mask": False}


def collate(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Rows to a batch padded to the longest of them, each `[b, S]`.

    input_ids, positions (from 0 in every document), document (index within the row, -1 for padding), loss_mask (bool);
    and `row [b]`, their indices.
    """
    return {"row": torch.stack([row["row"] for row in rows])} | {
        name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)
        for name, value in PADDING.items()
    }
