"""Why carry helps: decodes prompts greedily with carry and looks at every round what other drafters would do there.

The decoding is the engine's own, and so is every draft: ON and OFF draft from the same batch, with its carry rows and
with none; BASELINE has a second engine whose batch commits the same proposals, so that its cache holds the same tokens.
What was seen is one line of `diagnostics.jsonl` per prompt, written at once; a run that was killed goes on from it. All
figures of `diagnostics.json` are computed from these lines, by `recall.py`, `reconvergence.py` with `gain.py`, and
`attention.py`.

Letters: `P` proposals, `B` block rows, `D` hidden. Source: SPEC 7.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.prompts import Prompt
from ..decode.engine import Batch, Engine, Request
from ..decode.trace import Generation, Round
from ..drafter.modeling import Drafter
from ..errors import InputError
from ..files import alone, write_text
from ..target import Target
from .attention import add, attention, attention_sums
from .gain import explain
from .recall import ranks, recall
from .run import Plan, check_settings, counted, fitting, ids_of, open_session, settings_of, text_of

FILE, RECORDS, SETTINGS = "diagnostics.json", "diagnostics.jsonl", "diagnostics.settings.json"
States = dict[str, Tensor]  # the blocks `[1, B, D]` of `on`, `off` and `baseline` at one anchor


def diagnose(
    target: Target,
    drafter: tuple[str, Drafter],
    baseline: tuple[str, Drafter],
    prompts: Sequence[Prompt],
    out: Path,
    plan: Plan = Plan(),
    progress: bool = True,
) -> dict[str, Any]:
    """Diagnoses a carrying drafter against a baseline, each with its path; writes and returns `diagnostics.json`.

    Of the plan only max_new_tokens, seed (of the resamples) and template count. Raises InputError when the two do not
    compare, `out` holds other settings, or no round had carry.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; name a folder as --out.")
    check_pair(drafter, baseline)
    prompts, skipped = fitting(target, plan, prompts)
    named = {f"{role} {path}": d for role, (path, d) in (("drafter", drafter), ("baseline", baseline))}
    settings = settings_of(target, named, prompts, plan, [])
    out.mkdir(parents=True, exist_ok=True)
    with alone(out):
        check_settings(out / SETTINGS, settings)
        done = read_records(out / RECORDS)
        session = open_session(out / SETTINGS, settings, target, unfinished=len(done) < len(prompts))
        session["skipped_prompts"] = skipped
        with counted(len(prompts), len(done), progress, "diagnosing") as advance, (out / RECORDS).open("a") as file:
            for prompt in prompts:
                if prompt.id not in done:
                    done[prompt.id] = probe(target, drafter[1], baseline[1], prompt, plan)
                    file.write(json.dumps(done[prompt.id]) + "\n")
                    file.flush()
                    advance()
        proposals = drafter[1].config.num_proposals
        result = {
            "target": target.name, "drafter": drafter[0], "baseline": baseline[0], "proposals": proposals,
            "max_new_tokens": plan.max_new_tokens, "seed": plan.seed, "environment": session,
            **figures_of([done[prompt.id] for prompt in prompts], proposals, plan.seed),
        }  # fmt: skip
        write_text(out / FILE, json.dumps(result, indent=1) + "\n")
    return result


def check_pair(drafter: tuple[str, Drafter], baseline: tuple[str, Drafter]) -> None:
    """Raises InputError unless the first drafter has carry and both propose the same positions."""
    (path, a), (baseline_path, b) = drafter, baseline
    if a.config.carry == "none":
        raise InputError(f"{path} has no carry; name a drafter of the carryover stage as --drafter.")
    if a.config.hints:
        raise InputError(f"{path} carries token hints, and diagnose looks at carry rows; evaluate it with --carry-off.")
    if b.config.carry != "none":
        raise InputError(f"{baseline_path} carries itself; name the drafter it started from, or `continued`.")
    shapes = [f"blocks of {d.config.block_size} ({d.config.slots})" for d in (a, b)]
    if shapes[0] != shapes[1]:
        raise InputError(f"{path} has {shapes[0]}, but the baseline {baseline_path} has {shapes[1]}.")


# ---- decoding ------------------------------------------------------------------------------------------------------
def probe(target: Target, drafter: Drafter, baseline: Drafter, prompt: Prompt, plan: Plan) -> dict[str, Any]:
    """The record of a prompt; a prompt with several turns continues from what was answered."""
    responses: list[dict[str, Any]] = []
    seen, replies = [], list[str]()
    for _ in prompt.turns:
        ids = ids_of(target, plan, prompt.turns, replies)
        if len(ids) >= target.max_length:
            break
        generation, response, sums = follow(target, drafter, baseline, ids, plan.max_new_tokens)
        responses.append(response)
        seen += sums
        replies.append(text_of(target, generation))
    masses = {key: np.round(value, 9).tolist() for key, value in add(seen).items()}
    return {"prompt": prompt.id, "task": prompt.task, "responses": responses, "attention": masses}


def follow(
    target: Target, drafter: Drafter, baseline: Drafter, ids: Sequence[int], max_new_tokens: int
) -> tuple[Generation, dict[str, Any], list[dict[str, Any]]]:
    """One response with carry: itself, its record, and the attention of each draft that had carry.

    The record: `tokens`; `following`, how the target goes on where max_new_tokens cut it; `rounds`, each with `anchor`,
    `proposals`, `accepted`, `top` (the target's first choice at rows 0..P), and where the draft had carry the ranks of
    the reference for `on`, `off` and `baseline`; `baseline_tokens` and `baseline_rounds` of the baseline's decoding.
    """
    on, base = Engine(target, drafter), Engine(target, baseline, carry=False)
    request, generation = Request(ids, max_new_tokens), Generation(len(ids))
    batch, shadow = on.new_batch([request], 1), base.new_batch([request], 1)
    goes_on = on.join(batch, request, generation)
    base.join(shadow, request, Generation(len(ids)))
    rounds, states, sums = [], list[States](), list[dict[str, Any]]()
    while goes_on:
        states.append(draft_three(on, batch, base, shadow, sums))
        round_, top = commit_both(on, batch, base, shadow)
        goes_on = not on.take(batch.requests[0], round_)
        rounds.append({key: getattr(round_, key) for key in ("anchor", "proposals", "accepted")} | {"top": top})
    following = continuation(target, ids, generation, on.proposals + 2)
    text = [*ids, *generation.tokens, *following]
    for r, blocks in zip(rounds, states, strict=True):
        reference = text[r["anchor"] + 1 :][: on.proposals]
        for name, hidden in blocks.items():
            engine = base if name == "baseline" else on
            assert engine.drafter is not None
            r[name] = ranks(engine.drafter, hidden, text[r["anchor"]], reference, engine.draft_head)
    plain = base.generate(ids, max_new_tokens)
    record = {
        "prompt_tokens": len(ids), "tokens": generation.tokens, "following": following, "rounds": rounds,
        "baseline_tokens": len(plain.tokens) - 1, "baseline_rounds": len(plain.rounds),
    }  # fmt: skip
    return generation, record, sums


def draft_three(on: Engine, batch: Batch, base: Engine, shadow: Batch, sums: list[dict[str, Any]]) -> States:
    """The blocks of ON, OFF and BASELINE at the anchor; none where nothing is carried. Leaves no trace but in sums."""
    hidden = base.draft_states(shadow)  # in every round, for it takes in the rows that the last one committed
    request = batch.requests[0]
    carried = request.carried
    if not carried:
        return {}
    with_carry, seen = attention_sums(on, batch)
    sums.append(seen)
    request.carried = 0
    without = on.draft_states(batch)
    request.carried = carried
    return {"on": with_carry, "off": without, "baseline": hidden}


def commit_both(on: Engine, batch: Batch, base: Engine, shadow: Batch) -> tuple[Round, list[int]]:
    """Drafts with carry and lets both batches verify these proposals; returns the round and the target's first choices
    `[P+1]`."""
    anchor, carried = batch.requests[0].anchor, batch.requests[0].carried
    proposals, _ = on.draft(batch)
    [(proposed, accepted, token)], logits = on.commit(batch, proposals)
    base.commit(shadow, proposals)
    assert shadow.anchors == batch.anchors and torch.equal(shadow.tokens, batch.tokens)
    return Round(anchor, proposed, accepted, [*proposed[:accepted], token], carried), logits[0].argmax(-1).tolist()


def continuation(target: Target, ids: Sequence[int], generation: Generation, length: int) -> list[int]:
    """The next `length` tokens of a response that was cut, or as many as its end or the context leave."""
    text = [*ids, *generation.tokens]
    room = min(length, target.max_length - len(text))
    return Engine(target).generate(text, room).tokens if generation.finish == "length" and room > 0 else []


# ---- records -------------------------------------------------------------------------------------------------------
def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """The finished prompts by id; a last line torn by a kill is removed from the file."""
    if not path.exists():
        return {}
    lines, records = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True), {}
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            records[record["prompt"]] = record
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines) or line.endswith("\n"):
                raise InputError(f"{path} is damaged at line {number}; restore or delete it.") from error
            write_text(path, "".join(lines[:-1]))
    return records


def figures_of(records: Sequence[dict[str, Any]], proposals: int, seed: int) -> dict[str, Any]:
    """The figures of diagnostics.json. Raises InputError when nothing was carried."""
    by_task: dict[str, list[Any]] = {}
    for record in records:
        by_task.setdefault(record["task"], []).append(record["responses"])
    states = [[r for response in x["responses"] for r in response["rounds"] if "on" in r] for x in records]
    if not any(states):
        raise InputError("no draft had carry rows, so there is nothing to diagnose; allow more tokens or prompts.")
    return {
        "recall": recall(states, proposals, seed),
        **explain(by_task, seed),
        "attention": attention([record["attention"] for record in records]),
    }
