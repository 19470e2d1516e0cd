"""A tiny drafter and packed batches for the training tests."""

from __future__ import annotations

from typing import Any

import torch

from carryover.drafter.config import DrafterConfig
from carryover.drafter.modeling import Drafter
from carryover.layer_ids import LayerIds
from carryover.target import Target


def tiny_drafter(target: Target, seed: int = 0, **overrides: Any) -> Drafter:
    """Two random layers over three captured ones; `overrides` replace config fields. Every weight random, carry mark
    too."""
    settings: dict[str, Any] = {
        "vocab_size": target.vocab_size, "hidden_size": target.hidden_size, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "initializer_range": 0.3,
        "num_target_layers": target.num_layers,
        "target_layer_ids": list(LayerIds.evenly_spaced(target.num_layers, 3)),
        "block_size": 6, "slots": "fill_in", "mask_token_id": 5,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drafter = Drafter(DrafterConfig(**{**settings, **overrides}))
        if drafter.config.carry != "none":
            for parameter in drafter.carry.parameters():
                torch.nn.init.normal_(parameter, std=0.5)
    return drafter


def packed(documents: list[list[tuple[int, bool]]], width: int) -> dict[str, torch.Tensor]:
    """One packed row from documents of (token, supervised) pairs, padded to `width`."""
    ids, positions, document, mask = [], [], [], []
    for d, tokens in enumerate(documents):
        for position, (token, supervised) in enumerate(tokens):
            ids.append(token)
            positions.append(position)
            document.append(d)
            mask.append(supervised)
    pad = width - len(ids)
    assert pad >= 0
    return {
        "input_ids": torch.tensor([ids + [0] * pad]),
        "positions": torch.tensor([positions + [0] * pad]),
        "document": torch.tensor([document + [-1] * pad]),
        "loss_mask": torch.tensor([mask + [False] * pad]),
    }


def random_documents(seed: int, lengths: list[tuple[int, int]], vocab: int) -> list[list[tuple[int, bool]]]:
    """Documents of (prompt, response) lengths."""
    g = torch.Generator().manual_seed(seed)
    return [
        [(int(t), i >= prompt) for i, t in enumerate(torch.randint(6, vocab, (prompt + response,), generator=g))]
        for prompt, response in lengths
    ]


def stack(*batches: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: torch.cat([b[key] for b in batches]) for key in batches[0]}
