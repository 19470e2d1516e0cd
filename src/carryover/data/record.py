"""Recording: the target answers prompts, and its exact tokens become the data drafters learn from.

A recording is a JSONL file that only ever grows, a batch at a time, and a manifest beside it that says which target,
sampling and template produced it. Killed at any moment it goes on where it stopped: a torn last line is dropped, ids
that are there are skipped, and a recording under another manifest is refused rather than mixed.

A response depends on its prompt, the recording's seed and the prompt's id, not on its batch: each has its own random
numbers. Features are not stored. At 30 KB per token they fill terabytes (SPEC 9.10), and draft-verify-draft needs the
live target.

Letters: `b` requests, `S` prompt tokens (padded), `V` vocabulary. Source: SPEC 2.4, 9.8.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..decode.engine import Engine, Request
from ..decode.processors import Penalties
from ..decode.sampling import Sampling
from ..errors import InputError
from ..files import alone, write_text
from ..target import Target
from .chat import Options, conversation, render_prompt, template_fingerprint
from .jsonl import read_jsonl
from .prompts import Prompt

# (target, prompts, one seed per prompt, sampling, max_new_tokens) -> response ids, with their end token if they ended
Respond = Callable[[Target, list[list[int]], list[int], Sampling, int], list[list[int]]]
DESCRIPTIVE = ("target", "prompts")  # manifest entries that may differ when a recording is continued


class Turn(NamedTuple):
    """One response to be recorded: turn `turn` of a prompt, under its own id."""

    id: str
    prompt: Prompt
    turn: int
    prompt_ids: list[int]


class Recorded(NamedTuple):
    """written: responses added by this call; found: already there; too_long: prompts without room for a response."""

    written: int
    found: int
    too_long: int


def record(
    target: Target,
    prompts: Sequence[Prompt],
    out: str | Path,
    sampling: Sampling = Sampling(temperature=0.7),
    max_new_tokens: int = 512,
    seed: int = 0,
    batch_size: int = 16,
    options: Options | None = None,
    respond: Respond | None = None,
    engine: str = "transformers",
    progress: bool = True,
    penalties: Penalties = Penalties(),
    only: bool = False,
) -> Recorded:
    """Appends the target's response to every prompt that `out` does not hold yet.

    Each line is {id, task, source, licence, prompt, prompt_ids, response_ids, response, finish}; of a prompt with
    several turns each is answered in sequence, as id#1, id#2 and so on. options: of the chat template. respond, engine:
    another way of generating and its name. penalties: those that the target will be served with; a `respond` of your
    own has to see to them itself. only: `out` may answer no other prompts. Raises InputError, before anything is
    written, if `out` was recorded under other conditions or answers another prompt under the id of one of these, if no
    prompt fits into the context, or if the template cannot render one.
    """
    out = Path(out)
    assert target.tokenizer is not None
    manifest = {
        "target": target.name,
        "fingerprint": target.fingerprint(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "engine": engine,
        "sampling": asdict(sampling),
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "template": template_fingerprint(target.tokenizer, options),
        "template_options": dict(options or {}),
        "prompts": len(prompts),
    } | ({"penalties": asdict(penalties)} if penalties != Penalties() else {})
    respond = respond or partial(respond_batch, penalties=penalties)
    requests, unfit = _requests(target, prompts, 0, {}, options)  # before anything is written: it may raise
    if prompts and not requests:
        raise InputError(f"none of {len(prompts)} prompts fits into the target's context ({target.max_length} tokens).")
    names = [_id(prompt, turn) for prompt in prompts for turn in range(len(prompt.turns))]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"two responses would have the id {twice!r} (turn N of a prompt is ID#N); rename a prompt.")
    _check_place(out, manifest)
    asked = {_id(prompt, turn): text for prompt in prompts for turn, text in enumerate(prompt.turns)}
    with out.open("ab") as file, alone(out, wait=True), _bar(progress) as bar:
        answers = _answers(out, asked, only)
        _update_count(out, manifest)
        found, written, too_long = len(answers), 0, 0
        task = bar.add_task("recording", total=sum(len(p.turns) for p in prompts), tokens=0)
        for turn in range(max((len(p.turns) for p in prompts), default=0)):
            if turn:
                requests, unfit = _requests(target, prompts, turn, answers, options)
            too_long += unfit
            bar.update(task, completed=found + written + too_long)
            for batch in _batches(requests, answers.keys(), batch_size, seed):
                seeds = [_seed(seed, request.id) for request in batch]
                ids = respond(target, [r.prompt_ids for r in batch], seeds, sampling, max_new_tokens)
                rows = [_row(target, request, response) for request, response in zip(batch, ids, strict=True)]
                _append(file, rows)
                answers.update({row["id"]: row["response"] for row in rows})
                written += len(rows)
                bar.update(task, advance=len(rows), tokens=bar.tasks[task].fields["tokens"] + sum(map(len, ids)))
    return Recorded(written, found, too_long)


def respond_batch(
    target: Target,
    prompts: list[list[int]],
    seeds: list[int],
    sampling: Sampling,
    max_new_tokens: int,
    batch_size: int | None = None,
    penalties: Penalties = Penalties(),
) -> list[list[int]]:
    """Responses in the order of the prompts, decoded `batch_size` at a time (None: all together)."""
    engine = Engine(target, sampling=sampling, timed=False, penalties=penalties)
    asked = [Request(ids, max_new_tokens, seed) for ids, seed in zip(prompts, seeds, strict=True)]
    answers = dict(engine.generate_many(asked, batch_size or len(asked)))
    return [answers[i].tokens for i in range(len(asked))]


# ---- what is to be recorded ------------------------------------------------------------------------------------------
def _requests(
    target: Target, prompts: Sequence[Prompt], turn: int, answers: dict[str, str], options: Options | None
) -> tuple[list[Turn], int]:
    """The requests of one turn whose earlier turns are answered, and how many leave no room for a response."""
    assert target.tokenizer is not None
    requests, too_long = [], 0
    for prompt in prompts:
        if turn >= len(prompt.turns):
            continue
        earlier = [answers.get(_id(prompt, t)) for t in range(turn)]
        if any(answer is None for answer in earlier):
            too_long += 1
            continue
        ids = render_prompt(target.tokenizer, conversation(prompt.turns, earlier), options)  # type: ignore[arg-type]
        if len(ids) < target.max_length:
            requests.append(Turn(_id(prompt, turn), prompt, turn, ids))
        else:
            too_long += 1
    return requests, too_long


def _id(prompt: Prompt, turn: int) -> str:
    return prompt.id if len(prompt.turns) == 1 else f"{prompt.id}#{turn + 1}"


def _batches(requests: list[Turn], done: Any, size: int, seed: int) -> Iterator[list[Turn]]:
    """Requests of similar length together, the batches in random order so that a part is a fair sample of the whole.

    Batches are formed before the finished ones are taken out: a continued recording decodes in the same company.
    """
    ordered = sorted(requests, key=lambda request: (len(request.prompt_ids), request.id))
    batches = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    random.Random(seed).shuffle(batches)
    done = frozenset(done)
    rest = []
    for batch in batches:
        left = [request for request in batch if request.id not in done]
        if len(left) == len(batch):
            yield batch
        else:
            rest += left
    yield from (rest[i : i + size] for i in range(0, len(rest), size))


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big") >> 1


# ---- the file and its manifest ---------------------------------------------------------------------------------------
def manifest_path(recording: Path) -> Path:
    return recording.with_name(recording.name.removesuffix(".gz") + ".manifest.json")


def read_manifest(recording: Path) -> dict[str, Any] | None:
    """The manifest beside a recording, if there is one."""
    path = manifest_path(recording)
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(
            f"the manifest {path} is not valid JSON; restore it, or record again under another name."
        ) from error
    if not isinstance(manifest, dict):
        raise InputError(f"the manifest {path} must be a JSON object.")
    return manifest


def _check_place(out: Path, manifest: dict[str, Any]) -> None:
    """Raises InputError unless responses can be added to `out`. A new one gets its manifest."""
    if out.is_dir():
        raise InputError(f"{out} is a folder; name a file in it, such as {out / 'recorded.jsonl'}.")
    if out.suffix == ".gz":
        raise InputError(f"a recording grows line by line and cannot be compressed; name it {out.with_suffix('')}.")
    before = read_manifest(out)
    if before is None:
        if out.exists() and out.stat().st_size:
            raise InputError(f"{out} exists without a manifest, so nothing says what recorded it; name another --out.")
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(manifest_path(out), json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
        return
    for key in sorted({*manifest, "penalties"} - set(DESCRIPTIVE)):  # penalties: only where there are any
        if before.get(key) != manifest.get(key):
            raise InputError(
                f"{out} was recorded with {key} {before.get(key)!r}, not {manifest.get(key)!r}; name another --out "
                "(nothing was changed)."
            )


def _update_count(out: Path, manifest: dict[str, Any]) -> None:
    """Brings the number of prompts in the manifest of a recording up to date."""
    before = read_manifest(out) or manifest
    if before.get("prompts") != manifest["prompts"]:
        content = json.dumps({**before, "prompts": manifest["prompts"]}, indent=1, ensure_ascii=False)
        write_text(manifest_path(out), content + "\n")


def _answers(out: Path, asked: Mapping[str, str], only: bool) -> dict[str, str]:
    """The responses that `out` holds, by id; what a kill left of a line is dropped. asked: the prompts by id."""
    _drop_torn_line(out)
    answers = {}
    for where, row in read_jsonl(out):
        if not {"id", "response"} <= row.keys():
            raise InputError(f"{where} is no recorded response (it has no id or no response); restore or delete it.")
        name = str(row["id"])
        if name in answers:
            raise InputError(f"{where} answers {row['id']!r} a second time; take one of the two lines out.")
        if only and name not in asked:
            raise InputError(f"{where} answers {name!r}, which is not among the prompts; name another --out.")
        if name in asked and row.get("prompt", asked[name]) != asked[name]:
            raise InputError(
                f"{where} answers another prompt of the id {name!r}; give the prompts ids that differ, or name another "
                "--out."
            )
        answers[name] = str(row["response"])
    return answers


def _drop_torn_line(out: Path) -> None:
    """Cuts what a kill left behind the last line break."""
    with out.open("r+b") as file:
        end = keep = file.seek(0, os.SEEK_END)
        while keep and (file.seek(keep - 1), file.read(1))[1] != b"\n":
            keep -= 1
        if keep < end:
            file.truncate(keep)


def _append(file: BinaryIO, rows: list[dict[str, Any]]) -> None:
    file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    file.flush()
    os.fsync(file.fileno())


def _row(target: Target, request: Turn, response: list[int]) -> dict[str, Any]:
    assert target.tokenizer is not None
    prompt = request.prompt
    return {
        "id": request.id,
        "task": prompt.task,
        "source": prompt.source,
        "licence": prompt.licence,
        "prompt": prompt.turns[request.turn],
        "prompt_ids": request.prompt_ids,
        "response_ids": response,
        "response": target.tokenizer.decode(response, skip_special_tokens=True),
        "finish": "stop" if response[-1] in target.stop_ids else "length",
    }


def _bar(visible: bool) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), disable=not visible)
