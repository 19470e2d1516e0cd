"""The loss against loops over slots, and its gradient against the set of supervised slots."""

from __future__ import annotations

import math

import pytest
import torch

import carryover.train.losses as losses
from carryover.train.losses import Objective, block_loss, decay_weights, dpace_weights

T, P, D, V = 5, 4, 8, 11


def problem(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    mask = torch.ones(T, P, dtype=torch.bool)
    mask[1, 2:], mask[2] = False, False
    return {
        "hidden": torch.randn(T, P, D, generator=g).requires_grad_(),
        "previous": torch.randint(V, (T, P), generator=g),
        "labels": torch.randint(V, (T, P), generator=g),
        "mask": mask,
        "head": torch.randn(V, D, generator=g),
        "bias": torch.randn(V, V, generator=g),
        "teacher": torch.randn(T, P, D, generator=g),
    }


def run(x: dict[str, torch.Tensor], objective: Objective) -> losses.BlockLoss:
    return block_loss(
        x["hidden"], x["previous"], x["labels"], x["mask"],
        lambda h, y: h @ x["head"].T + x["bias"][y], objective, lambda h: h @ x["head"].T, x["teacher"],
        None, lambda h: h @ x["head"].T,
    )  # fmt: skip


def slow(x: dict[str, torch.Tensor], objective: Objective) -> tuple[float, int]:
    """Sum over blocks and slots from the formula in SPEC 2.3 and 3.2; and the tokens of right prefixes."""
    total, matched = 0.0, 0
    for t in range(T):
        slots = [i for i in range(P) if x["mask"][t, i]]
        ce, l1, kl, right = {}, {}, {}, {}
        for i in slots:
            logits = x["head"] @ x["hidden"][t, i].detach() + x["bias"][x["previous"][t, i]]
            q = torch.softmax(logits, 0)
            p = torch.softmax(x["head"] @ x["teacher"][t, i], 0)
            ce[i] = -math.log(q[x["labels"][t, i]])
            l1[i] = sum(abs(float(a - b)) for a, b in zip(q, p, strict=True))
            kl[i] = sum(float(b) * (math.log(b) - math.log(a)) for a, b in zip(q, p, strict=True))
            right[i] = int(q.argmax()) == int(x["labels"][t, i])
        for i in slots:
            if objective.weighting == "decay":
                weight = math.exp(-i / objective.gamma)
            else:
                a, weight, reach = objective.dpace_alpha, 0.0, 1.0
                for m in slots:
                    reach *= (1 - a) * math.exp(-ce[m]) + a
                    weight += reach if m >= i else 0.0
            total += weight * (objective.ce * ce[i] + objective.l1 * l1[i] + objective.kl * kl[i])
        for i in slots:
            if not right[i]:
                break
            matched += 1
    return total, matched


@pytest.mark.parametrize(
    "objective",
    [Objective(), Objective(0.1, 0.9, 4.0), Objective(0.5, 0.5, weighting="dpace"), Objective(0.3, 0.2, kl=0.5)],
)
def test_nothing_is_learnt_from_a_label_that_cannot_be_proposed_on(objective: Objective) -> None:
    """As if the supervision ended there. The target's share of what cannot be proposed counts as L1 distance, and is
    left out of the divergence."""
    x, kept = problem(), torch.tensor([0, 2, 3, 5, 6, 7, 8, 9])
    index = torch.searchsorted(kept, x["labels"]).clamp(max=len(kept) - 1)
    index = torch.where(kept[index] == x["labels"], index, -1)
    assert bool((index[x["mask"]] == -1).any()) and bool((index[x["mask"]] >= 0).any())
    head = x["head"]
    result = block_loss(
        x["hidden"], x["previous"], index, x["mask"], lambda h, y: (h @ head.T + x["bias"][y])[..., kept], objective,
        lambda h: h @ head.T, x["teacher"], kept, lambda h: h @ head[kept].T,
    )  # fmt: skip
    cut = x["mask"] & (index >= 0).cumprod(-1).bool()
    expected = 0.0
    for t in range(T):
        slots = [i for i in range(P) if cut[t, i]]
        ce = {}
        for i in slots:
            q = torch.softmax((head @ x["hidden"][t, i].detach() + x["bias"][x["previous"][t, i]])[kept], 0)
            p = torch.softmax(head @ x["teacher"][t, i], 0)
            whole = torch.zeros(V).index_copy(0, kept, q)
            among = p[kept] / p[kept].sum()
            kl = sum(float(a) * (math.log(a) - math.log(b)) for a, b in zip(among, q, strict=True))
            ce[i] = (-math.log(q[index[t, i]]), float((whole - p).abs().sum()), kl)
        for i in slots:
            weight = math.exp(-i / objective.gamma)
            if objective.weighting == "dpace":
                a, weight, reach = objective.dpace_alpha, 0.0, 1.0
                for m in slots:
                    reach *= (1 - a) * math.exp(-ce[m][0]) + a
                    weight += reach if m >= i else 0.0
            expected += weight * (objective.ce * ce[i][0] + objective.l1 * ce[i][1] + objective.kl * ce[i][2])
    assert float(result.loss) == pytest.approx(expected, rel=1e-5)
    assert int(result.slots) == int(cut.sum()) == int(losses.learnt(index, x["mask"]).sum())
    assert result.seen.tolist() == x["mask"].sum(0).tolist()  # acceptance is measured on all of them
    result.loss.backward()
    assert torch.equal(x["hidden"].grad.abs().sum(-1) > 0, cut)


@pytest.mark.parametrize(
    "objective",
    [
        Objective(),
        Objective(0.1, 0.9, 4.0),
        Objective(weighting="dpace"),
        Objective(0.1, 0.9, weighting="dpace", dpace_alpha=0.3),
        Objective(0.0, 0.0, 4.0, kl=1.0),
        Objective(0.1, 0.5, weighting="dpace", kl=0.4),
    ],
)
@pytest.mark.parametrize("chunk", [1 << 26, P * V])
def test_loss_equals_a_loop_over_slots(objective: Objective, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "MAX_CHUNK", chunk)
    x = problem()
    x["labels"][0, :2] = (x["hidden"][0] @ x["head"].T + x["bias"][x["previous"][0]]).argmax(-1)[:2]
    result = run(x, objective)
    expected, matched = slow(x, objective)
    assert float(result.loss) == pytest.approx(expected, rel=1e-5)
    assert int(result.matched) == matched >= 2
    assert int(result.slots) == int(x["mask"].sum())
    assert int(result.blocks) == T - 1
    assert result.seen.tolist() == x["mask"].sum(0).tolist()


def test_gradient_reaches_exactly_the_supervised_slots_and_chunking_does_not_change_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gradients = []
    for chunk in (1 << 26, P * V):
        monkeypatch.setattr(losses, "MAX_CHUNK", chunk)
        x = problem()
        run(x, Objective(0.1, 0.9)).loss.backward()
        assert torch.equal(x["hidden"].grad.abs().sum(-1) > 0, x["mask"])
        gradients.append(x["hidden"].grad)
    assert torch.allclose(*gradients, atol=1e-6)


def test_l1_is_the_plain_norm_of_disjoint_distributions() -> None:
    x = problem()
    x["bias"] = torch.zeros(V, V)
    x["head"] = torch.eye(V, D) * 100
    x["hidden"] = torch.eye(D)[torch.zeros(T, P, dtype=torch.long)].requires_grad_()
    x["teacher"] = torch.eye(D)[torch.ones(T, P, dtype=torch.long)]
    result = run(x, Objective(0.0, 1.0))
    assert float(result.l1 / result.slots) == pytest.approx(2.0, abs=1e-5)


def test_divergence_and_its_gradient_vanish_where_the_drafter_is_the_target() -> None:
    x = problem()
    x["bias"] = torch.zeros(V, V)
    x["hidden"] = x["teacher"].clone().requires_grad_()
    result = run(x, Objective(0.0, 0.0, kl=1.0))
    result.loss.backward()
    assert float(result.kl) == pytest.approx(0.0, abs=1e-5)
    assert float(x["hidden"].grad.abs().max()) < 1e-6


def test_dpace_weights_of_a_certain_block_count_the_slots_that_follow() -> None:
    mask = torch.tensor([[True, True, True, False]])
    assert torch.allclose(dpace_weights(torch.zeros(1, 4), mask, 0.5), torch.tensor([[3.0, 2.0, 1.0, 0.0]]))


def test_normaliser_is_the_weight_of_supervised_slots() -> None:
    mask = torch.tensor([[True, True, False]])
    assert float(Objective(gamma=2.0).normaliser(mask)) == pytest.approx(1 + math.exp(-0.5))
    assert float(Objective(weighting="dpace").normaliser(mask)) == 2
    assert decay_weights(3, 2.0).tolist() == pytest.approx([1, math.exp(-0.5), math.exp(-1)])


def test_a_batch_without_supervision_gives_zero_and_no_nan() -> None:
    x = problem()
    x["mask"] = torch.zeros(T, P, dtype=torch.bool)
    result = run(x, Objective())
    result.loss.backward()
    assert float(result.loss) == 0 and float(x["hidden"].grad.abs().sum()) == 0
