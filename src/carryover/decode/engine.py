"""Decoding requests, one or many at a time: plain, or in rounds of draft, verify and commit, with or without carry.

A round of a request at anchor `a`, its last committed token, whose state the target has not computed yet:

1. the drafter takes in the features of the tokens committed since its last draft, for good;
2. and those of the proposals rejected since then, for this draft only (carry; or, with token hints, their tokens);
3. it runs its block at `a` and proposes P tokens;
4. the target runs [anchor, proposals] in one forward; a rule accepts the first n and adds a token of the target's own;
5. the next anchor is `a + n + 1`; what the target computed behind it is forgotten.

Plain decoding is the same loop with no proposals. Nothing the drafter does changes the distribution of the output, and
nothing that happens to one request changes another's: each has its own slot, anchor, acceptance, carry and random
numbers.

Letters: `b` requests, `S` prompt tokens, `P` proposals, `B` block rows, `M` captured layers, `Dt` target hidden size,
`V` vocabulary. Source: SPEC 1.6, 3.3, 5 and 6.1 (paper 2.1).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..compiled import Compiled, bucket, draft_block
from ..drafter.modeling import Drafter
from ..errors import InputError
from ..rows import block_rows, draft_rows, rejected_seen
from ..slots import SlotCache
from ..target import Target
from .loops import LoopWatch
from .processors import History, Penalties, Process
from .sampling import Sampling
from .schedule import Acceptance, Schedule
from .state import DraftCache
from .trace import Generation, Round
from .verify import Chooser, DraftSampling, verify

Proposals = int | Literal["auto"] | None  # how many proposals to draft, see `Engine`


class Request(NamedTuple):
    """What is asked of the engine: token ids `[S]`, the longest response, and the seed of its random numbers.

    processors: logits processors of transformers, see `processors.py`.
    """

    ids: Sequence[int]
    max_new_tokens: int
    seed: int = 0
    processors: Sequence[Process] = ()


@dataclass
class Active:
    """One request between two rounds, on the host.

    ids: prompt and response so far. base: the first position whose state no draft has taken in, where the last
    verification began, or the first of several if nothing was drafted between them. anchor: position of the last
    committed token; states base..anchor-1 are of committed tokens, those behind were rejected. carried: how many of
    these the next draft reads, as rows or as hints. seen: what a schedule knows of it.
    """

    ids: list[int]
    generation: Generation
    limit: int
    generator: torch.Generator
    processors: Sequence[Process]
    base: int
    anchor: int
    carried: int = 0
    watch: LoopWatch | None = None
    seen: Acceptance | None = None


@dataclass
class Batch:
    """Requests that decode together, request i in slot i, and what lies on the device for them.

    tokens: the last committed token of each, `[slots]`. features: the target's states from each request's `base` on,
    `[slots, rows, M*Dt]`; None without a drafter, as is draft_cache. hints: the token that each row of a proposal
    offers to the next draft, `[slots, P]`; None where nobody reads them. drafted: whether a draft has taken in what the
    last verification left.
    """

    tokens: Tensor
    cache: SlotCache
    draft_cache: DraftCache | None = None
    features: Tensor | None = None
    hints: Tensor | None = None
    requests: list[Active] = field(default_factory=list)
    drafted: bool = False

    @property
    def anchors(self) -> list[int]:
        return [request.anchor for request in self.requests]

    @torch.inference_mode()
    def leave(self, slot: int) -> None:
        """Takes a request out; the last one moves into its slot."""
        last = len(self.requests) - 1
        if slot != last:
            moved = self.requests[slot] = self.requests[last]
            self.cache.move(last, slot, moved.anchor)
            self.tokens[slot] = self.tokens[last]
            if self.draft_cache is not None and self.features is not None:
                self.draft_cache.move(last, slot, moved.base)
                self.features[slot] = self.features[last]
            if self.hints is not None:
                self.hints[slot] = self.hints[last]
        self.requests.pop()


class Engine:
    """Decodes with one target and at most one drafter."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        sampling: Sampling = Sampling(),
        draft_sampling: DraftSampling = "greedy",
        carry: bool = True,
        timed: bool | None = None,
        penalties: Penalties = Penalties(),
        compile: bool = False,
        stop_loops: bool = False,
        carry_rows: int | None = None,
        proposals: Proposals = None,
    ) -> None:
        """drafter: None decodes plainly. draft_sampling: how to choose proposals above temperature 0, see `verify.py`.

        carry: False ignores the drafter's carry interface. timed: fill in the times of every round, which makes it wait
        three times for an accelerator; None times on the CPU only. compile: decode with compiled models where that is
        possible (see `compiled.py`); prompts are read uncompiled. stop_loops: end a response where it becomes a
        degenerate loop (see `loops.py`). carry_rows: a draft reads at most so many carry rows, the first behind the
        anchor; 0 is carry off, None reads all. proposals: draft so many tokens, with a block that is as much shorter;
        None drafts as many as the drafter was trained for, `auto` as many as pay, see `schedule.py`. Raises InputError
        for an unknown draft_sampling, for numbers that do not fit, and for `auto` with `compile`.
        """
        if carry_rows is not None and carry_rows < 0:
            raise InputError(f"carry_rows must be 0 or more, or None for all, got {carry_rows}.")
        most = drafter.config.num_proposals if drafter is not None else 0
        if proposals == "auto":
            if drafter is None or compile:
                raise InputError("proposals: auto needs a drafter, and shapes that change, so it excludes compile.")
        elif proposals is not None and not 1 <= proposals <= most:
            raise InputError(f"proposals must be 1 to {most}, what the drafter was trained for, got {proposals}.")
        if draft_sampling not in get_args(DraftSampling):
            raise InputError(f"draft_sampling must be greedy or probabilistic, got {draft_sampling!r}.")
        self.target = target
        self.drafter = drafter
        self.sampling = sampling
        self.draft_sampling: DraftSampling = draft_sampling
        self.penalties = penalties
        self.carries = carry and carry_rows != 0 and drafter is not None and drafter.config.carry != "none"
        self.carry_rows = carry_rows
        self.hints = self.carries and drafter is not None and drafter.config.hints
        self.timed = target.device.type == "cpu" if timed is None else timed
        self.layer_ids = drafter.config.layer_ids if drafter is not None else None
        self.schedule = Schedule(most) if proposals == "auto" else None
        self.proposals = proposals if isinstance(proposals, int) else most  # at most
        self.first_slot = drafter.config.first_slot if drafter is not None else 0
        self.block_size = self.proposals + self.first_slot
        self.draft_head = target.head_of(drafter.draft_vocab if drafter is not None else None)
        self.draft_dtype = target.dtype if drafter is None else drafter.dtype  # asking a model walks its weights
        self.compile = compile
        self.stop_loops = stop_loops
        self._draft_block = Compiled(draft_block, target.device.type == "cuda") if compile else draft_block

    # ---- what users call -------------------------------------------------------------------------------------------
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
        prompt = Request(prompt_ids, max_new_tokens, seed)
        self.check(prompt)
        return self._stream(prompt, Generation(len(prompt_ids)) if generation is None else generation)

    def _stream(self, prompt: Request, generation: Generation) -> Iterator[Round]:
        batch = self.new_batch([prompt], 1)
        going = self.join(batch, prompt, generation)
        while going:
            (round_,) = self.round(batch)
            going = not self.take(batch.requests[0], round_)
            yield round_

    def generate_many(self, prompts: Sequence[Request], batch_size: int) -> Iterator[tuple[int, Generation]]:
        """Responds to prompts, `batch_size` at a time; yields each one's index and response as soon as it is complete.

        A request that ends leaves its slot to the next prompt. In fp32 each response is the one of `generate`. Raises
        InputError, before anything is decoded, for a prompt that `generate` would refuse.
        """
        if batch_size < 1:
            raise InputError(f"the batch must have at least one row, got {batch_size}.")
        for prompt in prompts:
            self.check(prompt)
        if not prompts:
            return
        slots = batch_size if self.compiles else min(batch_size, len(prompts))
        batch = self.new_batch(prompts, slots)
        waiting, indices = iter(enumerate(prompts)), list[int]()
        while True:
            while len(indices) < batch.cache.slots and (following := next(waiting, None)):
                index, prompt = following
                generation = Generation(len(prompt.ids))
                if self.join(batch, prompt, generation):
                    indices.append(index)
                else:
                    yield index, generation
            if not indices:
                return
            rounds = self.round(batch)
            for slot in reversed(range(len(rounds))):
                if self.take(batch.requests[slot], rounds[slot]):
                    yield indices[slot], batch.requests[slot].generation
                    batch.leave(slot)
                    indices[slot] = indices[-1]
                    indices.pop()

    def check(self, prompt: Request) -> int:
        """How many tokens the response may have. Raises InputError for a prompt that cannot be answered."""
        length, vocab_size = len(prompt.ids), self.target.vocab_size
        if prompt.max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be at least 1, got {prompt.max_new_tokens}.")
        if not length:
            raise InputError("the prompt is empty; it needs at least one token.")
        if not 0 <= min(prompt.ids) <= max(prompt.ids) < vocab_size:
            raise InputError(f"the prompt has token ids outside the target's vocabulary (0 to {vocab_size - 1}).")
        if length + 1 > self.target.max_length:
            raise InputError(
                f"the prompt has {length} tokens and leaves no room for a response in the target's context of "
                f"{self.target.max_length}; shorten it."
            )
        return min(prompt.max_new_tokens, self.target.max_length - length)

    def take(self, request: Active, round_: Round) -> bool:
        """Adds a round to its generation, cut at the end of the response; whether that is reached."""
        generation, stops = request.generation, self.target.stop_ids
        ends = (i + 1 for i, token in enumerate(round_.committed) if token in stops)
        room = request.limit - len(generation.tokens)
        round_.committed = round_.committed[: min(room, next(ends, room))]
        if request.watch and (end := request.watch.read(round_.committed)):
            round_.committed = round_.committed[:end]
            generation.finish = "loop"
        round_.accepted = min(round_.accepted, len(round_.committed))
        generation.rounds.append(round_)
        generation.tokens += round_.committed
        request.ids += round_.committed
        if generation.tokens[-1] in stops:
            generation.finish = "stop"
        return generation.finish != "length" or len(generation.tokens) == request.limit

    # ---- the steps -------------------------------------------------------------------------------------------------
    def new_batch(self, prompts: Sequence[Request], slots: int, before: Batch | None = None) -> Batch:
        """An empty batch with room for each of these prompts and its response.

        before: an empty batch of as many slots whose rows are kept; it is returned itself where it is large enough.
        """
        device, p = self.target.device, self.proposals
        limits = [self.check(prompt) for prompt in prompts]
        if self.compiles:  # all rows there are get read, so room for the responses is made when they need it
            capacity = bucket(max(len(prompt.ids) for prompt in prompts) + p + 1)
        else:
            capacity = max(len(prompt.ids) + limit for prompt, limit in zip(prompts, limits, strict=True)) + p + 1
        if before is not None:
            before.requests.clear()
            self._make_room(before, capacity)
            return before
        batch = Batch(torch.zeros(slots, dtype=torch.long, device=device), SlotCache(slots, capacity))
        if self.drafter is not None:
            config, dtype = self.drafter.config, self.draft_dtype
            batch.draft_cache = DraftCache(config, slots, capacity + self.block_size, dtype, device)
            width = len(config.layer_ids) * self.target.hidden_size
            batch.features = torch.zeros(slots, p + 1, width, dtype=dtype, device=device)
            batch.hints = batch.tokens.new_zeros(slots, p) if self.hints else None
        return batch

    def _make_room(self, batch: Batch, capacity: int) -> None:
        """Lets every slot hold so many rows, or twice as many as before where that is more."""
        if batch.cache.capacity < capacity:
            capacity = max(capacity, 2 * batch.cache.capacity)
            batch.cache.grow(capacity)
            if batch.draft_cache is not None:
                batch.draft_cache.grow(capacity + self.block_size)

    @property
    def compiles(self) -> bool:
        return self.compile and Compiled.possible

    def warm_up(self, prompt: Request, longest: int, slots: int = 1) -> None:
        """Compiles whatever decoding up to `longest` tokens, prompt and response, needs; nothing without `compile`."""
        capacity = 0
        while self.compiles and capacity < longest + self.proposals + 1:
            batch = self.new_batch([prompt], slots)
            self._make_room(batch, capacity := max(bucket(capacity + 1), batch.cache.capacity))
            if not self.join(batch, prompt, Generation(len(prompt.ids))):
                return
            for _ in range(2):
                self.round(batch)

    @torch.inference_mode()
    def join(self, batch: Batch, prompt: Request, generation: Generation, start: int = 0) -> bool:
        """Runs a prompt in the first free slot and chooses its first token, the first anchor.

        start: how many of its tokens the slot's caches hold already. Returns whether the response goes on; if the first
        token is all of it, the slot stays free.
        """
        began, device, slot = time.perf_counter(), self.target.device, len(batch.requests)
        length, generator = len(prompt.ids), torch.Generator(device).manual_seed(prompt.seed)
        processors = [*self.penalties.processors(length, sorted(self.target.stop_ids), device), *prompt.processors]
        request = Active(list(prompt.ids), generation, self.check(prompt), generator, processors, length, length)
        ids = torch.tensor([prompt.ids[start:]], device=device)
        out = self.target.prefill(ids, batch.cache, slot, start, self.layer_ids)
        logits = self.target.head(out.hidden[:, -1])
        if history := self._history([request]):
            logits = history.row(logits, ids[:, :0])
        batch.tokens[slot] = self.sampling.choose(logits, generator)[0]
        request.seen = self.schedule.begin() if self.schedule is not None else None
        first = int(batch.tokens[slot])
        if self.drafter is not None:
            assert batch.draft_cache is not None and batch.features is not None and out.features is not None
            rows = self.drafter.context(out.features.to(self.draft_dtype))
            kv = self.drafter.key_values(rows, torch.arange(start, length, device=device)[None])
            batch.draft_cache.write(kv, slot, [start])
            batch.features[slot] = 0
        request.ids.append(first)
        generation.tokens.append(first)
        if self.stop_loops:
            request.watch = LoopWatch()
            request.watch.read([first])
        if first in self.target.stop_ids:
            generation.finish = "stop"
        goes_on = generation.finish != "stop" and request.limit > 1
        if goes_on:
            batch.requests.append(request)
        generation.prefill_seconds = generation.seconds = time.perf_counter() - began
        return goes_on

    @torch.inference_mode()
    def round(self, batch: Batch) -> list[Round]:
        """Drafts, verifies and commits once for every request. Rounds are not cut at the end of the response; their
        times are each request's share."""
        share = 1 / len(batch.requests)
        started = time.perf_counter()
        before = [(request.anchor, request.carried) for request in batch.requests]
        self._make_room(batch, max(batch.anchors) + self.proposals + 1)
        began = self._clock()
        seen = [request.seen for request in batch.requests if request.seen is not None]
        count = self.proposals if self.schedule is None else self.schedule.choose(seen)
        proposals, q = self.draft(batch, count)
        drafted = self._clock()
        verdicts, _ = self.commit(batch, proposals, q)
        verified = self._clock()
        if self.schedule is not None:  # `commit` has waited for the device
            accepted = [n for _, n, _ in verdicts]
            self.schedule.learn(seen, count, accepted, time.perf_counter() - started)
        for request in batch.requests:
            request.generation.seconds += share * (time.perf_counter() - started)
        return [
            Round(
                anchor=anchor,
                proposals=proposed[: self.target.max_length - 1 - anchor],
                accepted=accepted,
                committed=[*proposed[:accepted], token],
                carried=carried,
                draft_seconds=share * (drafted - began) if self.drafter is not None else 0.0,
                verify_seconds=share * (verified - drafted),
            )
            for (anchor, carried), (proposed, accepted, token) in zip(before, verdicts, strict=True)
        ]

    @torch.inference_mode()
    def draft(self, batch: Batch, count: int | None = None) -> tuple[Tensor, Tensor | None]:
        """Proposals `[b, P]` for the anchors, and the distributions `[b, P, V]` they were drawn from, if any.

        count: so many instead of P; of 0, or without a drafter, there are none.
        """
        tokens = batch.tokens[: len(batch.requests)]
        if self.drafter is None or count == 0:
            return tokens.new_empty(len(tokens), 0), None
        hidden = self.draft_states(batch, count)[: len(tokens)]
        generators, history = [r.generator for r in batch.requests], self._history(batch.requests)
        vocabulary = self.drafter.draft_vocab
        chooser = Chooser(self.sampling, self.draft_sampling, generators, history, vocabulary, self.target.vocab_size)
        proposals, _ = self.drafter.propose(hidden, tokens, self.draft_head, chooser)
        return proposals, chooser.probabilities

    def draft_states(self, batch: Batch, count: int | None = None) -> Tensor:
        """The drafter's blocks at the anchors, `[b, B, D]`, or of all slots where it is compiled; takes in the rows of
        the last verification first. count: proposals of a shorter block, None: P."""
        drafter, cache, compiled = self.drafter, batch.draft_cache, self.compiles
        assert drafter is not None and cache is not None and batch.features is not None
        device, p = self.target.device, self.proposals
        size = self.block_size if count is None else count + self.first_slot
        batch.drafted = True
        places = [(r.base, r.anchor, 0 if self.hints else r.carried) for r in batch.requests]  # carried: as rows
        if compiled:
            places += [(0, 0, 0)] * (batch.cache.slots - len(places))  # empty slots; whatever is written there
        base, anchor, carried = torch.tensor(places, device=device).T
        # Of a verification's rows only those that some request reads: without carry, the committed ones.
        fresh = p + 1 if compiled else max(1, *(a + c - b for b, a, c in places))
        self._make_room(batch, max(b for b, _, _ in places) + fresh)  # what one request lacks is written for all
        positions = base[:, None] + torch.arange(fresh, device=device)
        rejected = positions >= anchor[:, None] if self.carries and not self.hints else None
        rows = cache.rows([b for b, _, _ in places], fresh, compiled)

        length = cache.aim([a + c for _, a, c in places], size, compiled)
        block = drafter.block_tokens(batch.tokens[: len(places)])[:, :size]
        at = anchor[:, None] + torch.arange(size, device=device)
        masks = None  # of a single request the block sees every row there is
        if compiled or len(places) > 1 or "sliding_attention" in (drafter.config.layer_types or ()):
            queries = block_rows(anchor[:, None], torch.zeros_like(anchor)[:, None], size)
            masks = drafter.masks(queries, draft_rows(length, base, anchor, carried, size))
        embeds = self.target.embed(block).to(self.draft_dtype)
        if batch.hints is not None:
            seen = torch.tensor([r.carried for r in batch.requests], device=device)
            seen = torch.nn.functional.pad(seen, (0, len(places) - len(seen)))
            hints = drafter.hints(batch.hints[: len(places)], anchor - base - 1, seen, self.target.embed)
            embeds = drafter.carry(embeds, hints[:, :size].to(self.draft_dtype))
        features = batch.features[: len(places), :fresh]
        draft = self._draft_block if compiled else draft_block
        return draft(drafter, features, rejected, positions, rows, embeds, at, masks, cache)

    def _history(self, requests: list[Active]) -> History | None:
        """None where no request has a processor."""
        if not any(request.processors for request in requests):
            return None
        return History([r.ids for r in requests], [r.processors for r in requests], self.target.device)

    @torch.inference_mode()
    def commit(
        self, batch: Batch, proposals: Tensor, q: Tensor | None = None
    ) -> tuple[list[tuple[list[int], int, int]], Tensor]:
        """Verifies proposals `[b, P]`, whoever drafted them, in one target forward. Waits for the device, once.

        What no draft has taken in since the last verification is kept for the next one, but for rejected states.
        Returns per request the proposals, n, and the correction or bonus; and the target's logits `[b, P+1, V]`.
        """
        requests = batch.requests
        tokens, anchors = torch.cat((batch.tokens[: len(requests), None], proposals), dim=1), batch.anchors
        if compiled := self.compiles:
            empty = batch.cache.slots - len(requests)
            tokens, anchors = torch.nn.functional.pad(tokens, (0, 0, 0, empty)), anchors + [0] * empty
        out = self.target.verify(tokens, batch.cache, anchors, self.layer_ids, compiled)
        logits, generators = self.target.head(out.hidden[: len(requests)]), [request.generator for request in requests]
        if history := self._history(requests):
            logits = history.rows(logits, proposals)
        verdict = verify(proposals, logits, self.sampling, q, generators)
        batch.tokens[: len(requests)] = verdict.next_token
        if batch.features is not None and out.features is not None:
            self._keep(batch, out.features[: len(requests)])
        if batch.hints is not None and self.drafter is not None and (count := proposals.shape[1]):
            top1 = self.drafter.config.carry_hint == "target_top1"
            batch.hints[: len(requests), :count] = logits[:, 1:].argmax(-1) if top1 else proposals
        verdicts = []
        for row, request in zip(
            torch.cat((proposals, verdict.accepted[:, None], verdict.next_token[:, None]), 1).tolist(),
            requests,
            strict=True,
        ):
            *proposed, accepted, token = row
            verdicts.append((proposed, accepted, token))
            if batch.drafted or batch.features is None:
                request.base = request.anchor
            request.anchor += accepted + 1
            request.carried = rejected_seen(accepted, len(proposed), self.carry_rows) if self.carries else 0
        batch.drafted = False
        return verdicts, logits

    def _keep(self, batch: Batch, states: Tensor) -> None:
        """Puts a verification's states `[b, Q, M*Dt]` where the next draft finds them: behind those of committed tokens
        that no draft has taken in."""
        assert batch.features is not None
        pending = [0 if batch.drafted else request.anchor - request.base for request in batch.requests]
        last = max(pending) + states.shape[1]
        if last > batch.features.shape[1]:
            room = max(last, 2 * batch.features.shape[1]) - batch.features.shape[1]
            batch.features = torch.nn.functional.pad(batch.features, (0, 0, 0, room))
        if not any(pending):
            batch.features[: len(states), : states.shape[1]] = states
            return
        for slot, first in enumerate(pending):
            batch.features[slot, first : first + states.shape[1]] = states[slot]

    def _clock(self) -> float:
        """Seconds, after everything queued on the device is done; 0 when rounds are not timed."""
        if not self.timed:
            return 0.0
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()
