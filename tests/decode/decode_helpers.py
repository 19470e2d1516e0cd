"""Drafters for decoding tests: random ones of every kind, and scripted ones that know the true continuation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from carryover.decode.engine import Batch, Engine, Request
from carryover.decode.trace import Generation
from carryover.drafter.config import DrafterConfig
from carryover.drafter.modeling import Drafter, Proposals
from carryover.target import Target

PROMPT = [3, 1, 4, 1, 5]
HEADS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "vanilla": {"markov_rank": 6, "markov_kind": "vanilla"},
    "gated": {"markov_rank": 6, "markov_kind": "gated"},
    "rnn": {"markov_rank": 6, "markov_kind": "rnn"},
}
LAYERS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5},
    "from_anchor": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "sliding_window_from_anchor": True},
    "causal": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "sliding_causal": True},
}
CARRIES: dict[str, dict[str, Any]] = {
    "none": {"carry": "none"},
    "plain": {"carry": "plain"},
    "embedding": {"carry": "embedding"},
    "post_norm": {"carry": "embedding", "carry_site": "post_norm"},
    "projector": {"carry": "projector"},
    "bottleneck": {"carry": "projector", "carry_projector": "bottleneck"},
    "rejected_tokens": {"carry": "hint"},
    "target_top1": {"carry": "hint", "carry_hint": "target_top1"},
}


def begin(engine: Engine, ids: list[int], max_new_tokens: int, seed: int = 0) -> Batch:
    """A batch of one whose prompt has been read."""
    prompt = Request(ids, max_new_tokens, seed)
    batch = engine.new_batch([prompt], 1)
    assert engine.join(batch, prompt, Generation(len(ids)))
    return batch


def make_drafter(target: Target, seed: int = 0, kind: type[Drafter] = Drafter, **overrides: Any) -> Any:
    """A random fp32 drafter for the target, every weight random (the carry mark too), with blocks of 4."""
    layers = target.num_layers
    fields: dict[str, Any] = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.2,
        "num_target_layers": layers,
        "target_layer_ids": [-1] if layers == 1 else [-1, layers - 2],
        "block_size": 4,
        "slots": "fill_in",
        "mask_token_id": 2,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drafter = kind(DrafterConfig(**{**fields, **overrides})).eval().requires_grad_(False)
        for name, parameter in drafter.named_parameters():
            if parameter.ndim == 1 or name.startswith("carry."):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return drafter


class ScriptedDrafter(Drafter):
    """Proposes the true continuation, but in round r only the first `plan(r)` tokens are right."""

    def follow(self, sequence: list[int], plan: Callable[[int], int]) -> ScriptedDrafter:
        """sequence: prompt and true continuation, long enough for every proposal. Starts counting rounds anew."""
        self.sequence, self.plan, self.drafts = sequence, plan, 0
        return self

    def block(self, embeds: Tensor, positions: Tensor, *rest: Any) -> Tensor:
        self.at = int(positions[0, 0])
        return super().block(embeds, positions, *rest)

    def propose(self, hidden: Tensor, anchor_token: Tensor, head: Any, choose: Any) -> Proposals:
        p, v = self.config.num_proposals, self.config.vocab_size
        assert anchor_token.tolist() == [self.sequence[self.at]]
        true = torch.tensor([self.sequence[self.at + 1 : self.at + 1 + p]])
        wrong = torch.arange(p) >= self.plan(self.drafts)
        self.drafts += 1
        logits = 50.0 * one_hot(torch.where(wrong, (true + 1) % v, true), v)
        return Proposals(choose(logits), logits)
