"""What the benchmarks share: a random drafter for a target, and the prompt they decode."""

from __future__ import annotations

import torch

from carryover.config import Recipe, drafter_config
from carryover.data.chat import render_prompt
from carryover.data.prompts import SUITES, load_prompts
from carryover.drafter.modeling import Drafter
from carryover.target import Target
from carryover.weights import OF_DRAFTER, arrange


def random_drafter(target: Target, layers: int, mask_token: int, draft_vocab: int | None = None) -> Drafter:
    """DFlash, blocks of 16, with carry, proposing the first `draft_vocab` tokens or any. Its speed does not depend on
    its weights."""
    few = list(range(target.num_layers - 1)) if target.num_layers < 2 * layers + 4 else None  # too few to be spaced
    recipe = Recipe.model_validate({
        "target": target.name, "data": {"corpus": "unused"},
        "train": {"baseline": {"steps": 1}, "carryover": {"steps": 1}},
        "drafter": {"algorithm": "dflash", "layers": layers, "block_size": 16, "mask_token_id": mask_token,
                    "target_layer_ids": few, "draft_vocab_size": draft_vocab},
    })  # fmt: skip
    torch.manual_seed(0)
    drafter = Drafter(drafter_config(recipe, target)).to(target.dtype).eval()
    assert isinstance(drafter, Drafter)
    arrange(drafter, OF_DRAFTER)  # as `decoding_drafter` does
    return drafter


def prompt_ids(target: Target) -> list[int]:
    """The first packaged prompt, as the target reads it."""
    assert target.tokenizer is not None
    return render_prompt(target.tokenizer, load_prompts(SUITES["smollm2_demo"])[0].turns[:1])
