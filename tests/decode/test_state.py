"""The draft cache is one buffer in the order committed | carry | block; the carry state knows its rows."""

from __future__ import annotations

import torch
from decode_helpers import make_drafter

from carryover.decode.state import CarryState, DraftCache
from carryover.rows import CARRY


def random_rows(count, layers=2):
    return [(torch.randn(1, 2, count, 8), torch.randn(1, 2, count, 8)) for _ in range(layers)]


def check(stored, *parts):
    """stored keys and values are the parts' keys and values in this order."""
    for rows, *expected in zip(stored, *parts, strict=True):
        assert torch.equal(rows, torch.cat(expected, dim=2))


def test_rows_are_laid_out_in_order_and_only_committed_ones_survive(target):
    cache = DraftCache(make_drafter(target).config, 20, torch.float32, torch.device("cpu"))
    first, carry, block, second, later = random_rows(5), random_rows(3), random_rows(4), random_rows(2), random_rows(4)
    buffers = [(k.data_ptr(), v.data_ptr()) for k, v in (cache.extend(layer, *block[layer]) for layer in range(2))]

    cache.commit(first, 5)
    cache.put_carry(carry)
    for layer in range(2):
        check(cache.extend(layer, *block[layer]), first[layer], carry[layer], block[layer])

    cache.put_carry(None)
    check(cache.extend(1, *block[1]), first[1], block[1])

    cache.put_carry(carry)
    cache.commit(second, 1)  # only its first row
    for layer in range(2):
        survivor = [rows[:, :, :1] for rows in second[layer]]
        check(cache.extend(layer, *later[layer]), first[layer], survivor, later[layer])
    views = [cache.extend(layer, *later[layer]) for layer in range(2)]
    assert [(k.data_ptr(), v.data_ptr()) for k, v in views] == buffers  # nothing was ever copied or moved


def test_carry_state():
    carry = CarryState(torch.zeros(1, 3, 6), anchor=10, accepted=2, proposals=5)
    assert carry.count == 3
    assert carry.positions.tolist() == [[13, 14, 15]]
    rows = carry.rows()
    assert rows.position.tolist() == [[13, 14, 15]] and rows.offset.tolist() == [[3, 4, 5]]
    assert rows.kind.tolist() == [[CARRY] * 3] and rows.branch.tolist() == [[0] * 3]
