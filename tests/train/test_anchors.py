"""Anchors and labels against loops over the definition."""

from __future__ import annotations

import torch
from carryover.train.anchors import Anchors, can_anchor, labels_at, sample_anchors
from helpers import packed, random_documents, stack


def batch() -> dict[str, torch.Tensor]:
    two = packed(random_documents(1, [(3, 9), (4, 2), (2, 12)], 50), 40)
    one = packed(random_documents(2, [(5, 30)], 50), 40)
    two["loss_mask"][0, 6] = False  # an unsupervised token inside a response (a second user turn)
    return stack(two, one)


def allowed(b: dict[str, torch.Tensor], row: int, column: int, ahead: int) -> bool:
    """The definition: the anchor and the next `ahead` tokens are supervised tokens of one document."""
    width = b["input_ids"].shape[1]
    for k in range(ahead + 1):
        if column + k >= width or not b["loss_mask"][row, column + k]:
            return False
        if b["document"][row, column + k] != b["document"][row, column] or b["document"][row, column] < 0:
            return False
    return True


def test_every_anchor_is_allowed_and_all_allowed_ones_are_found() -> None:
    b = batch()
    for ahead in (1, 2):
        found = sample_anchors(b, 1000, ahead, torch.Generator().manual_seed(0))
        for row in range(2):
            expected = [c for c in range(40) if allowed(b, row, c, ahead)]
            assert found.index[row][found.valid[row]].tolist() == expected
    assert can_anchor(b)[1].nonzero()[:, 0].tolist() == [c for c in range(40) if allowed(b, 1, c, 1)]


def test_anchors_are_counted_per_document_not_per_row() -> None:
    b = batch()
    found = sample_anchors(b, 3, 1, torch.Generator().manual_seed(0))
    per_document = [int((found.document[0][found.valid[0]] == d).sum()) for d in range(3)]
    assert per_document == [3, 1, 3]  # the short response has one allowed anchor and keeps it
    assert len(set(found.index[1][found.valid[1]].tolist())) == 3
    assert (found.position == b["positions"].gather(1, found.index)).all()


def test_the_same_seed_draws_the_same_anchors_and_another_seed_does_not() -> None:
    b = batch()
    draw = lambda seed: sample_anchors(b, 3, 1, torch.Generator().manual_seed(seed)).index  # noqa: E731
    assert torch.equal(draw(7), draw(7))
    assert any(not torch.equal(draw(7), draw(seed)) for seed in range(8, 12))


def test_labels_follow_the_recorded_response_and_stop_at_the_first_unsupervised_token() -> None:
    b = batch()
    anchors = sample_anchors(b, 1000, 1, torch.Generator().manual_seed(0))
    labels = labels_at(b, anchors, 5)
    for row in range(2):
        for n, column in enumerate(anchors.index[row].tolist()):
            open_ = bool(anchors.valid[row, n])
            for i in range(5):
                open_ = open_ and allowed(b, row, column, i + 1)
                assert bool(labels.mask[row, n, i]) == open_
                if open_:
                    assert labels.tokens[row, n, i] == b["input_ids"][row, column + i + 1]
                    assert labels.previous[row, n, i] == b["input_ids"][row, column + i]
                    assert labels.index[row, n, i] == column + i


def test_a_batch_without_any_response_yields_only_padding() -> None:
    b = packed([[(7, False)] * 6], 8)
    anchors = sample_anchors(b, 4, 1, torch.Generator().manual_seed(0))
    assert not anchors.valid.any()
    assert not labels_at(b, anchors, 3).mask.any()
    assert isinstance(anchors, Anchors)
