"""The DFlash loop in its plain shape, as a peer to compare with: caches of transformers that grow and are cropped.

Both caches grow by every row that is computed and are cropped to what was committed: the target's to the new anchor,
the drafter's to the old one. Features come from `output_hidden_states`; there is no carry, no batch and no sampling.
Written from the description in SPEC 1.6. It shares the drafter's layers with `Engine`, so the two differ in the loop
alone; greedy tokens and acceptance must be equal.

Letters: `P` proposals, `B` block rows, `M` captured layers, `D` hidden size, `G` key/value heads, `hd` head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from carryover.drafter.modeling import Drafter
from carryover.target import Target


class Growing:
    """Per layer, one concatenation: stored rows, new context rows, block rows `[1, G, rows, hd]`."""

    def __init__(self, cache: Any, context: list[tuple[Tensor, Tensor]]) -> None:
        self.cache, self.context = cache, context

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.context[layer]
        return self.cache.update(torch.cat((k, keys), 2), torch.cat((v, values), 2), layer)


@torch.inference_mode()
def grow_and_crop(target: Target, drafter: Drafter, ids: Sequence[int], max_new_tokens: int) -> tuple[list[int], int]:
    """The greedy response to a prompt, its stop token included, and the number of verifications it took."""
    cache, draft_cache, config = target.new_cache(), target.new_cache(), drafter.config

    def verify(tokens: Tensor, keep: int) -> tuple[Tensor, Tensor]:
        """Runs `[1, Q]`; returns the target's choices after the last `keep` (0: all), `[1, keep]`, and features."""
        out = target.model(
            tokens, past_key_values=cache, use_cache=True, output_hidden_states=True, logits_to_keep=keep
        )
        return out.logits.argmax(-1), torch.cat([out.hidden_states[i + 1] for i in config.layer_ids], -1)

    chosen, features = verify(torch.tensor([list(ids)]), 1)
    tokens, start, rounds = chosen[0].tolist(), len(ids), 0  # start: position of the anchor
    while len(tokens) < max_new_tokens and not target.stop_ids.intersection(tokens):
        anchor = torch.tensor(tokens[-1:])
        context = torch.arange(start - features.shape[1], start)[None]  # rows committed since the last draft
        new_rows = drafter.key_values(drafter.context(features), context)
        block = torch.arange(start, start + config.block_size)[None]
        hidden = drafter.block(target.embed(drafter.block_tokens(anchor)), block, Growing(draft_cache, new_rows))
        target.crop(draft_cache, start)
        proposals = drafter.propose(hidden, anchor, target.head, lambda logits: logits.argmax(-1)).tokens

        chosen, features = verify(torch.cat((anchor[None], proposals), 1), 0)
        accepted = int((proposals == chosen[:, :-1]).cumprod(-1).sum())
        tokens += chosen[0, : accepted + 1].tolist()  # the accepted proposals are the target's choices
        start, rounds = start + accepted + 1, rounds + 1
        features = features[:, : accepted + 1]
        target.crop(cache, start)
    ends = [i + 1 for i, token in enumerate(tokens) if token in target.stop_ids]
    return tokens[: min([max_new_tokens, *ends])], rounds
