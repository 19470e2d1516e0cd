"""Carry rows: which, where, how long, and that the cached decode equals the pass that training runs."""

from __future__ import annotations

import pytest
import torch
from decode_helpers import CARRIES, HEADS, LAYERS, PROMPT, ScriptedDrafter, begin, make_drafter
from tiny import tiny_target

from carryover.decode.engine import Engine, Request
from carryover.decode.sampling import Sampling
from carryover.drafter.config import DrafterConfig
from carryover.drafter.modeling import Drafter
from carryover.errors import InputError
from carryover.rows import block_rows, carry_rows, concat, context_rows

NEW = 14


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def family_target(request):
    seed = {"llama": 16, "gemma3_text": 35}[request.param]
    return tiny_target(request.param, 8, 3, seed, eos_token_id=None, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def llama():
    return tiny_target("llama", 8, 3, 16, eos_token_id=None, tie_word_embeddings=False)


def watch(drafter):
    """Records what every draft saw and made: block states and the logits of the proposals."""
    states, logits, block, propose = [], [], drafter.block, drafter.propose

    def watched_block(*args):
        states.append(block(*args))
        return states[-1]

    def watched_propose(*args):
        proposals = propose(*args)
        logits.append(proposals.logits)
        return proposals

    drafter.block, drafter.propose = watched_block, watched_propose
    return states, logits


def recompute(target, drafter, tokens, anchor, last=None, limit=99):
    """Block states `[1, B, D]` at `anchor`, with nothing cached: the training pass with masks from rows.py.

    limit: as if the last round had made only so many proposals behind the accepted ones.
    """
    zero = torch.zeros(1, 1, dtype=torch.long)
    positions = torch.arange(anchor)[None]
    features = target.forward(torch.tensor([tokens[:anchor]]), layer_ids=drafter.config.layer_ids).features
    block = block_rows(zero + anchor, zero, drafter.config.block_size)
    keys, carried, carried_at = [context_rows(positions, torch.zeros_like(positions))], None, None
    if last is not None:
        proposals = last.proposals[: last.accepted + limit]
        rows = carry_rows(zero + last.anchor, zero, zero + last.accepted, len(proposals))
        branch = torch.tensor([tokens[: last.anchor + 1] + proposals])
        carried = target.forward(branch, layer_ids=drafter.config.layer_ids).features[:, last.anchor + 1 :]
        carried_at = rows.position
        keys.append(rows)
    masks = drafter.masks(block, concat(*keys, block))
    embeds = target.embed(drafter.block_tokens(torch.tensor([tokens[anchor]])))
    return drafter(embeds, block.position, masks, features, positions, carried, carried_at)


@pytest.mark.parametrize("slots", ["fill_in", "next_token"])
@pytest.mark.parametrize(
    "layers, carry",
    [("full", "none"), ("full", "projector"), ("causal", "none"), *((kind, "embedding") for kind in LAYERS)],
)
def test_cached_states_equal_the_training_pass(family_target, slots, layers, carry):
    small = {"initializer_range": 0.1}  # random weights any larger amplify rounding
    drafter = make_drafter(family_target, slots=slots, **small, **CARRIES[carry], **LAYERS[layers])
    states, _ = watch(drafter)
    generation = Engine(family_target, drafter).generate(PROMPT, NEW)
    states, tokens, last = list(states), PROMPT + generation.tokens, None
    assert len(states) == len(generation.rounds) >= 4
    for state, round_ in zip(states, generation.rounds, strict=True):
        expected = recompute(family_target, drafter, tokens, round_.anchor, last)
        assert (state - expected).abs().max() < 1e-5
        last = round_ if carry != "none" else None


@pytest.mark.parametrize("slots", ["fill_in", "next_token"])
def test_carry_rows_live_one_round_at_their_own_positions(family_target, slots):
    """Round by round: right about 0, all, 2, 1, all, 0, 0, ... proposals."""
    truth = Engine(family_target).generate(PROMPT, 40).tokens
    drafter = make_drafter(family_target, kind=ScriptedDrafter, slots=slots, carry="embedding")
    p, plan = drafter.config.num_proposals, [0, 9, 2, 1, 9, 0, 0]
    drafter.follow(PROMPT + truth, lambda r: plan[r])
    seen, block = [], drafter.block

    def watched(embeds, positions, kv, masks):
        seen.append((masks, kv.window.start, kv.window.length))
        return block(embeds, positions, kv, masks)

    drafter.block = watched
    engine = Engine(family_target, drafter)
    batch, tokens, last = begin(engine, PROMPT, 40), PROMPT + truth[:1], None
    request = batch.requests[0]
    for n in plan:
        n = min(n, p)
        anchor, base, carried = request.anchor, request.base, request.carried
        if last is None:
            assert carried == 0
        else:
            assert (base, anchor, carried) == (last.anchor, last.anchor + last.accepted + 1, p - last.accepted)
            branch = torch.tensor([tokens[: base + 1] + last.proposals])
            states = family_target.forward(branch, layer_ids=drafter.config.layer_ids).features
            assert torch.allclose(batch.features[0], states[0, base:], atol=1e-5)
        (round_,) = engine.round(batch)
        assert round_.accepted == n and round_.carried == carried
        # Committed rows, this round's carry rows right behind them at their own positions, the block: nothing else.
        assert seen.pop() == (None, anchor + carried, anchor + carried + drafter.config.block_size)
        tokens += round_.committed
        last = round_


@pytest.mark.parametrize("limit", [1, 2, 99])
@pytest.mark.parametrize("layers", ["full", "sliding"])
def test_few_carry_rows_are_the_draft_whose_context_has_only_these(family_target, layers, limit):
    """Round by round, right about 0, all but one, all, ... proposals; and the output is still the target's."""
    truth = Engine(family_target).generate(PROMPT, 40).tokens
    drafter = make_drafter(
        family_target, kind=ScriptedDrafter, slots="next_token", initializer_range=0.1, carry="embedding",
        **LAYERS[layers],
    )  # fmt: skip
    p, plan = drafter.config.num_proposals, [0, 3, 9, 1, 2, 0, 0, 0]
    drafter.follow(PROMPT + truth, lambda r: plan[r] if r < len(plan) else 0)
    states, _ = watch(drafter)
    generation = Engine(family_target, drafter, carry_rows=limit).generate(PROMPT, 24)
    assert generation.tokens == truth[:24]
    rejected = [0, *(p - r.accepted for r in generation.rounds[:-1])]
    assert [r.carried for r in generation.rounds] == [min(limit, count) for count in rejected]
    assert {0, 1, 3, 4} <= set(rejected)
    last, differs = None, False
    for state, round_ in zip(list(states), generation.rounds, strict=True):
        tokens = PROMPT + truth
        expected = recompute(family_target, drafter, tokens, round_.anchor, last, limit)
        assert (state - expected).abs().max() < 1e-5
        if last is not None:
            whole = recompute(family_target, drafter, tokens, round_.anchor, last)
            differs |= not torch.allclose(whole, expected, atol=1e-3)
        last = round_
    assert differs == (limit < p)


@pytest.mark.parametrize("limit", [None, 1, 2])
@pytest.mark.parametrize("slots", ["fill_in", "next_token"])
@pytest.mark.parametrize("kind", ["rejected_tokens", "target_top1"])
def test_hints_stand_at_the_positions_they_are_about(family_target, kind, slots, limit):
    """The embedded block of every round against one written position by position."""
    truth = PROMPT + Engine(family_target).generate(PROMPT, 40).tokens
    drafter = make_drafter(family_target, kind=ScriptedDrafter, slots=slots, block_size=6, **CARRIES[kind])
    plan = [0, 9, 2, 1, 3, 9, 0, 0]
    drafter.follow(truth, lambda r: plan[r] if r < len(plan) else 0)
    blocks, block = [], drafter.block
    drafter.block = lambda embeds, *args: (blocks.append(embeds), block(embeds, *args))[1]
    generation = Engine(family_target, drafter, carry_rows=limit).generate(PROMPT, 24)
    assert generation.tokens == truth[len(PROMPT) :][:24]
    last, hinted = None, 0
    for embeds, round_ in zip(blocks, generation.rounds, strict=True):
        offered = {}
        if last is not None:
            rejected = range(last.accepted + 1, len(last.proposals) + 1)[:limit]
            assert round_.carried == len(rejected)
            branch = family_target.forward(torch.tensor([truth[: last.anchor + 1] + last.proposals]))
            for j in rejected:
                if kind == "rejected_tokens":
                    offered[last.anchor + j] = last.proposals[j - 1]
                else:
                    offered[last.anchor + j + 1] = int(family_target.head(branch.hidden[0, last.anchor + j]).argmax())
        tokens = [truth[round_.anchor]] + [drafter.config.mask_token_id] * 5
        for k, token in enumerate(tokens):
            expected = family_target.embed(torch.tensor(token))
            if k and round_.anchor + k in offered:
                expected = expected + drafter.carry.scale * family_target.embed(
                    torch.tensor(offered[round_.anchor + k])
                )
                hinted += 1
            assert torch.equal(embeds[0, k], expected)
        last = round_
    assert (hinted > 0) == (limit != 1 or kind == "target_top1")  # the first rejected token is about the anchor


@pytest.mark.parametrize("kind", ["rejected_tokens", "target_top1"])
@pytest.mark.parametrize("head", ["dflash", "rnn"])
def test_fresh_hints_are_the_baseline_bit_for_bit(llama, head, kind):
    baseline = make_drafter(llama, **HEADS[head])
    hinting = same_weights(llama, baseline, **HEADS[head], **CARRIES[kind])
    hinting.carry.start_from(hinting.fc)
    expected, fresh = run(llama, baseline), run(llama, hinting)
    assert fresh[0].tokens == expected[0].tokens and sum(r.carried for r in fresh[0].rounds) > 0
    assert torch.equal(fresh[1], expected[1]) and torch.equal(fresh[2], expected[2])


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("slots", ["fill_in", "next_token"])
@pytest.mark.parametrize(
    "interface", [CARRIES["embedding"], CARRIES["target_top1"], LAYERS["sliding"], HEADS["rnn"] | CARRIES["projector"]]
)
def test_fewer_proposals_are_those_of_a_shorter_block(llama, interface, slots, count):
    """The same weights in a drafter with blocks of that size, one request and three at a time, greedy and drawn."""
    longer = make_drafter(llama, slots=slots, block_size=6, initializer_range=0.1, **interface)
    size = count + longer.config.first_slot
    config = DrafterConfig.from_dict({**longer.config.to_dict(), "block_size": size})
    shorter = Drafter.from_tensors(config, longer.state_dict())
    truth = Engine(llama).generate(PROMPT, NEW).tokens
    for sampling in (Sampling(), Sampling(1.0)):
        short = Engine(llama, shorter, sampling, "probabilistic").generate(PROMPT, NEW, seed=3)
        engine = Engine(llama, longer, sampling, "probabilistic", proposals=count)
        generation = engine.generate(PROMPT, NEW, seed=3)
        assert generation.tokens == short.tokens and (not sampling.greedy or short.tokens == truth)
        assert [(r.proposals, r.carried) for r in generation.rounds] == [(r.proposals, r.carried) for r in short.rounds]
        assert max(len(r.proposals) for r in generation.rounds) == count
        many = engine.generate_many([Request(PROMPT[i:], NEW, 3) for i in range(3)], 3)
        assert dict(many)[0].tokens == generation.tokens


@pytest.mark.parametrize("count", [-1, 0, 6])
def test_proposals_that_do_not_fit_are_refused(llama, count):
    with pytest.raises(InputError, match=f"proposals must be 1 to 5, what the drafter was trained for, got {count}"):
        Engine(llama, make_drafter(llama, block_size=6), proposals=count)


def test_no_carry_rows_are_carry_off_bit_for_bit(llama):
    drafter = make_drafter(llama, carry="embedding")
    states, _ = watch(drafter)
    off = Engine(llama, drafter, carry=False).generate(PROMPT, NEW)
    none = Engine(llama, drafter, carry_rows=0).generate(PROMPT, NEW)
    half = len(states) // 2
    assert none.tokens == off.tokens and all(r.carried == 0 for r in none.rounds)
    assert all(torch.equal(a, b) for a, b in zip(states[:half], states[half:], strict=True))
    with pytest.raises(InputError, match="carry_rows must be 0 or more"):
        Engine(llama, drafter, carry_rows=-1)


def test_requests_do_not_share_carry(llama):
    engine = Engine(llama, make_drafter(llama, carry="embedding"))
    first = engine.generate(PROMPT, NEW)
    other = engine.generate([6, 2, 2], NEW)
    assert first.rounds[0].carried == other.rounds[0].carried == 0
    assert sum(r.carried for r in first.rounds) > 0
    again = engine.generate(PROMPT, NEW)
    for one, two in zip(first.rounds, again.rounds, strict=True):
        assert (one.anchor, one.proposals, one.carried) == (two.anchor, two.proposals, two.carried)


def run(target, drafter, carry=True, sampling=Sampling()):
    states, logits = watch(drafter)
    generation = Engine(target, drafter, sampling, "probabilistic", carry).generate(PROMPT, NEW, seed=2)
    return generation, torch.cat(states), torch.cat(logits)


def same_weights(target, reference, **overrides):
    """A drafter with another carry interface and the reference's weights; its own mark stays random."""
    drafter = make_drafter(target, 7, **overrides)
    drafter.load_state_dict(reference.state_dict(), strict=False)
    return drafter


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)])
@pytest.mark.parametrize("head", HEADS)
def test_switched_off_carry_is_the_baseline_bit_for_bit(llama, head, sampling):
    baseline = make_drafter(llama, **HEADS[head])
    expected = run(llama, baseline, True, sampling)
    for carry in CARRIES.values():
        off = run(llama, same_weights(llama, baseline, **HEADS[head], **carry), False, sampling)
        assert off[0].tokens == expected[0].tokens
        assert torch.equal(off[1], expected[1]) and torch.equal(off[2], expected[2])
        assert all(r.carried == 0 for r in off[0].rounds)


@pytest.mark.parametrize("carry", ["embedding", "post_norm", "projector", "bottleneck"])
def test_a_fresh_mark_is_plain_carry_bit_for_bit(llama, carry):
    plain = make_drafter(llama, carry="plain")
    marked = same_weights(llama, plain, **CARRIES[carry])
    marked.carry.start_from(marked.fc)
    expected, fresh = run(llama, plain), run(llama, marked)
    assert fresh[0].tokens == expected[0].tokens
    assert [r.carried for r in fresh[0].rounds] == [r.carried for r in expected[0].rounds]
    assert torch.equal(fresh[1], expected[1]) and torch.equal(fresh[2], expected[2])


@pytest.mark.parametrize("carry", [name for name in CARRIES if name != "none"])
def test_carry_changes_drafts_from_the_second_round_on(llama, carry):
    """Or else the two tests above would compare nothing."""
    baseline = make_drafter(llama)
    drafter = same_weights(llama, baseline, **CARRIES[carry])
    (before, base, _), (after, states, _) = run(llama, baseline), run(llama, drafter)
    assert torch.equal(states[0], base[0])
    assert after.rounds[1].carried > 0 and after.rounds[1].anchor == before.rounds[1].anchor
    assert not torch.allclose(states[1], base[1], atol=1e-3)


def test_drafting_twice_from_one_state(llama):
    """Diagnostics draft from the same state with and without carry; drafting leaves no trace in it."""
    drafter = make_drafter(llama, carry="embedding")
    engine = Engine(llama, drafter)
    batch = begin(engine, PROMPT, NEW)
    engine.round(batch)
    carried = batch.requests[0].carried
    assert carried > 0
    with_carry = engine.draft_states(batch)
    batch.requests[0].carried = 0
    without = engine.draft_states(batch)
    batch.requests[0].carried = carried
    assert torch.equal(engine.draft_states(batch), with_carry) and not torch.allclose(without, with_carry, atol=1e-3)
    off = Engine(llama, drafter, carry=False)
    same = begin(off, PROMPT, NEW)
    off.round(same)
    assert torch.equal(off.draft_states(same), without)
