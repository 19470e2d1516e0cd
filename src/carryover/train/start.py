"""The drafter that a stage begins with.

Source: SPEC 6.2 (fresh optimizer and schedule, the checkpoint of the baseline), decisions 0.1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..config import Recipe, Stage, drafter_config
from ..drafter.config import DrafterConfig
from ..drafter.modeling import Drafter
from ..errors import InputError
from ..formats import load_drafter
from ..target import Target
from .warm_start import start_from_drafter, start_from_target

SHAPE = ("num_hidden_layers", "target_layer_ids", "block_size", "slots", "mask_token_id", "draft_vocab_size",
         "markov_rank", "markov_kind")  # fmt: skip
OPTIONAL = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta", "layer_types",
            "sliding_window", "sliding_window_from_anchor", "sliding_causal")  # fmt: skip


def start_drafter(recipe: Recipe, stage: Stage, target: Target, start: Path | None) -> Drafter:
    """The drafter a stage begins with: fresh, or the given checkpoint, with the recipe's carry interface for
    `carryover`."""
    if stage == "baseline":
        if start is not None:
            raise InputError(
                "the baseline stage takes no --start; use --stage continued to go on from a checkpoint, or set "
                "drafter.start in the recipe to begin a baseline with one."
            )
        config = without_carry(drafter_config(recipe, target))
        torch.manual_seed(recipe.seed)
        try:
            drafter = Drafter(config)
        except RuntimeError as error:  # torch's way of saying that there is no memory for it
            reason = str(error).splitlines()[0]
            raise InputError(f"a drafter of this size cannot be made ({reason}); make it smaller.") from error
        if recipe.drafter.start == "target":
            start_from_target(drafter, target)
        elif (name := recipe.drafter.start_drafter) is not None:
            try:
                other = load_drafter(name, target, dtype=torch.float32)
            except InputError as error:
                raise InputError(f"drafter.start is not random, target or a fitting drafter: {error}") from error
            start_from_drafter(drafter, other, name)
        return drafter
    if start is None:
        raise InputError(f"the {stage} stage needs the checkpoint it starts from; name it with --start.")
    drafter = load_drafter(start, target, dtype=torch.float32)
    wanted = drafter_config(recipe, target)
    given = [key for key in OPTIONAL if getattr(recipe.drafter, key)]  # what is left out is the checkpoint's
    changed = [key for key in (*SHAPE, *given) if _value(wanted, key) != _value(drafter.config, key)]
    if changed:
        was = ", ".join(f"{key} {_value(drafter.config, key)}, not {_value(wanted, key)}" for key in changed)
        raise InputError(f"the checkpoint {start} is not what the recipe's drafter section describes ({was}).")
    return drafter if stage == "continued" else with_carry(drafter, recipe)


def _value(config: DrafterConfig, key: str) -> Any:
    return (config.rope_parameters or {}).get(key) if key == "rope_theta" else getattr(config, key)


def without_carry(config: DrafterConfig) -> DrafterConfig:
    """The same without a trace of a carry interface, so that baselines of recipes that differ in it are equal."""
    fields = ("carry", "carry_site", "carry_projector", "carry_hint")
    return DrafterConfig.from_dict({k: v for k, v in config.to_dict().items() if k not in fields})


def with_carry(drafter: Drafter, recipe: Recipe) -> Drafter:
    """The same drafter with a fresh carry interface, which starts as the same function (carry rows look like
    context)."""
    if drafter.config.carry != "none":
        raise InputError("the starting checkpoint already carries; start the carryover stage from a baseline drafter.")
    if recipe.carry.interface == "none":
        raise InputError(
            "the carryover stage needs a carry interface; set carry.interface to embedding, plain, projector or hint."
        )
    config = DrafterConfig.from_dict(drafter.config.to_dict())
    config.carry, config.carry_site = recipe.carry.interface, recipe.carry.site
    config.carry_projector, config.carry_hint = recipe.carry.projector, recipe.carry.hint
    torch.manual_seed(recipe.seed)  # a bottleneck begins with random numbers
    carrying = Drafter(config)
    carrying.load_state_dict(drafter.state_dict(), strict=False)  # all but the carry interface
    carrying.carry.start_from(carrying.fc)
    return carrying
