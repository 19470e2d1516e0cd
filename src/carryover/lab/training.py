"""Trains the lab target: a small Llama on fresh samples of the lab language, from nothing to the packaged weights.

Every batch is a function of (seed, step), so a run that is killed resumes to the same weights. Letters: `b` rows of a
batch, `S` tokens of a row, `V` vocabulary.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ..muon import Muon
from . import lab_target_path, language
from . import words as w
from .tokenizer import ASSISTANT, END, PAD, USER, build_tokenizer

CHECKPOINT = "checkpoint.pt"
# What prompts are asked about; mixed, so that any first part holds some of each.
_ASKED = [*w.NAMES, *w.THINGS, *w.PLACES, *w.QUALITIES]
DRILLED = random.Random(0).sample(_ASKED, len(_ASKED))


@dataclass(frozen=True)
class LabRecipe:
    """All constants of the lab target. The defaults are the packaged target's."""

    seed: int = 0
    steps: int = 5000
    # model
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    intermediate_size: int = 384
    rope_theta: float = 10000.0
    # data
    rows: int = 12  # b
    length: int = 192  # S
    two_turns: float = 0.1  # share of examples that continue the conversation before them
    curriculum: tuple[int, ...] = (500, 650, 900)  # drills alone before the first; then levels 0, 1 and 2 begin
    drill_words: int = 64  # of the dictionary, in the first half of the drills
    drill_lr: float = 2.5  # factor of the learning rates while there are only drills
    drills_mixed: tuple[int, int] = (4, 3000)  # so many drills for ten other turns, up to this step
    twice: tuple[str, ...] = ("translation",)  # tasks drawn twice as often: the largest dictionary, the shortest text
    prompt_loss: float = 0.05  # weight of a prompt token, a response token has 1
    # optimisation
    matrix_lr: float = 4e-3  # Muon, on the matrices of the layers
    other_lr: float = 4e-3  # AdamW, on embedding and norms
    weight_decay: float = 0.01
    warmup: int = 100
    decay: int = 4000  # last steps, in which the learning rate falls linearly to zero
    checkpoint_every: int = 250
    # another language
    ambiguity: float = 1.0  # factor of the rates of synonyms, optional words and reordered clauses
    packaged_start: bool = False  # train on from the packaged target

    @property
    def rates(self) -> language.Rates:
        usual = language.Rates()
        return language.Rates(*(self.ambiguity * rate for rate in (usual.synonym, usual.optional, usual.reorder)))

    @classmethod
    def retrained(cls, ambiguity: float) -> LabRecipe:
        """A few minutes that teach the packaged target how often the language now varies."""
        return cls(
            ambiguity=ambiguity, packaged_start=True, steps=800, curriculum=(0, 0, 0), drills_mixed=(0, 0),
            matrix_lr=1.5e-3, other_lr=1.5e-3, warmup=50, decay=700,
        )  # fmt: skip


class Batch(NamedTuple):
    """tokens, targets, weights (of the targets), positions: `[b, S]`; mask: `[b, 1, S, S]`, True where attended."""

    tokens: Tensor
    targets: Tensor
    weights: Tensor
    positions: Tensor
    mask: Tensor


def level_at(recipe: LabRecipe, step: int) -> int:
    """The level of the language at a step, -1 while there are only drills."""
    return sum(step >= begin for begin in recipe.curriculum) - 1


class Words:
    """Token ids of texts of the lab language, without the overhead of a tokenizer call."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.ids = tokenizer.get_vocab()

    def turn(self, prompt: Sequence[str], response: Sequence[str]) -> tuple[list[int], int]:
        """Ids of one turn, and how many of them come before the response."""
        before = [self.ids[x] for x in (USER, *prompt, END, ASSISTANT)]
        return before + [self.ids[x] for x in (*response, END)], len(before)


def make_batch(recipe: LabRecipe, step: int, words: Words) -> Batch:
    """Conversations of the training split packed first-fit into rows; no conversation sees another."""
    rng = random.Random(f"{recipe.seed}-{step}")
    b, S = recipe.rows, recipe.length
    tokens = torch.full((b, S + 1), words.ids[PAD])
    weights, positions, document = (
        torch.zeros(b, S + 1),
        torch.zeros(b, S + 1, dtype=torch.long),
        torch.full((b, S + 1), -1),
    )
    filled = [0] * b
    for number, turn in enumerate(_turns(recipe, step, words, rng)):
        ids = turn.ids
        joins = rng.random() < recipe.two_turns
        row = next((r for r in range(b) if filled[r] + len(ids) <= S + 1), None)
        if row is None:
            continue
        start, stop = filled[row], filled[row] + len(ids)
        joins = joins and start > 0 and int(positions[row, start - 1]) < 128
        tokens[row, start:stop] = torch.tensor(ids)
        weights[row, start:stop] = torch.tensor(turn.weights)
        first = int(positions[row, start - 1]) + 1 if joins else 0
        positions[row, start:stop] = torch.arange(first, first + len(ids))
        document[row, start:stop] = document[row, start - 1] if joins else number
        filled[row] = stop
    same = document[:, None, :-1, None] == document[:, None, None, :-1]
    return Batch(tokens[:, :-1], tokens[:, 1:], weights[:, 1:], positions[:, :-1], same.tril())


class Turn(NamedTuple):
    """Token ids of a prompt and its response, and the weight of each in the loss."""

    ids: list[int]
    weights: list[float]


def _turns(recipe: LabRecipe, step: int, words: Words, rng: random.Random) -> list[Turn]:
    """Turns that about fill a batch, tasks in their shares, longest first because those are the hardest to place."""
    level, turns = level_at(recipe, step), list[Turn]()
    drills, until = recipe.drills_mixed
    kinds = ["drill"] if level < 0 else [*language.TASKS, *recipe.twice, *["drill"] * (drills * (step < until))]
    dictionary = recipe.drill_words if step < recipe.curriculum[0] // 2 else None
    tasks: list[str] = []
    while sum(len(turn.ids) for turn in turns) < recipe.rows * recipe.length:
        if not tasks:
            tasks = rng.sample(kinds, len(kinds))
        task = tasks.pop()
        if task == "drill":
            turns.append(_drill(words, rng, dictionary))
            continue
        example = language.sample_split("train", task, rng, level, recipe.rates)
        ids, prompt = words.turn(example.prompt.split(), example.response.split())
        # Nothing before the first token says which task comes.
        turns.append(Turn(ids, [0.0] + [recipe.prompt_loss] * (prompt - 1) + [1.0] * (len(ids) - prompt)))
    return sorted(turns, key=lambda turn: -len(turn.ids))


def _drill(words: Words, rng: random.Random, dictionary: int | None) -> Turn:
    """Pairs of words, then the same pairs in another order: only looking up the first word tells the second.

    So small a model does not find look-ups by content in text where most of what is copied comes in order; in drills it
    finds them within 300 steps, and then uses them.
    """
    chosen = rng.sample(DRILLED[:dictionary], 2 * rng.randint(2, 6))
    pairs = list(zip(chosen[::2], chosen[1::2], strict=True))
    again = rng.sample(pairs, len(pairs))
    ids, prompt = words.turn([x for pair in pairs for x in pair], [x for pair in again for x in pair])
    return Turn(ids, [0.0] * prompt + [0.0, 1.0] * len(pairs) + [0.0])


def build_model(recipe: LabRecipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama with fresh weights of the recipe's seed, or the packaged ones."""
    if recipe.packaged_start:
        return LlamaForCausalLM.from_pretrained(lab_target_path(), dtype=torch.float32)
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        intermediate_size=recipe.intermediate_size,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    # The usual 0.02 makes rows of so small a width too short for logits to grow from in a few hundred steps.
    nn.init.normal_(model.model.embed_tokens.weight, std=0.1)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def build_optimizers(recipe: LabRecipe, model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the rest."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers." in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "layers." in n)]
    return [
        Muon(matrices, lr=recipe.matrix_lr, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(others, lr=recipe.other_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def lr_factor(recipe: LabRecipe, step: int) -> float:
    """Linear warmup, constant, linear to zero."""
    factor = recipe.drill_lr if level_at(recipe, step) < 0 else 1.0
    return factor * min(1.0, (step + 1) / recipe.warmup, (recipe.steps - step) / recipe.decay)


def batch_loss(recipe: LabRecipe, decoder: Callable[..., Any], head: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The training loss, and the mean loss of response tokens in nats; logits only where a token has weight."""
    out = decoder(batch.tokens, attention_mask=batch.mask, position_ids=batch.positions, use_cache=False)
    chosen = batch.weights > (0 if recipe.prompt_loss else 0.5)
    weights = batch.weights[chosen]
    losses = nn.functional.cross_entropy(head(out.last_hidden_state[chosen]), batch.targets[chosen], reduction="none")
    response = weights == 1
    # A constant divisor: tokens, not batches, count alike.
    return (losses * weights).sum() / (0.55 * batch.tokens.numel()), losses[response].mean().detach()


def train_lab(
    out: Path,
    recipe: LabRecipe | None = None,
    resume: bool = True,
    compile: bool = False,
    stop_at: int | None = None,
    say: Callable[[str], None] = print,
) -> LlamaForCausalLM:
    """Trains the lab target and writes it to `out` as a Hugging Face model folder with the measured `card.json`.

    resume: continue from `out/checkpoint.pt` when it is there. compile: torch.compile (1.4 times faster, needs a C++
    compiler). stop_at: leave after this many steps, as if killed. Raises InputError when the checkpoint is of another
    recipe.
    """
    from ..errors import InputError
    from .measure import save_target

    recipe = recipe or LabRecipe()
    if (out / "config.json").exists() and not (out / CHECKPOINT).exists():
        raise InputError(f"{out} already holds a model; name another --out.")
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    words, model = Words(tokenizer), build_model(recipe, tokenizer)
    optimizers = build_optimizers(recipe, model)
    first, spent = _resume(out / CHECKPOINT, recipe, model, optimizers) if resume else (0, 0.0)
    decoder = torch.compile(model.model, dynamic=False) if compile else model.model
    began, recent = time.monotonic() - spent, []
    for step in range(first, recipe.steps):
        if step == stop_at:
            return model
        loss, response = batch_loss(recipe, decoder, model.lm_head, make_batch(recipe, step, words))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, lr in zip(optimizers, (recipe.matrix_lr, recipe.other_lr), strict=True):
            optimizer.param_groups[0]["lr"] = lr * lr_factor(recipe, step)
            optimizer.step()
            optimizer.zero_grad()
        recent.append(float(response))
        done = step + 1
        if done % 50 == 0:
            say(
                f"step {done}/{recipe.steps} level {level_at(recipe, step)} loss {sum(recent) / len(recent):.4f} "
                f"{time.monotonic() - began:.0f} s"
            )
            recent.clear()
        if done % recipe.checkpoint_every == 0 or done == recipe.steps:
            _checkpoint(out / CHECKPOINT, recipe, model, optimizers, done, time.monotonic() - began)
    save_target(out, recipe, model, tokenizer, seconds=time.monotonic() - began, say=say)
    return model


def _checkpoint(
    path: Path, recipe: LabRecipe, model: nn.Module, optimizers: list[torch.optim.Optimizer], step: int, seconds: float
) -> None:
    """Written beside and renamed, so that a kill never leaves half a file."""
    state = {"recipe": asdict(recipe), "step": step, "seconds": seconds, "model": model.state_dict()}
    torch.save(state | {"optimizers": [o.state_dict() for o in optimizers]}, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def _resume(
    path: Path, recipe: LabRecipe, model: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> tuple[int, float]:
    """Loads a checkpoint; returns its step and the seconds spent so far, (0, 0) when there is none."""
    from ..errors import InputError

    if not path.exists():
        return 0, 0.0
    try:
        state = torch.load(path, weights_only=True)
        same = state["recipe"] == asdict(recipe)
    except Exception as error:  # torch has many for a file that is none of its own
        raise InputError(f"{path} is damaged, or no checkpoint of the lab; delete it to begin anew.") from error
    if not same:
        raise InputError(f"{path} belongs to another recipe; choose another folder or delete the file.")
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["step"], state["seconds"]
