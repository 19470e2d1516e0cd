"""Runs several methods over the same prompts, interleaved, and writes `trace.jsonl` and `results.json`.

Methods are plain decoding, every drafter, and on request every carrying drafter once more with carry off or with few of
its carry rows. They take turns in one process, in rotating order, after each prompt (or a few batches of them:
`Plan.batch_size`), so that a slow minute hits all of them. A prompt with several turns continues, for all methods
alike, from what plain decoding said.

What all methods have answered is appended to the trace at once; a run that was killed goes on where it stopped, with
the same seeds. The trace has one line per method, prompt and turn: `{method, prompt, task, turn, turns, generation}`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..data.chat import conversation, render_prompt, template_fingerprint
from ..data.prompts import Prompt
from ..decode.engine import Engine, Proposals, Request
from ..decode.processors import Penalties
from ..decode.sampling import Sampling
from ..decode.trace import Generation
from ..decode.verify import DraftSampling
from ..drafter.modeling import Drafter
from ..errors import InputError
from ..files import alone, write_text
from ..target import Target
from .divergence import first_difference, logit_gap
from .environment import environment
from .results import Run, comparisons, run_record

PLAIN = "autoregressive"
OFF = " (carry off)"
WARM_UP_TOKENS = 16
PROMPTS_PER_ROW = 4  # of a batch: one method decodes so many before the next has its turn
Answers = dict[str, list[Generation]]  # method -> the responses to one prompt, one for each turn


@dataclass(frozen=True)
class Plan:
    """How to decode. carry_off: run every carrying drafter once more without carry. carry_rows: and once more for each
    of these numbers, reading at most so many carry rows. proposals: run every drafter once more for each of these
    numbers, drafting so many tokens, `auto` as many as pay. batch_size: requests that decode together; speeds are then
    throughput. template: options of the chat template (enable_thinking and the like), which must be those of the
    drafter's training data."""

    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    draft_sampling: DraftSampling = "greedy"
    seed: int = 0
    carry_off: bool = False
    batch_size: int = 1
    penalties: Penalties = field(default_factory=Penalties)
    template: dict[str, Any] = field(default_factory=dict)
    compile: bool = False
    stop_loops: bool = False
    carry_rows: tuple[int, ...] = ()
    proposals: tuple[int | Literal["auto"], ...] = ()
    engine: str = "embedded"


class Decoder(Protocol):
    """What an evaluation asks of an engine; see `decode.engine.Engine`."""

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, seed: int = 0) -> Generation: ...

    def generate_many(self, prompts: Sequence[Request], batch_size: int) -> Iterator[tuple[int, Generation]]: ...

    def warm_up(self, prompt: Request, longest: int, slots: int = 1) -> None: ...


class Drafting(NamedTuple):
    """What a method drafts with: nothing, or a drafter and where it came from, its carry rows read or not, at most so
    many of them (None: all), and how many tokens it proposes (None: as many as it was trained for)."""

    drafter: Drafter | None = None
    path: str | None = None
    carry: bool = False
    rows: int | None = None
    proposals: Proposals = None


class Engines(Protocol):
    """Makes the engines of an evaluation."""

    def make(self, target: Target, plan: Plan, how: Drafting) -> Decoder: ...


class EmbeddedEngines:
    """This project's own engine."""

    def make(self, target: Target, plan: Plan, how: Drafting) -> Engine:
        return Engine(
            target,
            how.drafter,
            plan.sampling,
            plan.draft_sampling,
            how.carry,
            timed=True,
            penalties=plan.penalties,
            compile=plan.compile,
            stop_loops=plan.stop_loops,
            carry_rows=how.rows,
            proposals=how.proposals,
        )


class Method(NamedTuple):
    """A row of the results: its name, its engine, and what it drafts with."""

    name: str
    engine: Decoder
    drafter: str | None = None
    carry: bool = False


def evaluate(
    target: Target,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Prompt],
    out: Path,
    plan: Plan = Plan(),
    progress: bool = True,
    engines: Engines = EmbeddedEngines(),
) -> dict[str, Any]:
    """Decodes all prompts with all methods and returns the results, which are also in `out/results.json`.

    drafters: by path (or hub id), in the order of comparison. engines: what decodes, named by `plan.engine`. Prompts
    too long for the target are left out, later turns that are too long as well; both are listed in the environment.
    Raises InputError when `out` holds an evaluation with other settings or nothing can be decoded.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; name a folder as --out.")
    methods = methods_of(target, drafters, plan, engines)
    prompts, skipped = fitting(target, plan, prompts)
    settings = settings_of(target, drafters, prompts, plan, methods)
    out.mkdir(parents=True, exist_ok=True)
    with alone(out):
        return _evaluate(target, methods, prompts, skipped, out, plan, settings, progress)


def _evaluate(
    target: Target,
    methods: list[Method],
    prompts: Sequence[Prompt],
    skipped: Sequence[str],
    out: Path,
    plan: Plan,
    settings: dict[str, Any],
    progress: bool,
) -> dict[str, Any]:
    """`evaluate`, once it is known what runs. skipped: ids of prompts that did not fit."""
    trace = out / "trace.jsonl"
    # First: reading the trace drops what these methods did not finish.
    if check_settings(out / "settings.json", settings) is None and (out / "results.json").exists():
        raise InputError(f"{out} holds results without the settings they came from; name another --out.")
    done = read_trace(trace, [m.name for m in methods])
    session = open_session(out / "settings.json", settings, target, unfinished=len(done) < len(prompts))
    session["skipped_prompts"] = skipped
    if len(done) < len(prompts):
        longest = max(len(ids_of(target, plan, prompt.turns)) for prompt in prompts) + plan.max_new_tokens
        for method in methods:
            first = Request(ids_of(target, plan, prompts[0].turns), WARM_UP_TOKENS)
            method.engine.warm_up(first, min(longest, target.max_length), plan.batch_size)
            method.engine.generate(ids_of(target, plan, prompts[0].turns), min(plan.max_new_tokens, WARM_UP_TOKENS))
    with counted(len(prompts), len(done), progress) as advance:
        size = 1 if plan.batch_size == 1 else PROMPTS_PER_ROW * plan.batch_size
        for index in range(0, len(prompts), size):
            waiting = [prompt for prompt in prompts[index : index + size] if prompt.id not in done]
            if waiting:
                turn = index // size % len(methods)
                done |= answer(target, methods[turn:] + methods[:turn], waiting, plan)
            for prompt in waiting:
                append_trace(trace, prompt, done[prompt.id])
                advance()
    results = results_of(target, methods, prompts, done, plan, session)
    if "engine_counters" not in results and (out / "results.json").exists():  # of the session that decoded
        with suppress(ValueError):  # damaged: the trace has everything else
            before = json.loads((out / "results.json").read_text(encoding="utf-8"))
            results |= {key: before[key] for key in ("engine_counters",) if key in before}
    write_text(out / "results.json", json.dumps(results, indent=1) + "\n")
    return results


# ---- what runs -----------------------------------------------------------------------------------------------------
def methods_of(
    target: Target, drafters: Mapping[str, Drafter], plan: Plan, engines: Engines = EmbeddedEngines()
) -> list[Method]:
    """Plain decoding, then the drafters; a drafter without its carry, with few of its rows or with few proposals comes
    right before itself with all of them."""

    def method(name: str, how: Drafting) -> Method:
        return Method(name, engines.make(target, plan, how), how.path, how.carry and how.rows != 0)

    methods = [method(PLAIN, Drafting())]
    counts, shorter = sorted(set(plan.carry_rows)), sorted(set(plan.proposals), key=str)
    variants = OFF, *(few(rows, "carry row") for rows in counts), *(few(n, "proposal") for n in shorter)
    for name, (path, drafter) in zip(short_names(list(drafters), variants), drafters.items(), strict=True):
        carries = drafter.config.carry != "none"
        if carries and plan.carry_off:
            methods.append(method(name + OFF, Drafting(drafter, path)))
        for rows in counts if carries else ():
            methods.append(method(name + few(rows, "carry row"), Drafting(drafter, path, True, rows)))
        for n in shorter:
            methods.append(method(name + few(n, "proposal"), Drafting(drafter, path, carries, proposals=n)))
        methods.append(method(name, Drafting(drafter, path, carries)))
    return methods


def few(count: int | str, what: str) -> str:
    return f" ({count} {what}{'s' * (count != 1)})"


def short_names(paths: Sequence[str], variants: Sequence[str] = (OFF,)) -> list[str]:
    """The last parts of the paths, as few as tell them apart (and from plain decoding, and from their variants)."""
    parts = [Path(path).parts for path in paths]
    for count in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(p[-count:]) for p in parts]
        shown = [PLAIN, *(name + end for name in names for end in ("", *variants))]
        if len(set(shown)) == len(shown):
            return names
    return [f"{i}:{path}" for i, path in enumerate(paths, 1)]  # whatever the folders are called


def fitting(target: Target, plan: Plan, prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[str]]:
    """The prompts that leave room for a response in the target's context, and the ids of the others."""
    ids = [prompt.id for prompt in prompts]
    twice = sorted({i for i in ids if ids.count(i) > 1}) if len(set(ids)) < len(ids) else []
    if twice:
        raise InputError(f"prompt ids must be unique, but {twice[0]!r} appears more than once.")
    fits = [p for p in prompts if len(ids_of(target, plan, p.turns)) < target.max_length]
    if not fits:
        raise InputError(f"none of {len(prompts)} prompts fits into the target's context ({target.max_length} tokens).")
    return fits, sorted(set(ids) - {p.id for p in fits})


def ids_of(target: Target, plan: Plan, turns: Sequence[str], responses: Sequence[str] = ()) -> list[int]:
    """Token ids of the next prompt: the turns up to the first one that has no response yet."""
    if target.tokenizer is None:
        raise InputError(f"the target {target.name!r} has no tokenizer, so it cannot read prompts.")
    return render_prompt(target.tokenizer, conversation(turns, responses), plan.template)


def answer(target: Target, methods: Sequence[Method], prompts: Sequence[Prompt], plan: Plan) -> dict[str, Answers]:
    """The responses of all methods, in the given order, to every turn of some prompts, by prompt id."""
    answers: dict[str, Answers] = {p.id: {method.name: [] for method in methods} for p in prompts}
    for turn in range(max(len(p.turns) for p in prompts)):
        asked = {}
        for p in prompts:
            if turn < len(p.turns) and turn == len(answers[p.id][PLAIN]):
                ids = ids_of(target, plan, p.turns, [text_of(target, g) for g in answers[p.id][PLAIN]])
                if len(ids) < target.max_length:
                    asked[p.id] = Request(ids, plan.max_new_tokens, prompt_seed(plan.seed, p.id, turn))
        names = list(asked)
        for method in methods:
            for i, generation in method.engine.generate_many(list(asked.values()), plan.batch_size):
                answers[names[i]][method.name].append(generation)
    return answers


def text_of(target: Target, generation: Generation) -> str:
    assert target.tokenizer is not None
    return str(target.tokenizer.decode(generation.tokens, skip_special_tokens=True))


def prompt_seed(seed: int, prompt_id: str, turn: int) -> int:
    """A seed that depends on the prompt and not on its place in the list."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{prompt_id}/{turn}".encode()).digest()[:6])


# ---- resuming ------------------------------------------------------------------------------------------------------
def settings_of(
    target: Target, drafters: Mapping[str, Drafter], prompts: Sequence[Prompt], plan: Plan, methods: Sequence[Method]
) -> dict[str, Any]:
    """Everything that must not change between the sessions of one evaluation."""
    texts = json.dumps([[p.id, p.task, p.turns] for p in prompts])
    return {
        "target": target.name,
        "target_fingerprint": target.fingerprint(),
        "dtype": str(target.dtype),
        "device": target.device.type,
        "threads": torch.get_num_threads(),
        "drafters": {path: drafter.digest() for path, drafter in drafters.items()},
        "methods": [method.name for method in methods],
        "chat_template": template_fingerprint(target.tokenizer) if target.tokenizer else "",
        "stop_ids": sorted(target.stop_ids),
        "prompts": f"{len(prompts)}, {hashlib.sha256(texts.encode()).hexdigest()[:16]}",
        **asdict(plan),
    }


def check_settings(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """What the settings file records, if there is one. Raises InputError when it is damaged or has other settings."""
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text())
        defaults = {"compile": False, "stop_loops": False, "carry_rows": [], "proposals": [], "engine": "embedded"}
        before, _ = defaults | record["settings"], record["environment"]["sessions"] + 0
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged; restore it, or name another --out.") from error
    changed = []
    for key, value in json.loads(json.dumps(settings)).items():
        there = before.get(key, value if key in ("chat_template", "stop_ids") else None)  # newer than some evaluations
        if isinstance(there, dict) and isinstance(value, dict):
            if key == "drafters" and list(there.values()) == list(value.values()):
                continue  # the same drafters, wherever they lie
            changed += [f"{key}.{k} {there.get(k)!r}, now {value.get(k)!r}" for k in sorted(there.keys() | value.keys())
                        if there.get(k) != value.get(k)]  # fmt: skip
        elif there != value:
            changed.append(f"{key} {there!r}, now {value!r}")
    if changed:
        was = "; ".join(changed)
        raise InputError(
            f"{path.parent} holds an evaluation with other settings ({was}); name another --out, or delete it."
        )
    return record


def open_session(path: Path, settings: dict[str, Any], target: Target, unfinished: bool) -> dict[str, Any]:
    """The environment of the evaluation: recorded when it began, with the number of sessions it took so far."""
    record = check_settings(path, settings)
    record = record or {"settings": settings, "environment": {**environment(target), "sessions": 0}}
    record["environment"]["sessions"] += unfinished
    write_text(path, json.dumps(record, indent=1) + "\n")
    return record["environment"]


def append_trace(path: Path, prompt: Prompt, answers: Answers) -> None:
    """All methods' responses to one prompt, in one write."""
    records = [
        {
            "method": method,
            "prompt": prompt.id,
            "task": prompt.task,
            "turn": turn,
            "turns": len(generations),
            "generation": g.as_dict(),
        }
        for method, generations in answers.items()
        for turn, g in enumerate(generations)
    ]
    with path.open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))


def read_trace(path: Path, methods: Sequence[str]) -> dict[str, Answers]:
    """The finished prompts of a trace, by id. What a kill left behind (a torn line, a prompt that not all methods
    answered) is removed from the file."""
    if not path.exists():
        return {}
    lines = path.read_text().splitlines(keepends=True)
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise InputError(f"{path} is damaged at line {number}; restore or delete it.") from error
    answers: dict[str, Answers] = {}
    turns: dict[str, int] = {}
    for number, r in enumerate(records, 1):
        try:
            generation = Generation.from_dict(r["generation"])
            answers.setdefault(r["prompt"], {}).setdefault(r["method"], []).append(generation)
            turns[r["prompt"]] = r["turns"]
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path} is damaged at line {number}; restore or delete it.") from error
    done = {
        prompt: by_method
        for prompt, by_method in answers.items()
        if all(len(by_method.get(method, ())) == turns[prompt] for method in methods)
    }
    if len(done) < len(answers) or len(records) < len(lines) or (lines and not lines[-1].endswith("\n")):
        write_text(path, "".join(json.dumps(r) + "\n" for r in records if r["prompt"] in done))
    return done


# ---- results -------------------------------------------------------------------------------------------------------
def results_of(
    target: Target,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    done: Mapping[str, Answers],
    plan: Plan,
    session: dict[str, Any],
) -> dict[str, Any]:
    runs = [Run(m.name, m.drafter, m.carry) for m in methods]
    if cut := [p.id for p in prompts if len(done[p.id][PLAIN]) < len(p.turns)]:
        session = {**session, "cut_prompts": cut}
    counters = {m.name: counts for m in methods if (counts := getattr(m.engine, "counters", None))}
    for run in runs:
        for prompt in prompts:
            run.by_task.setdefault(prompt.task, {})[prompt.id] = done[prompt.id][run.name]
    return {
        "target": target.name,
        "temperature": plan.sampling.temperature,
        "max_new_tokens": plan.max_new_tokens,
        "batch_size": plan.batch_size,
        "compile": plan.compile,
        "stop_loops": plan.stop_loops,
        "engine": plan.engine,
        "seed": plan.seed,
        "sampling": asdict(plan.sampling),
        "penalties": asdict(plan.penalties),
        "draft_sampling": plan.draft_sampling,
        "environment": session,
        **({"engine_counters": counters} if counters else {}),
        "runs": [run_record(run, runs[0], plan.sampling.greedy, plan.seed) for run in runs],
        "comparisons": comparisons(runs, plan.seed),
        "divergences": divergences(target, prompts, done, plan) if plan.sampling.greedy else [],
    }


def divergences(
    target: Target, prompts: Sequence[Prompt], done: Mapping[str, Answers], plan: Plan
) -> list[dict[str, Any]]:
    """Every response that parts from plain decoding's, with the place and the gap between the two logits."""
    found = []
    for prompt in prompts:
        plain = done[prompt.id][PLAIN]
        for method, generations in done[prompt.id].items():
            for turn, generation in enumerate(generations):
                position = first_difference(generation.tokens, plain[turn].tokens)
                if position is not None:
                    ids = ids_of(target, plan, prompt.turns, [text_of(target, g) for g in plain[:turn]])
                    gap = logit_gap(target, ids, generation.tokens, plain[turn].tokens, position)
                    place = {"run": method, "prompt": prompt.id, "turn": turn, "position": position}
                    found.append({**place, "logit_gap": gap})
    return found


@contextmanager
def counted(total: int, done: int, show: bool, title: str = "evaluating") -> Iterator[Any]:
    """A progress bar over prompts, on stderr; yields what advances it by one."""
    columns = TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not show) as bar:
        task = bar.add_task("prompts", total=total, completed=done)
        yield lambda: bar.advance(task)
