"""Decoding one request: plain, or in rounds of draft, verify and commit, with or without carry.

A round at anchor `a`, the last committed token, whose state the target has not computed yet:

1. the drafter takes in the features of the tokens committed since its last draft, for good;
2. and those of the proposals rejected since then, for this draft only (carry);
3. it runs its block at `a` and proposes P tokens;
4. the target runs [anchor, proposals] in one forward; a rule accepts the first n and adds a token of the target's own;
5. the target's cache is cropped behind the accepted tokens, and the next anchor is `a + n + 1`.

Plain decoding is the same loop with no proposals. Nothing the drafter does changes the distribution of the output.

Letters: `S` prompt tokens, `P` proposals, `B` block rows, `R` carry rows, `M` captured layers, `Dt` target hidden size,
`V` vocabulary. Source: SPEC 1.6, 3.3, 5 and 6.1 (paper 2.1).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from ..drafter.modeling import Drafter
from ..errors import InputError
from ..rows import block_rows, concat, context_rows
from ..target import Cache, Target
from .sampling import Sampling
from .state import CarryState, DraftCache, LayerKeyValues
from .trace import Generation, Round
from .verify import Chooser, DraftSampling, verify


@dataclass
class Request:
    """One request between two rounds.

    anchor: position of the last committed token. anchor_token: that token, `[1]`, on the device. cache: the target's,
    rows 0..anchor-1. fresh: features `[1, rows, M*Dt]` of committed tokens that the drafter has not taken in yet, up to
    anchor-1. carry: what the last round rejected, None after full acceptance. The last three are None without a
    drafter.
    """

    anchor: int
    anchor_token: Tensor
    cache: Cache
    generator: torch.Generator
    draft_cache: DraftCache | None = None
    fresh: Tensor | None = None
    carry: CarryState | None = None


class Engine:
    """Decodes with one target and at most one drafter, batch of one."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        sampling: Sampling = Sampling(),
        draft_sampling: DraftSampling = "greedy",
        carry: bool = True,
        timed: bool | None = None,
    ) -> None:
        """drafter: None decodes plainly. draft_sampling: how to choose proposals above temperature 0, see `verify.py`.

        carry: False ignores the drafter's carry interface. timed: fill in the times of every round, which makes it wait
        three times for an accelerator; None times on the CPU only. Raises InputError for an unknown draft_sampling.
        """
        if draft_sampling not in get_args(DraftSampling):
            raise InputError(f"draft_sampling must be greedy or probabilistic, got {draft_sampling!r}.")
        self.target = target
        self.drafter = drafter
        self.sampling = sampling
        self.draft_sampling: DraftSampling = draft_sampling
        self.carries = carry and drafter is not None and drafter.config.carry != "none"
        self.timed = target.device.type == "cpu" if timed is None else timed
        self.layer_ids = drafter.config.layer_ids if drafter is not None else None

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, seed: int = 0) -> Generation:
        """Responds to a prompt with at most `max_new_tokens` tokens; the same seed gives the same response.

        Stops after the first of the target's stop tokens, which is kept, and where the target's context ends. Raises
        InputError if the prompt is empty, not made of the target's tokens, or leaves no room in its context.
        """
        generation = Generation(len(prompt_ids))
        for _ in self.rounds(prompt_ids, max_new_tokens, seed, generation):
            pass
        return generation

    def rounds(
        self, prompt_ids: Sequence[int], max_new_tokens: int, seed: int = 0, generation: Generation | None = None
    ) -> Iterator[Round]:
        """Yields the rounds of `generate` one by one and keeps `generation` up to date, its first token included."""
        limit = self._room(prompt_ids, max_new_tokens)
        return self._run(prompt_ids, limit, seed, Generation(len(prompt_ids)) if generation is None else generation)

    def _room(self, prompt_ids: Sequence[int], max_new_tokens: int) -> int:
        """How many tokens the response may have."""
        length, vocab_size = len(prompt_ids), self.target.vocab_size
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be at least 1, got {max_new_tokens}.")
        if not length:
            raise InputError("the prompt is empty; it needs at least one token.")
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
            raise InputError(f"the prompt has token ids outside the target's vocabulary (0 to {vocab_size - 1}).")
        if length + 1 > self.target.max_length:
            raise InputError(
                f"the prompt has {length} tokens and leaves no room for a response in the target's context of "
                f"{self.target.max_length}; shorten it."
            )
        return min(max_new_tokens, self.target.max_length - length)

    def _run(self, prompt_ids: Sequence[int], limit: int, seed: int, generation: Generation) -> Iterator[Round]:
        began = time.perf_counter()
        request = self.prefill(prompt_ids, limit, seed)
        new = [int(request.anchor_token)]
        generation.prefill_seconds = generation.seconds = time.perf_counter() - began
        while True:
            generation.tokens += new
            if new[-1] in self.target.stop_ids:
                generation.finish = "stop"
            if generation.rounds:
                yield generation.rounds[-1]
            if generation.finish == "stop" or len(generation.tokens) == limit:
                return
            began = time.perf_counter()
            round_ = self.round(request)
            new = round_.committed = self._cut(round_.committed, limit - len(generation.tokens))
            round_.accepted = min(round_.accepted, len(new))
            generation.rounds.append(round_)
            generation.seconds += time.perf_counter() - began

    def _cut(self, committed: list[int], room: int) -> list[int]:
        """The tokens up to the end of the response: the first stop token, or no more room."""
        ends = (i + 1 for i, token in enumerate(committed) if token in self.target.stop_ids)
        return committed[: min(room, next(ends, room))]

    # ---- the steps -------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def prefill(self, prompt_ids: Sequence[int], limit: int, seed: int) -> Request:
        """Runs the prompt `[S]` and chooses the first token, the first anchor. limit: the longest possible response."""
        target, device = self.target, self.target.device
        cache, generator = target.new_cache(), torch.Generator(device).manual_seed(seed)
        out = target.forward(torch.tensor([prompt_ids], device=device), cache, self.layer_ids)
        first = self.sampling.choose(target.head(out.hidden[:, -1]), generator)
        request = Request(len(prompt_ids), first, cache, generator)
        if self.drafter is not None:
            config = self.drafter.config
            capacity = len(prompt_ids) + limit + 2 * config.block_size
            request.draft_cache = DraftCache(config, capacity, self.drafter.dtype, device)
            request.fresh = out.features
        return request

    @torch.no_grad()
    def round(self, request: Request) -> Round:
        """Drafts, verifies and commits once. The round's tokens are not cut at the end of the response."""
        anchor, carried = request.anchor, request.carry.count if request.carry is not None else 0
        began = self._clock()
        proposals, q = self.draft(request)
        drafted = self._clock()
        proposed, accepted, token = self._verify_and_commit(request, proposals, q)
        return Round(
            anchor=anchor,
            proposals=proposed,
            accepted=accepted,
            committed=[*proposed[:accepted], token],
            carried=carried,
            draft_seconds=drafted - began if self.drafter is not None else 0.0,
            verify_seconds=self._clock() - drafted,
        )

    @torch.no_grad()
    def draft(self, request: Request) -> tuple[Tensor, Tensor | None]:
        """Proposals `[1, P]` for the request's anchor, and the distributions `[1, P, V]` they were drawn from, if any.

        Fewer than the drafter makes where the target's context ends; none without a drafter.
        """
        if self.drafter is None:
            return request.anchor_token.new_empty(1, 0), None
        hidden = self.draft_states(request)
        chooser = Chooser(self.sampling, self.draft_sampling, request.generator)
        tokens, _ = self.drafter.propose(hidden, request.anchor_token, self._head, chooser)
        room = self.target.max_length - 1 - request.anchor
        q = chooser.probabilities
        return tokens[:, :room], q if q is None else q[:, :room]

    def draft_states(self, request: Request) -> Tensor:
        """The drafter's block at the request's anchor, `[1, B, D]`; takes in fresh and carry rows first."""
        drafter, cache, carry, anchor = self.drafter, request.draft_cache, request.carry, request.anchor
        assert drafter is not None and cache is not None
        if request.fresh is not None:
            rows = drafter.context(request.fresh.to(drafter.dtype))
            positions = torch.arange(cache.committed, anchor, device=rows.device)[None]
            cache.commit(drafter.key_values(rows, positions), rows.shape[1])
            request.fresh = None
        cache.put_carry(self._carry_key_values(carry) if carry is not None else None)
        block = drafter.block_tokens(request.anchor_token)
        positions = torch.arange(anchor, anchor + block.shape[1], device=block.device)[None]
        embeds = self.target.embed(block).to(drafter.dtype)
        return drafter.block(embeds, positions, cache, self._masks(request))

    def _carry_key_values(self, carry: CarryState) -> LayerKeyValues:
        assert self.drafter is not None
        rows = self.drafter.carried(carry.features.to(self.drafter.dtype))
        return self.drafter.key_values(rows, carry.positions)

    def _masks(self, request: Request) -> dict | None:
        """None where every layer lets every slot see every row; else one mask per kind of layer."""
        drafter = self.drafter
        assert drafter is not None
        if "sliding_attention" not in (drafter.config.layer_types or ()):
            return None
        zero = torch.zeros(1, 1, dtype=torch.long, device=self.target.device)
        context = torch.arange(request.anchor, device=zero.device)[None]
        block = block_rows(zero + request.anchor, zero, drafter.config.block_size)
        carry = () if request.carry is None else (request.carry.rows(),)
        return drafter.masks(block, concat(context_rows(context, torch.zeros_like(context)), *carry, block))

    def _head(self, hidden: Tensor) -> Tensor:
        return self.target.head(hidden.to(self.target.dtype))

    def _verify_and_commit(self, request: Request, proposals: Tensor, q: Tensor | None) -> tuple[list[int], int, int]:
        """One target forward; returns the proposals, n, and the correction or bonus. Waits for the device, once."""
        target, anchor, count = self.target, request.anchor, proposals.shape[1]
        tokens = torch.cat((request.anchor_token[:, None], proposals), dim=1)
        out = target.forward(tokens, request.cache, self.layer_ids)
        verdict = verify(proposals, target.head(out.hidden), self.sampling, q, request.generator)
        *proposed, accepted, token = torch.cat((proposals[0], verdict.accepted, verdict.next_token)).tolist()

        request.anchor = anchor + accepted + 1
        request.anchor_token = verdict.next_token
        target.crop(request.cache, request.anchor)
        if out.features is not None:
            request.fresh = out.features[:, : accepted + 1]
            rejected = out.features[:, accepted + 1 :]
            keep = self.carries and accepted < count
            request.carry = CarryState(rejected, anchor, accepted, count) if keep else None
        return proposed, accepted, token

    def _clock(self) -> float:
        """Seconds, after everything queued on the device is done; 0 when rounds are not timed."""
        if not self.timed:
            return 0.0
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()
