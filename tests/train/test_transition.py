"""The parallel draft-verify-draft step against the same step done anchor by anchor, as SPEC 6.2 words it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import packed, random_documents, stack, tiny_drafter
from tiny import tiny_target

from carryover.drafter.backbone import RowKeyValues
from carryover.drafter.modeling import Drafter
from carryover.target import Target
from carryover.train.anchors import labels_at, sample_anchors
from carryover.train.losses import Objective, block_loss
from carryover.train.trainer import sampled
from carryover.train.transition import Carried, Transition, draft, read_prefix, second_draft, transition

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"carry": "embedding"}),
    ("llama", {"carry": "projector", "slots": "next_token", "markov_rank": 4, "markov_kind": "gated"}),
    ("qwen3", {"carry": "plain", "slots": "next_token", "markov_rank": 4, "markov_kind": "rnn"}),
    ("gemma3_text", {"carry": "embedding", "carry_site": "post_norm", "markov_rank": 4}),
    ("llama", {"carry": "embedding", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}),
    ("llama", {"carry": "hint"}),
    ("gemma3_text", {"carry": "hint", "carry_hint": "target_top1", "slots": "next_token", "markov_rank": 4}),
]


def recorded(target: Target, seed: int) -> dict[str, torch.Tensor]:
    """Two packed rows; some responses are the target's own greedy ones, so that drafts can be accepted."""
    documents = random_documents(seed, [(4, 14), (3, 9), (6, 12)], target.vocab_size)
    return stack(packed(documents[:2], 34), packed(documents[2:], 34))


class Lucky(Drafter):
    """Proposes the recorded token most of the time, so that every accepted count occurs."""

    batch: dict[str, torch.Tensor]

    def propose(self, hidden: Any, anchor_token: Any, head: Any, choose: Any) -> Any:
        out = super().propose(hidden, anchor_token, head, choose)
        rows = labels_at(self.batch, self.sampled, self.config.num_proposals)
        g = torch.Generator().manual_seed(3)
        good = (torch.rand(out.tokens.shape, generator=g) < 0.8) & rows.mask.flatten(0, 1)
        return out._replace(tokens=torch.where(good, rows.tokens.flatten(0, 1), out.tokens))


def setup(family: str, overrides: dict[str, Any]) -> tuple[Target, Drafter, dict[str, torch.Tensor], Any]:
    target = tiny_target(family)
    drafter = tiny_drafter(target, **overrides)
    drafter.__class__ = Lucky
    batch = recorded(target, 5)
    anchors = sample_anchors(batch, 5, 2, torch.Generator().manual_seed(1))
    drafter.batch, drafter.sampled = batch, anchors
    return target, drafter, batch, anchors


def alone(
    target: Target, drafter: Drafter, row: dict[str, list[int]], a: int, carry: Any = None, hints: Any = None
) -> torch.Tensor:
    """Proposing rows of one block at position `a` of one document: plain forward of its own prefix, one anchor.

    hints: tokens by absolute position.
    """
    tokens = torch.tensor([row["ids"][:a]])
    features = target.forward(tokens, layer_ids=drafter.config.layer_ids).features
    at = torch.arange(a)[None]
    kv = drafter.key_values(drafter.context(features), at)
    positions = list(range(a))
    if carry is not None:
        states, carry_at = carry
        marked = drafter.key_values(drafter.carried(states[None]), torch.tensor([carry_at]))
        kv = [(torch.cat((k, ck), 2), torch.cat((v, cv), 2)) for (k, v), (ck, cv) in zip(kv, marked, strict=True)]
    b = drafter.config.block_size
    embeds = target.embed(drafter.block_tokens(torch.tensor([row["ids"][a]])))
    for position, token in (hints or {}).items():
        if a < position < a + b:
            embeds[0, position - a] += drafter.carry.scale * target.embed(torch.tensor(token))
    masks = {}
    window = drafter.config.sliding_window
    for kind in set(drafter.config.layer_types):
        seen = torch.ones(b, len(positions) + (len(carry[1]) if carry else 0) + b, dtype=torch.bool)
        if kind == "sliding_attention":
            for k in range(b):
                for i, position in enumerate(positions):
                    seen[k, i] = a + k - position < window
        masks[kind] = seen[None, None]
    out = drafter.block(embeds, torch.arange(a, a + b)[None], RowKeyValues(kv), masks)
    return drafter.proposing(out)[0]


def documents_of(batch: dict[str, torch.Tensor]) -> dict[tuple[int, int], dict[str, list[int]]]:
    found: dict[tuple[int, int], dict[str, list[int]]] = {}
    for r in range(batch["input_ids"].shape[0]):
        for column, d in enumerate(batch["document"][r].tolist()):
            if d >= 0:
                entry = found.setdefault((r, d), {"ids": [], "mask": []})
                entry["ids"].append(int(batch["input_ids"][r, column]))
                entry["mask"].append(bool(batch["loss_mask"][r, column]))
    return found


@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_the_parallel_step_equals_the_step_done_anchor_by_anchor(family: str, overrides: dict[str, Any]) -> None:
    target, drafter, batch, anchors = setup(family, overrides)
    prefix = read_prefix(target, drafter, batch, keep_cache=True)
    with torch.no_grad():
        step = transition(drafter, target, batch, prefix, anchors, compare=True)
        hidden = second_draft(drafter, target, batch, prefix, step)
    p, documents = drafter.config.num_proposals, documents_of(batch)
    hidden = drafter.proposing(hidden).view(*anchors.column.shape, p, -1)
    objective = Objective(0.1, 0.9, 4.0)
    total, seen_counts = 0.0, set()
    for r in range(anchors.column.shape[0]):
        for n in range(anchors.column.shape[1]):
            if not anchors.valid[r, n]:
                assert not step.next.valid[r, n]
                continue
            row, a = documents[r, int(anchors.document[r, n])], int(anchors.position[r, n])
            proposals = step.proposals[r, n].tolist()
            count = 0
            while count < p and a + 1 + count < len(row["ids"]) and proposals[count] == row["ids"][a + 1 + count]:
                count += 1
            assert int(step.accepted[r, n]) == count
            branch = target.forward(torch.tensor([row["ids"][: a + 1] + proposals]), layer_ids=drafter.config.layer_ids)
            states = branch.features[0, a + 1 :]
            packed_states = step.carry_features.view(*anchors.column.shape, p, -1)[r, n]
            assert torch.allclose(packed_states, states, atol=1e-5)
            greedy = target.head(branch.hidden[0, a:]).argmax(-1).tolist()
            agreed = 0
            while agreed < p and proposals[agreed] == greedy[agreed]:
                agreed += 1
            assert int(step.greedy[r, n]) == agreed

            shifted = a + count + 1
            keep = shifted + 1 < len(row["ids"]) and row["mask"][shifted] and row["mask"][shifted + 1]
            assert bool(step.next.valid[r, n]) == keep
            if not keep:
                continue
            seen_counts.add(count)
            assert int(step.next.position[r, n]) == shifted
            rejected, carry, hints = range(count + 1, p + 1), None, None
            if drafter.config.carry != "hint":
                carry = (states[count:], list(range(shifted, a + p + 1))) if count < p else None
            elif drafter.config.carry_hint == "rejected_tokens":
                hints = {a + j: proposals[j - 1] for j in rejected}
            else:
                hints = {a + j + 1: greedy[j] for j in rejected}
            with torch.no_grad():
                expected = alone(target, drafter, row, shifted, carry, hints)
            assert torch.allclose(hidden[r, n], expected, atol=1e-5)
            total += slow_loss(target, drafter, row, shifted, expected, objective)
    assert len(seen_counts) >= 3, "the fixture must cover several accepted counts"
    labels = labels_at(batch, step.next, p)
    index = labels.column.flatten(1)[..., None].expand(-1, -1, prefix.hidden.shape[-1])
    result = block_loss(
        hidden.flatten(0, 1), labels.previous.flatten(0, 1), labels.tokens.flatten(0, 1), labels.mask.flatten(0, 1),
        lambda h, y: drafter.logits(h, y, target.head), objective, target.head,
        prefix.hidden.gather(1, index).view(-1, p, prefix.hidden.shape[-1]),
    )  # fmt: skip
    assert float(result.loss.detach()) == pytest.approx(total, rel=1e-4)


def slow_loss(
    target: Target, drafter: Drafter, row: dict[str, list[int]], a: int, hidden: torch.Tensor, objective: Objective
) -> float:
    """CE on recorded tokens and L1 to the target's distribution, slot by slot, until the response ends."""
    ids, total = row["ids"], 0.0
    teacher = target.head(target.forward(torch.tensor([ids])).hidden[0])
    previous = torch.tensor([[ids[min(a + i, len(ids) - 1)] for i in range(hidden.shape[0])]])
    with torch.no_grad():
        logits = drafter.logits(hidden[None], previous, target.head)[0]
    for i in range(hidden.shape[0]):
        if a + 1 + i >= len(ids) or not row["mask"][a + 1 + i]:
            break
        q, p = logits[i].softmax(-1), teacher[a + i].softmax(-1)
        ce = -math.log(float(q[ids[a + 1 + i]]))
        total += math.exp(-i / objective.gamma) * (objective.ce * ce + objective.l1 * float((q - p).abs().sum()))
    return total


def loss_of(target: Target, drafter: Drafter, batch: Any, prefix: Any, step: Transition) -> torch.Tensor:
    labels = labels_at(batch, step.next, drafter.config.num_proposals)
    hidden = drafter.proposing(second_draft(drafter, target, batch, prefix, step))
    flat = [v.flatten(0, 1) for v in (labels.previous, labels.tokens, labels.mask)]
    return block_loss(hidden, *flat, lambda h, y: drafter.logits(h, y, target.head), Objective()).loss


@pytest.mark.parametrize("carry", ["embedding", "hint"])
def test_gradient_flows_through_the_second_draft_and_the_mark_only(carry: str) -> None:
    target, drafter, batch, anchors = setup("llama", {"carry": carry})
    prefix = read_prefix(target, drafter, batch, keep_cache=True)
    step = transition(drafter, target, batch, prefix, anchors)
    assert not step.proposals.requires_grad and not step.carry_features.requires_grad
    loss_of(target, drafter, batch, prefix, step).backward()
    gradients = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    assert all(g.abs().sum() > 0 for g in gradients.values()), "every drafter weight and the mark must learn"
    assert all(p.grad is None for p in target.model.parameters())

    drafter.zero_grad()
    frozen = Transition(*(v.clone() if isinstance(v, torch.Tensor) else v for v in step))
    loss_of(target, drafter, batch, prefix, frozen).backward()
    for name, p in drafter.named_parameters():  # stages 1 and 2 replaced by constants: the same gradient
        assert torch.allclose(p.grad, gradients[name], atol=1e-7)


@pytest.mark.parametrize("carry", ["embedding", "hint"])
def test_full_acceptance_carries_nothing_and_the_mark_gets_no_gradient_from_it(carry: str) -> None:
    target, drafter, batch, anchors = setup("llama", {"carry": carry})
    prefix = read_prefix(target, drafter, batch, keep_cache=True)
    step = transition(drafter, target, batch, prefix, anchors)
    full = step._replace(accepted=torch.full_like(step.accepted, drafter.config.num_proposals))
    loss = loss_of(target, drafter, batch, prefix, full)
    loss.backward()
    assert all(float(p.grad.abs().sum()) == 0 for p in drafter.carry.parameters())
    with torch.no_grad():
        without = draft(drafter, target, batch, prefix, step.next)
        assert torch.allclose(second_draft(drafter, target, batch, prefix, full), without, atol=1e-5)
        drop = torch.ones_like(anchors.valid)
        assert torch.allclose(second_draft(drafter, target, batch, prefix, step, drop), without, atol=1e-5)
        assert not torch.allclose(second_draft(drafter, target, batch, prefix, step), without, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_nothing_at_or_after_an_anchor_reaches_its_draft(family: str) -> None:
    target, drafter, batch, anchors = setup(family, {"carry": "embedding"})
    changed = {k: v.clone() for k, v in batch.items()}
    one = anchors.position[0][anchors.valid[0]].tolist()
    n = one.index(max(one))
    column = int(anchors.column[0, n])
    changed["input_ids"][0, column + 1 :] = torch.randint(6, 90, changed["input_ids"][0, column + 1 :].shape)
    p = drafter.config.num_proposals
    with torch.no_grad():
        prefixes = [read_prefix(target, drafter, b, keep_cache=False) for b in (batch, changed)]
        features = prefixes[1].features.clone()
        features[0, column:] = torch.randn_like(features[0, column:]) * 10  # the anchor's own state included
        prefixes[1] = prefixes[1]._replace(features=features)
        a, b = (
            drafter.proposing(draft(drafter, target, x, prefix, anchors)).view(*anchors.column.shape, p, -1)[0, n]
            for x, prefix in zip((batch, changed), prefixes, strict=True)
        )
    assert torch.equal(a, b)


def test_the_guarded_rule_keeps_the_anchors_on_which_both_rules_agree() -> None:
    target, drafter, batch, anchors = setup("llama", {"carry": "embedding"})
    prefix = read_prefix(target, drafter, batch, keep_cache=True)
    v1 = transition(drafter, target, batch, prefix, anchors, "recorded", compare=True)
    v2 = transition(drafter, target, batch, prefix, anchors, "target_guarded")
    assert torch.equal(v2.next.valid, v1.next.valid & (v1.greedy == v1.accepted))
    for step in (v1, v2):  # the leak of SPEC 6.3: the first carried token is never the committed one
        for r, n in step.next.valid.nonzero().tolist():
            count = int(step.accepted[r, n])
            if count < drafter.config.num_proposals:
                assert step.proposals[r, n, count] != batch["input_ids"][r, step.next.column[r, n]]


def test_the_prefix_cache_is_untouched_by_verification() -> None:
    target, drafter, batch, anchors = setup("gemma3_text", {"carry": "embedding"})
    prefix = read_prefix(target, drafter, batch, keep_cache=True)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in prefix.cache.layers]
    transition(drafter, target, batch, prefix, anchors)
    for layer, (keys, values) in zip(prefix.cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


@pytest.mark.parametrize(("family", "overrides"), [CASES[0], CASES[4], CASES[5]])
def test_anchors_in_one_sequence_and_anchors_apart_are_the_same_draft(family: str, overrides: dict[str, Any]) -> None:
    target, drafter, batch, anchors = setup(family, overrides)
    prefix = read_prefix(target, drafter, batch, keep_cache=True)
    step = transition(drafter, target, batch, prefix, anchors)
    with torch.no_grad():
        for carried in (None, Carried(anchors, step.accepted, step.carry_features, step.hints)):
            together, apart = (draft(drafter, target, batch, prefix, step.next, carried, t) for t in (True, False))
            valid = step.next.valid.flatten()
            assert torch.allclose(together[valid], apart[valid], atol=1e-5)


@pytest.mark.parametrize("carry", ["embedding", "hint"])
def test_an_unrolled_first_draft_reads_what_the_round_before_rejected(carry: str) -> None:
    target, drafter, batch, anchors = setup("llama", {"carry": carry, "slots": "next_token", "markov_rank": 4})
    prefix = read_prefix(target, drafter, batch, keep_cache=True)
    with torch.no_grad():
        first = transition(drafter, target, batch, prefix, anchors)
        drafter.__class__ = Drafter
        second = transition(drafter, target, batch, prefix, first.next, before=first)
        alone = transition(drafter, target, batch, prefix, first.next)
        states = second_draft(drafter, target, batch, prefix, first)
        tokens = batch["input_ids"].gather(1, first.next.column).flatten()
        proposals = drafter.propose(states, tokens, target.head, lambda logits: logits.argmax(-1)).tokens
    valid = first.next.valid
    assert torch.equal(second.proposals[valid], proposals.view_as(second.proposals)[valid])
    assert not torch.equal(second.proposals[valid], alone.proposals[valid])
    documents = documents_of(batch)
    for r, n in valid.nonzero().tolist():
        document = documents[r, int(first.next.document[r, n])]
        a, count = int(first.next.position[r, n]), 0
        rest = document["ids"][a + 1 :]
        while count < min(len(rest), drafter.config.num_proposals) and rest[count] == second.proposals[r, n, count]:
            count += 1
        assert int(second.accepted[r, n]) == count
        assert bool(second.next.valid[r, n]) == (a + count + 2 < len(document["ids"]))


def test_sampled_proposals_follow_the_drafters_distribution() -> None:
    drafter = tiny_drafter(tiny_target("llama"))
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    drawn = sampled(drafter, 2.0, seed=5)(logits.expand(20_000, -1))
    observed = torch.bincount(drawn, minlength=4).double()
    expected = (logits / 2).softmax(-1).double() * 20_000
    assert float(((observed - expected) ** 2 / expected).sum()) < 16.3  # the 0.1 % point of chi-square with 3 degrees
    assert torch.equal(drawn, sampled(drafter, 2.0, seed=5)(logits.expand(20_000, -1)))
    assert not torch.equal(drawn, sampled(drafter, 2.0, seed=6)(logits.expand(20_000, -1)))
