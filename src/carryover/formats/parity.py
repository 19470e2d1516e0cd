"""Recorded cases of other projects, rerun: the same checkpoint and the same inputs must give the same draft.

A case is a folder with a checkpoint, `case.json` (`source`, `anchor_position`) and `io.safetensors`: `target_hidden
[1, S, M*Dt]` of the S committed tokens, `block_tokens [1, B]`, `embed` and `lm_head [V, D]` where the checkpoint has no
copies, and what that project computed: `expected_hidden [1, B, D]`, `expected_draft_logits [1, P, V]` along its greedy
walk, `expected_draft_tokens [1, P]`, perhaps `expected_confidence_logits [1, P]`.

Letters: `S` context rows, `B` block rows, `P` proposals, `M` captured layers, `Dt` target hidden size, `D` hidden size,
`V` vocabulary. tests/golden/README.md says where the recorded ones come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from ..drafter.backbone import RowKeyValues
from ..drafter.modeling import Drafter
from ..errors import InputError
from ..rows import block_rows, concat, context_rows
from . import read_checkpoint
from .files import read_json, read_safetensors

TOLERANCE = 1e-4
INPUTS = ("target_hidden", "block_tokens", "expected_hidden", "expected_draft_logits", "expected_draft_tokens")


@dataclass(frozen=True)
class ParityResult:
    """Largest absolute differences to the recorded case; confidence is None for drafters without that head."""

    name: str
    hidden_difference: float
    logits_difference: float
    confidence_difference: float | None
    tokens_equal: bool

    @property
    def passed(self) -> bool:
        """Every difference within 1e-4 and every token equal."""
        differences = (self.hidden_difference, self.logits_difference, self.confidence_difference or 0.0)
        return self.tokens_equal and all(d <= TOLERANCE for d in differences)


@torch.no_grad()
def run_case(case_dir: str | Path) -> ParityResult:
    """Runs the case in a folder in fp32. Raises InputError when it is incomplete or does not fit its checkpoint."""
    folder = Path(case_dir)
    length = read_json(folder / "case.json").get("anchor_position")
    checkpoint, io = read_checkpoint(folder), read_safetensors(folder / "io.safetensors")
    embed, head = io.get("embed", checkpoint.embed), io.get("lm_head", checkpoint.head)
    lacking = [name for name in INPUTS if name not in io]
    if lacking or embed is None or head is None:
        raise InputError(f"the case {folder} lacks {lacking[0] if lacking else 'an embedding or an LM head'}.")
    if io["target_hidden"].shape[1] != length:
        raise InputError(
            f"the case {folder} records {io['target_hidden'].shape[1]} context rows for an anchor at {length}."
        )
    drafter = Drafter.from_tensors(checkpoint.config, checkpoint.tensors).float()

    block = io["block_tokens"]
    if not torch.equal(block, drafter.block_tokens(block[:, 0])):
        raise InputError(
            f"the case {folder} has other block tokens than its checkpoint's mask token and block size give."
        )
    hidden = draft_hidden(drafter, io["target_hidden"].float(), embedding(block, embed.float()))
    tokens, logits = drafter.propose(
        hidden, block[:, 0], partial(linear, weight=head.float()), partial(torch.argmax, dim=-1)
    )
    confidence = None
    if drafter.config.confidence:
        if "expected_confidence_logits" not in io:
            raise InputError(
                f"the case {folder} lacks expected_confidence_logits, but its drafter has a confidence head."
            )
        previous = torch.cat((block[:, :1], tokens[:, :-1]), dim=1)
        confidence = _difference(
            drafter.confidence_logits(drafter.proposing(hidden), previous), io["expected_confidence_logits"]
        )
    return ParityResult(
        folder.name,
        _difference(hidden, io["expected_hidden"]),
        _difference(logits, io["expected_draft_logits"]),
        confidence,
        torch.equal(tokens, io["expected_draft_tokens"]),
    )


def draft_hidden(drafter: Drafter, features: Tensor, embeds: Tensor) -> Tensor:
    """One block `embeds [1, B, D]` behind `features [1, S, M*Dt]` of positions 0 to S-1; returns `[1, B, D]`."""
    context, zero = torch.arange(features.shape[1])[None], torch.zeros(1, 1, dtype=torch.long)
    block = block_rows(zero + features.shape[1], zero, embeds.shape[1])
    masks = drafter.masks(block, concat(context_rows(context, torch.zeros_like(context)), block))
    rows = drafter.key_values(drafter.context(features), context)
    return drafter.block(embeds, block.position, RowKeyValues(rows), masks)


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Infinity where the shapes differ, NaN is never within a tolerance."""
    return (ours - theirs).abs().max().item() if ours.shape == theirs.shape else float("inf")
