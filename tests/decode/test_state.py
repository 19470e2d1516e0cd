"""Rows of a slot: where they are written, what is read, and which of them a draft sees."""

from __future__ import annotations

import torch
from decode_helpers import make_drafter

from carryover.decode.state import DraftCache
from carryover.rows import BLOCK, CARRY, CONTEXT, NOTHING, draft_rows
from carryover.slots import SlotCache


def random_rows(requests, count, layers=2):
    return [(torch.randn(requests, 2, count, 8), torch.randn(requests, 2, count, 8)) for _ in range(layers)]


def test_draft_rows_are_written_in_place_each_request_at_its_own(target):
    cache = DraftCache(make_drafter(target).config, 3, 20, torch.float32, torch.device("cpu"))
    pointers = [(k.data_ptr(), v.data_ptr()) for k, v in cache.layers]
    expected = torch.zeros(2, 2, 3, 2, 20, 8)  # layer, keys or values, slot, head, row, value
    for first, starts, rows in (
        (0, [0], random_rows(1, 6)),
        (1, [2, 5], random_rows(2, 4)),
        (1, [3, 3], random_rows(2, 2)),
    ):
        cache.write(rows, first, starts)
        for layer, pair in enumerate(rows):
            for which, new in enumerate(pair):
                for i, start in enumerate(starts):
                    expected[layer, which, first + i, :, start : start + new.shape[2]] = new[i]
    for starts, length in (([9, 4, 7], 12), ([5, 5, 5], 8)):
        assert cache.aim(starts, 3) == length
        for layer, pair in enumerate(random_rows(3, 3)):
            stored = cache.extend(layer, *pair)
            for which, new in enumerate(pair):
                for slot, start in enumerate(starts):
                    expected[layer, which, slot, :, start : start + 3] = new[slot]
                assert torch.equal(stored[which], expected[layer, which, :, :, :length])
    cache.move(2, 0, 7)
    expected[:, :, 0, :, :7] = expected[:, :, 2, :, :7]
    assert all(torch.equal(cache.layers[i][j], expected[i, j]) for i in range(2) for j in range(2))
    assert [(k.data_ptr(), v.data_ptr()) for k, v in cache.layers] == pointers


def test_target_slots_grow_layers_of_their_own_shape():
    cache, cpu = SlotCache(2, 10), torch.device("cpu")
    one, other = torch.randn(1, 2, 3, 4), torch.randn(1, 1, 3, 6)
    assert cache.aim(1, [2], 3, cpu) == 5
    keys, values = cache.update(one, 2 * one, 0)
    assert keys.shape == (1, 2, 5, 4) and torch.equal(keys[:, :, 2:], one) and torch.equal(values[:, :, 2:], 2 * one)
    assert cache.update(other, other, 3)[0].shape == (1, 1, 5, 6)
    assert not cache.buffers[0][0][0].any() and cache.get_seq_length() == 2 and cache.get_mask_sizes(3, 0) == (5, 0)
    cache.move(1, 0, 4)
    assert torch.equal(cache.buffers[0][0][0, :, 2:4], one[0, :, :2]) and not cache.buffers[0][0][0, :, 4:].any()


def test_rows_of_a_draft():
    """One request after a rejection, one after full acceptance, one that has just read its prompt; P = 3, B = 2."""
    base, anchor = torch.tensor([2, 1, 4]), torch.tensor([4, 5, 4])
    rows = draft_rows(9, base, anchor, torch.tensor([2, 0, 0]), 2)
    c, r, b, n = CONTEXT, CARRY, BLOCK, NOTHING
    assert rows.kind.tolist() == [
        [c, c, c, c, r, r, b, b, n],
        [c, c, c, c, c, b, b, n, n],
        [c, c, c, c, b, b, n, n, n],
    ]
    assert rows.position[0].tolist()[:8] == [0, 1, 2, 3, 4, 5, 4, 5]
    assert rows.position[1].tolist()[:7] == [0, 1, 2, 3, 4, 5, 6] and rows.position[2].tolist()[:6] == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]
    assert rows.offset[0].tolist()[4:8] == [2, 3, 0, 1]  # proposals 2 and 3; slots 0 and 1
    assert rows.branch[0].tolist()[:8] == [-1] * 4 + [0] * 4 and rows.anchor.tolist() == [[4] * 9, [5] * 9, [4] * 9]
