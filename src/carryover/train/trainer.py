"""Training a drafter with transformers' `Trainer`: three stages that differ in where they start and what one step is.

    baseline   a fresh drafter; every step drafts at sampled anchors
    continued  the same step from a given checkpoint, with fresh optimizer and schedule: the control of the next one
    carryover  draft-verify-draft from a given checkpoint, with the carry interface added (see transition.py)

Anchors are drawn from (seed, step, micro-batch, rank) and from nothing else, so a resumed run sees the same ones.

Letters: `b` packed rows, `S` tokens, `N` anchors, `P` proposals. Source: SPEC 2.1, 2.3, 6.2; paper 3.1.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from ..config import (
    CarryoverConfig,
    Recipe,
    Stage,
    StageConfig,
)
from ..data.chat import render_prompt
from ..data.corpus import PackedRows, collate
from ..data.prompts import Prompt, load_prompts
from ..drafter.heads import Choose
from ..drafter.modeling import Drafter
from ..errors import InputError
from ..files import alone, write_text
from ..formats import load_drafter, save_drafter
from ..formats.files import WEIGHTS
from ..precision import fast_dtype
from ..rows import context_rows
from ..target import Target, default_device
from .anchors import Anchors, Batch, labels_at, sample_anchors
from .features import FeatureStore
from .identity import RUN, claim, prepare
from .losses import BlockLoss, Objective, block_loss, learnt
from .optimizer import MuonAdamW, split_parameters
from .transition import Prefix, draft, read_prefix, second_draft, transition

LOG = "train_log.jsonl"


class DrafterTrainer(Trainer):
    """`Trainer` whose model is the drafter; the frozen target is held beside it and never saved."""

    target: Target
    stage: Stage
    settings: StageConfig
    objective: Objective
    sums: dict[str, Tensor]
    store: FeatureStore | None

    def __init__(self, target: Target, stage: Stage, settings: StageConfig, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.target, self.stage, self.settings = target, stage, settings
        loss = settings.loss
        self.objective = Objective(loss.ce, loss.l1, loss.gamma, loss.weighting, loss.dpace_alpha, loss.kl)
        self.model_accepts_loss_kwargs = True  # compute_loss divides by num_items_in_batch itself
        self.sums, self.store = {}, None
        self.draft_head = target.head_of(self.drafter.draft_vocab)

    @property
    def drafter(self) -> Drafter:
        return self.accelerator.unwrap_model(self.model)

    # ---- what one step sees ----------------------------------------------------------------------------------------
    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """Adds anchors to each micro-batch, and counts what the loss of the whole step is divided by."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        total = torch.zeros((), device=device)
        for micro, batch in enumerate(batches):
            seed = (self.args.seed, self.state.global_step, micro, self.args.process_index)
            generator = torch.Generator().manual_seed(hash(seed) & 0x7FFFFFFFFFFFFFFF)
            ahead = 2 if self.stage == "carryover" else 1
            anchors = sample_anchors(batch, self.settings.anchors, ahead, generator)
            batch["anchor_index"], batch["anchor_valid"] = anchors.column, anchors.valid
            batch["anchor_draw"] = torch.rand(anchors.column.shape, generator=generator)
            batch["proposal_seed"] = torch.randint(1 << 62, (1,), generator=generator)
            labels = labels_at(batch, anchors, self.drafter.config.num_proposals)
            index = self.drafter.vocabulary_index(labels.tokens.to(device))
            total += self.objective.normaliser(learnt(index, labels.mask.to(device)))
        if self.args.world_size > 1:
            total = self.accelerator.gather(total).sum()
        return batches, total.clamp(min=1e-6)

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Weighted sum over this micro-batch, divided by the total weight of the step (all micro-batches, all
        ranks)."""
        batch: Batch = inputs
        anchors = Anchors.at(batch.pop("anchor_index"), batch.pop("anchor_valid"), batch)
        draw, seed = batch.pop("anchor_draw"), batch.pop("proposal_seed")
        rows, prefix = batch.pop("row"), None
        if self.store is not None:
            kept = self.store.read(rows.cpu(), self.args.device)
            prefix = kept and Prefix(*kept, context_rows(batch["positions"], batch["document"]), None)
        if prefix is None:
            prefix = read_prefix(self.target, self.drafter, batch, keep_cache=self.stage == "carryover")
            if self.store is not None:
                self.store.write(rows.cpu(), prefix.hidden, prefix.features)
        if self.stage == "carryover":
            loss = self._carryover_loss(model, batch, prefix, anchors, draw, int(seed))
        else:
            loss = self._anchor_loss(batch, prefix, anchors, draft(model, self.target, batch, prefix, anchors))
        # DDP averages gradients over ranks; the divisor already counts all of them.
        return loss / num_items_in_batch * self.args.world_size

    def _carryover_loss(
        self, model: Any, batch: Batch, prefix: Prefix, anchors: Anchors, draw: Tensor, seed: int
    ) -> Tensor:
        s = self.settings
        assert isinstance(s, CarryoverConfig)
        compare = self.state.global_step % self.args.logging_steps == 0
        sample = sampled(self.drafter, s.proposal_temperature, seed) if s.proposal_temperature else None
        step, at = None, anchors
        for _ in range(s.unroll):
            step = transition(self.drafter, self.target, batch, prefix, at, s.acceptance, compare, step, sample)
            at = step.next
        assert step is not None
        hidden = second_draft(
            model, self.target, batch, prefix, step, draw < s.carry_dropout if s.carry_dropout else None
        )
        loss = self._anchor_loss(batch, prefix, step.next, hidden)
        if s.first_pass_loss:
            first = draft(model, self.target, batch, prefix, anchors)
            loss = loss + s.first_pass_loss * self._anchor_loss(batch, prefix, anchors, first, log=False)
        verified = step.anchors.valid
        self._add(
            first_accepted=(step.accepted * verified).sum(), first_blocks=verified.sum(), kept=step.next.valid.sum()
        )
        if step.greedy is not None:
            differ = (step.greedy != step.accepted) & verified
            self._add(rules_differ=differ.sum(), rules_compared=verified.sum())
        return loss

    def _anchor_loss(self, batch: Batch, prefix: Prefix, anchors: Anchors, hidden: Tensor, log: bool = True) -> Tensor:
        """The loss of drafted blocks `hidden [b*N, B, D]` against the recorded response at their anchors."""
        drafter, p = self.drafter, self.drafter.config.num_proposals
        labels = labels_at(batch, anchors, p)
        teacher = None
        if self.objective.l1 or self.objective.kl:
            index = labels.column.flatten(1)[..., None].expand(-1, -1, prefix.hidden.shape[-1])
            teacher = prefix.hidden.gather(1, index).view(-1, p, prefix.hidden.shape[-1])

        result = block_loss(
            drafter.proposing(hidden),
            labels.previous.flatten(0, 1),
            drafter.vocabulary_index(labels.tokens).flatten(0, 1),
            labels.mask.flatten(0, 1),
            lambda rows, previous: drafter.logits(rows, previous, self.draft_head),
            self.objective,
            self.target.head_of(None),
            teacher,
            drafter.draft_vocab,
            self.draft_head,
        )
        if log:
            self._log_block(result)
        return result.loss

    # ---- what is logged --------------------------------------------------------------------------------------------
    def _add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0) + value.detach().double().cpu()  # type: ignore[operator]

    def _log_block(self, r: BlockLoss) -> None:
        self._add(ce=r.ce, l1=r.l1, kl=r.kl, slots=r.slots)
        self._add(matched=r.matched, blocks=r.blocks, right0=r.right[0], seen0=r.seen[0])

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds means since the last log. `acceptance`: 1 + tokens of the longest right prefix of a block, recorded
        text."""
        if "decode_acceptance" in logs:  # a record of its own, beside the regular ones
            return super().log(logs, start_time)
        s = {k: float(v) for k, v in self.sums.items()}
        if s.get("blocks"):
            logs["cross_entropy"] = s["ce"] / max(s["slots"], 1)
            logs["acceptance"] = 1 + s["matched"] / s["blocks"]
            logs["first_slot_accuracy"] = s["right0"] / max(s["seen0"], 1)
            for name in ("l1", "kl"):
                if getattr(self.objective, name):
                    logs[name] = s[name] / max(s["slots"], 1)
        if s.get("first_blocks"):
            logs["first_draft_acceptance"] = 1 + s["first_accepted"] / s["first_blocks"]
            logs["anchors_kept"] = s["kept"] / s["first_blocks"]
        if s.get("rules_compared"):
            logs["rules_differ"] = s["rules_differ"] / s["rules_compared"]
        if self.stage == "carryover" and self.drafter.config.hints:
            logs["hint_scale"] = float(self.drafter.carry.scale.detach())
        self.sums = {}
        for name, value in logs.items():
            if not math.isfinite(value):
                raise InputError(
                    f"training diverged: {name} is {value} at step {self.state.global_step}; lower the learning rate "
                    f"({self.settings.learning_rate:g}) and begin anew, or mend what the loss is made of."
                )
        super().log(logs, start_time)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """A checkpoint, but none of a drafter that training has ruined: it would be gone on with."""
        check_finite(self.drafter, f"training diverged by step {self.state.global_step}", self.settings)
        super()._save(output_dir, state_dict)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None and self.settings.optimizer == "muon":
            self.optimizer = MuonAdamW(*split_parameters(self.drafter), self.args.learning_rate, self.args.weight_decay)
        return super().create_optimizer(model)


class JsonLog(TrainerCallback):
    """Appends every log record to a JSONL file that reports and plots read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            with self.path.open("a") as f:
                f.write(json.dumps({"step": state.global_step, **logs}) + "\n")


class GracefulStop(TrainerCallback):
    """First Ctrl-C or SIGTERM: finish the step, write a checkpoint, stop. The second one interrupts at once."""

    def __init__(self) -> None:
        self.asked = False
        self.previous: dict[int, Any] = {}

    def _handle(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self.previous[number] = signal.signal(number, self._handle)
        except ValueError:  # not the main thread: leave signals to the embedding program
            self.previous = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.asked:
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)


class DecodeCheck(TrainerCallback):
    """Decodes held-out prompts with the real engine now and then: training accuracy
    alone has fooled many."""

    def __init__(self, trainer: DrafterTrainer, prompts: list[list[int]], every: int, max_new_tokens: int) -> None:
        self.trainer, self.prompts, self.every, self.max_new_tokens = trainer, prompts, every, max_new_tokens

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every and state.global_step != state.max_steps:
            return
        from ..decode.engine import Engine

        drafter = self.trainer.drafter
        training = drafter.training
        engine = Engine(self.trainer.target, drafter.eval())
        tokens = rounds = 0
        for ids in self.prompts:
            trace = engine.generate(ids, self.max_new_tokens).rounds
            tokens, rounds = tokens + sum(len(r.committed) for r in trace), rounds + len(trace)
        drafter.train(training)
        self.trainer.log({"decode_acceptance": tokens / max(rounds, 1)})


def check_finite(drafter: Drafter, what: str, settings: StageConfig) -> None:
    """Raises InputError for weights that are not numbers."""
    for name, parameter in drafter.named_parameters():
        if not torch.isfinite(parameter).all():
            raise InputError(
                f"{what} ({name} is no longer a number): lower the learning rate ({settings.learning_rate:g}) and "
                "begin anew."
            )


def sampled(drafter: Drafter, temperature: float, seed: int) -> Choose:
    """Draws proposals from the drafter's distribution, with a generator of its own."""
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: Tensor) -> Tensor:
        noise = torch.empty(logits.shape).exponential_(generator=generator).log_().to(logits.device)
        return drafter.token_ids((logits / temperature - noise).argmax(-1))  # Gumbel's trick

    return choose


def last_checkpoint(out: Path) -> Path | None:
    """The newest complete checkpoint; ones that a kill left half-written are skipped (their state file comes last)."""
    complete = []
    for folder in out.glob("checkpoint-*"):
        if not folder.name.removeprefix("checkpoint-").isdecimal():  # not one of ours
            continue
        try:
            state = json.loads((folder / "trainer_state.json").read_text())
        except (OSError, ValueError):
            continue
        if isinstance(state, dict) and all(isinstance(state.get(key), int) for key in ("global_step", "max_steps")):
            complete.append(folder)
    return max(complete, key=lambda folder: int(folder.name.split("-")[1]), default=None)


def finished(checkpoint: Path) -> bool:
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    return bool(state["global_step"] >= state["max_steps"])


def check_checkpoint(checkpoint: Path) -> None:
    """Raises InputError when a checkpoint cannot be read: training from a part of it would not be the same training."""
    load_drafter(checkpoint)
    random_states = sorted(path.name for path in checkpoint.glob("rng_state*.pth")) or ["rng_state.pth"]
    for name in ("optimizer.pt", "scheduler.pt", *random_states):  # what torch.save writes are zip archives
        try:
            damaged = ZipFile(checkpoint / name).testzip()
        except (OSError, BadZipFile) as error:
            damaged = str(error)
        if damaged is not None:
            raise InputError(
                f"{checkpoint / name} is missing or damaged; delete the folder {checkpoint} to go on from the "
                "checkpoint before it."
            )


def rewind_log(path: Path, step: int) -> None:
    """Drops what is behind `step`, where training goes on, so that no step is in the log twice; and the summary that
    transformers adds when it is interrupted."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        try:
            entry = json.loads(line)
            if entry["step"] <= step and "train_runtime" not in entry:
                kept.append(line.rstrip("\n") + "\n")
        except (ValueError, KeyError, TypeError):  # torn by a kill
            continue
    write_text(path, "".join(kept if step else []))


def train(
    recipe: Recipe,
    stage: Stage,
    out: Path,
    start: Path | None = None,
    resume: bool = False,
    corpus: Path | None = None,
    target: Target | None = None,
    progress: bool = True,
) -> Path:
    """Trains one stage of a recipe and returns `out`, which then holds the drafter, its checkpoints and
    `train_log.jsonl`.

    start: the checkpoint of the continued and carryover stages. resume: go on from the newest checkpoint in `out`;
    without it an `out` that holds checkpoints is refused. corpus: overrides the recipe's. Raises InputError for input
    that does not fit, KeyboardInterrupt after a graceful stop (the checkpoint is written then).
    """
    settings: StageConfig = getattr(recipe.train, stage)
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; name a folder as --out.")
    if start is not None and start.resolve() == out.resolve():
        raise InputError(f"--out and --start are both {out}, which would overwrite the checkpoint; name another --out.")
    checkpoint = last_checkpoint(out) if out.exists() else None
    if not resume and (any(out.glob("checkpoint-*")) or (out / RUN).exists()):
        raise InputError(f"{out} already holds checkpoints of a run; add --resume to go on, or name another --out.")
    if (out / "recipe.yaml").exists() and not (out / RUN).exists():
        raise InputError(f"{out} is the folder of `carryover run`, not of one stage; name another --out.")
    if checkpoint is None and (out / WEIGHTS).exists():
        raise InputError(f"{out} already holds a drafter and no checkpoint to go on from; name another --out.")
    if checkpoint is not None:
        check_checkpoint(checkpoint)  # damage is named before anything is written
    target = target or Target.load(recipe.target, recipe.target_dtype, default_device())
    development = load_prompts(settings.eval_prompts) if settings.eval_steps and settings.eval_prompts else []
    drafter, rows, record = prepare(recipe, stage, target, start, corpus)
    out.mkdir(parents=True, exist_ok=True)
    with alone(out) if os.environ.get("RANK", "0") == "0" else nullcontext():
        return _train(recipe, stage, out, checkpoint, target, drafter, rows, record, development, progress)


def _train(
    recipe: Recipe,
    stage: Stage,
    out: Path,
    checkpoint: Path | None,
    target: Target,
    drafter: Drafter,
    rows: PackedRows,
    record: dict[str, Any],
    development: Sequence[Prompt],
    progress: bool,
) -> Path:
    """`train`, once everything it needs has been found."""
    settings: StageConfig = getattr(recipe.train, stage)
    claim(out, record)
    write_text(out / "recipe.yaml", recipe.to_yaml())
    done = checkpoint is not None and finished(checkpoint)
    if not done:
        rewind_log(out / LOG, int(checkpoint.name.split("-")[1]) if checkpoint else 0)
    stop = GracefulStop()
    trainer = DrafterTrainer(
        target,
        stage,
        settings,
        model=drafter,
        args=training_arguments(recipe, settings, out, progress),
        train_dataset=rows,
        data_collator=collate,
        callbacks=[JsonLog(out / LOG), stop],
    )
    if settings.keep_features and stage != "carryover" and not done:
        path, width = out / f"features-{trainer.args.process_index}.bin", target.hidden_size
        trainer.store = FeatureStore(path, rows.lengths(), width, len(drafter.config.layer_ids) * width, target.dtype)
    if development:
        tokenizer = target.tokenizer
        assert tokenizer is not None
        prompts = [render_prompt(tokenizer, p.turns[:1], recipe.data.template) for p in development]
        trainer.add_callback(DecodeCheck(trainer, prompts, settings.eval_steps, recipe.evaluate.max_new_tokens))
    if not done:  # of a finished run transformers would train one step more
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        if stop.asked:
            raise KeyboardInterrupt
    for path in out.glob("features-*"):
        path.unlink(missing_ok=True)
    if trainer.is_world_process_zero():
        trained = load_drafter(checkpoint, target) if done and checkpoint else trainer.drafter
        check_finite(trained, f"training diverged; delete {out}", settings)
        save_drafter(trained, out)
    return out


def training_arguments(recipe: Recipe, s: StageConfig, out: Path, progress: bool) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(out),
        seed=recipe.seed,
        data_seed=recipe.seed,
        max_steps=s.steps or -1,
        num_train_epochs=s.epochs or 1,
        per_device_train_batch_size=s.batch_size,
        gradient_accumulation_steps=s.accumulation,
        learning_rate=s.learning_rate,
        warmup_steps=s.warmup_ratio,
        lr_scheduler_type=s.schedule,
        weight_decay=s.weight_decay,
        max_grad_norm=s.max_grad_norm,
        adam_beta2=0.95,
        bf16=s.precision == "bf16" or (s.precision == "auto" and fast_dtype(default_device()) == torch.bfloat16),
        logging_steps=s.logging_steps,
        save_steps=s.save_steps,
        save_total_limit=2,
        remove_unused_columns=False,
        label_names=[],
        report_to="none",
        disable_tqdm=not progress,
        dataloader_pin_memory=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
    )
