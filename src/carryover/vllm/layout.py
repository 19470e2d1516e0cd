"""Where rows lie in vLLM's paged cache: the only difference between a draft with carry and one without.

vLLM hands a draft the target's states of all tokens of the last verification, rejected ones included. Each row goes to
the slot of its own position, as the target's own rows do. Without carry the block is written over the rejected rows;
with carry it lies behind them, R slots further, and its attention reaches R rows further back. Its positions, which
RoPE sees, are the same in both cases. The next verification writes over everything behind the last committed token, so
nothing of this survives a round, and what vLLM reserves for full acceptance (R = 0) is always enough.

    positions    a-2   a-1 |  a    a+1   a+2   a+3 |
    rows         ctx   ctx | carry carry             R = 2 rejected; the anchor a is the token behind the last accepted
    slots        a-2   a-1 |  a    a+1   a+2   a+3   a+4  ...
    block                               a    a+1   a+2  ...        (its positions)

Letters: `b` requests, `n` tokens of the batch, `B` block rows, `P` proposals, `R` carry rows. Source: SPEC 1.6 and 6.1;
DESIGN 6.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """rejected `[n]`: which context rows are carry rows; context_slots `[n]`. positions, slots `[b*B]` of the blocks;
    proposing `[b*P]`: indices of the block rows that propose; lengths `[b]`: rows each block's attention reads."""

    rejected: Tensor
    context_slots: Tensor
    positions: Tensor
    slots: Tensor
    proposing: Tensor
    lengths: Tensor


def rejected_rows(starts: Tensor, rejected: Tensor, tokens: int) -> Tensor:
    """Which of `tokens` rows were rejected, `[n]` bool: of request i, whose rows end before `starts[i + 1]` (`[b+1]`),
    the last `rejected[i]` (`[b]`)."""
    index = torch.arange(tokens, device=starts.device)
    ends = starts[1:]
    owner = torch.searchsorted(ends, index, right=True).clamp(max=len(rejected) - 1)
    return index >= (ends - rejected)[owner]


def carried(rejected: Tensor, ends: Tensor, rows: int, limit: int) -> Tensor:
    """How many of its rejected rows each draft carries, `[b]`: all, or none where its block of `rows` rows would then
    reach past `limit` rows. ends `[b]`: rows of each request so far, rejected ones included."""
    return torch.where(ends + rows <= limit, rejected, 0)


def layout(
    starts: Tensor,
    positions: Tensor,
    rejected: Tensor,
    lengths: Tensor,
    table: Tensor,
    page: int,
    rows: int,
    first_slot: int,
    carry: bool,
) -> Layout:
    """The layout of one draft; no step waits for a device.

    starts `[b+1]`: where each request's tokens begin in the batch; positions `[n]` of the tokens; rejected `[b]`: how
    many of each request's were; lengths `[b]`: rows of each request so far, rejected ones included. table `[b, pages]`:
    the cache's pages of each request, `page` rows each. rows: B; first_slot: the first block row that proposes.
    """
    ends = starts[1:]
    owner = torch.searchsorted(ends, torch.arange(len(positions), device=starts.device), right=True)
    owner = owner.clamp(max=len(rejected) - 1)
    # A request in the middle of its prompt has no proposals, hence none rejected; its draft is thrown away by vLLM.
    last = torch.maximum(ends - 1 - rejected, starts[:-1])
    steps = torch.arange(rows, device=starts.device)
    block = positions[last][:, None] + 1 + steps
    behind = rejected if carry else torch.zeros_like(rejected)
    requests = torch.arange(len(rejected), device=starts.device)
    blocks = torch.arange(len(rejected), device=starts.device)[:, None] * rows
    return Layout(
        rejected=rejected_rows(starts, rejected, len(positions)),
        context_slots=_slots(table, page, owner, positions),
        positions=block.flatten(),
        slots=_slots(table, page, requests[:, None], block + behind[:, None]).flatten(),
        proposing=(blocks + steps[first_slot:]).flatten(),
        lengths=lengths - rejected + behind + rows,
    )


def _slots(table: Tensor, page: int, owner: Tensor, index: Tensor) -> Tensor:
    """Slots of the rows `index` of requests `owner`. vLLM drafts nothing that does not fit; the last page stands in."""
    pages = (index // page).clamp(max=table.shape[1] - 1)
    return table[owner, pages].long() * page + index % page
