"""Measures a lab target against the grammar it learned, and writes it as a model folder with those figures.

The grammar's entropy is known exactly, so the excess of the loss over it is what the target failed to learn. Letters:
`b` prompts of a batch, `S` tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from ..files import let_others_read
from . import language

if TYPE_CHECKING:
    from .training import LabRecipe


def held_out_examples(per_task: int, seed: int = 0, rates: language.Rates | None = None) -> list[language.Example]:
    """Examples of the evaluation split, `per_task` of each task."""
    return [
        language.sample_split("eval", task, random.Random(f"held-out-{seed}-{task}-{i}"), rates=rates)
        for task in language.TASKS
        for i in range(per_task)
    ]


def prompt_ids(tokenizer: PreTrainedTokenizerFast, prompt: str) -> list[int]:
    """The prompt as the chat template renders it, ready for the response."""
    message = [{"role": "user", "content": prompt}]
    ids: Any = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    return ids


@torch.no_grad()
def response_losses(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]], batch_size: int = 64
) -> list[Tensor]:
    """Per (prompt, response) the loss of each response token, end of turn included, in nats `[S]`."""
    losses = []
    for i in range(0, len(pairs), batch_size):
        rows = []
        for prompt, response in pairs[i : i + batch_size]:
            ids = prompt_ids(tokenizer, prompt)
            rows.append(
                (len(ids), ids + tokenizer.encode(f"{response} {tokenizer.eos_token}", add_special_tokens=False))
            )
        tokens = torch.full((len(rows), max(len(ids) for _, ids in rows)), tokenizer.pad_token_id)
        for r, (_, ids) in enumerate(rows):
            tokens[r, : len(ids)] = torch.tensor(ids)
        logits = model(tokens).logits[:, :-1].float()
        all_losses = nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        losses += [all_losses[r, start - 1 : len(ids) - 1] for r, (start, ids) in enumerate(rows)]
    return losses


@torch.no_grad()
def responses(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str], temperature: float, seed: int = 0
) -> list[str | None]:
    """A generated response per prompt; None where it did not end within twice the longest response of the grammar."""
    torch.manual_seed(seed)
    texts: list[str | None] = []
    for i in range(0, len(prompts), 64):
        rows = [prompt_ids(tokenizer, p) for p in prompts[i : i + 64]]
        batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        generator: Any = model  # transformers types `generate` for a protocol that its own models do not fit
        new = generator.generate(**batch, max_new_tokens=2 * language.LONGEST_RESPONSE, **sampling)
        for ids in new[:, batch["input_ids"].shape[1] :].tolist():
            ended = tokenizer.eos_token_id in ids
            text = str(tokenizer.decode(ids[: ids.index(tokenizer.eos_token_id)] if ended else ids))
            texts.append(text if ended and not loops(text) else None)
    return texts


def loops(text: str, n: int = 12, times: int = 3) -> bool:
    """Whether any run of `n` words occurs `times` times."""
    words = text.split()
    counts: dict[tuple[str, ...], int] = {}
    for i in range(len(words) - n + 1):
        gram = tuple(words[i : i + n])
        counts[gram] = counts.get(gram, 0) + 1
    return any(count >= times for count in counts.values())


def measure(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    per_task: int = 64,
    seed: int = 0,
    rates: language.Rates | None = None,
) -> dict[str, Any]:
    """Held-out figures per task and overall: losses in nats per token, loops and right answers as shares.

    loss and entropy are of the same sampled responses. shuffled: the loss when each response follows another prompt of
    its task. right: the response is one that the grammar says to this prompt. loops: also what does not end.
    """
    examples = held_out_examples(per_task, seed, rates)
    losses = response_losses(model, tokenizer, [(e.prompt, e.response) for e in examples])
    others = [examples[i - i % per_task + (i + 1) % per_task].prompt for i in range(len(examples))]
    shuffled = response_losses(model, tokenizer, [(p, e.response) for p, e in zip(others, examples, strict=True)])
    said = {t: responses(model, tokenizer, [e.prompt for e in examples], t, seed) for t in (0.0, 1.0)}

    def figures(rows: list[int]) -> dict[str, float]:
        tokens = sum(len(losses[i]) for i in rows)
        result = {
            "tokens": tokens,
            "loss": float(sum(losses[i].sum() for i in rows)) / tokens,
            "entropy": -sum(examples[i].logprob for i in rows) / tokens,
            "shuffled_loss": float(sum(shuffled[i].sum() for i in rows)) / tokens,
            "tokens_per_choice": tokens / max(1, sum(len(examples[i].choices) for i in rows)),
        }
        for t, texts in said.items():
            right = [texts[i] is not None and language.score(examples[i], texts[i]) > -1e9 for i in rows]  # type: ignore[arg-type]
            result[f"loops_t{t:.0f}"] = sum(texts[i] is None for i in rows) / len(rows)
            result[f"right_t{t:.0f}"] = sum(right) / len(rows)
        return {k: round(v, 4) for k, v in result.items()}

    tasks = {task: figures([i for i, e in enumerate(examples) if e.task == task]) for task in language.TASKS}
    return {"prompts_per_task": per_task, "overall": figures(list(range(len(examples)))), "tasks": tasks}


def table(figures: dict[str, Any]) -> str:
    """The figures of `measure` as text."""
    head = f"{'task':16}{'loss':>8}{'entropy':>9}{'excess':>8}{'shuffled':>10}{'loops T=0/1':>14}{'right T=0/1':>14}"
    lines = [head]
    for name, f in (*figures["tasks"].items(), ("overall", figures["overall"])):
        excess = f["loss"] / f["entropy"] - 1 if f["entropy"] else float("inf")  # of a language without choices
        lines.append(
            f"{name:16}{f['loss']:8.4f}{f['entropy']:9.4f}{excess:8.1%}{f['shuffled_loss']:10.3f}"
            f"{f['loops_t0']:8.1%}{f['loops_t1']:6.1%}{f['right_t0']:8.1%}{f['right_t1']:6.1%}"
        )
    return "\n".join(lines)


def save_target(
    out: Path,
    recipe: LabRecipe,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    seconds: float,
    say: Callable[[str], None] = print,
    per_task: int = 64,
) -> dict[str, Any]:
    """Writes the bf16 model folder and its `card.json`; the figures are those of the written weights."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.save_pretrained(out)
    let_others_read(out)
    tokenizer.save_pretrained(out)
    figures = measure(model.float().eval(), tokenizer, per_task, rates=recipe.rates)
    say(table(figures))
    card = {
        "name": "carryover lab target",
        "licence": "Apache-2.0",
        "recipe": asdict(recipe),
        "rates": asdict(recipe.rates),
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_seconds": round(seconds),
        "measured": figures,
    }
    (out / "card.json").write_text(json.dumps(card, indent=1) + "\n")
    return card
