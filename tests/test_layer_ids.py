"""Captured layers: the published choice, the two numberings, and every refusal."""

from __future__ import annotations

from typing import Any

import pytest

from carryover.errors import InputError
from carryover.layer_ids import LayerIds


@pytest.mark.parametrize(
    ("layers", "count", "expected"),
    [
        (36, 5, [1, 9, 17, 25, 33]),  # the public DFlash checkpoints for Qwen3-4B and Qwen3-8B
        (36, 3, [1, 17, 33]),
        (36, 1, [18]),
        (30, 5, [1, 8, 14, 20, 27]),  # 7.5 and 20.5: halves go to the even number, as Python rounds
        (6, 3, [1, 2, 3]),
        (3, 1, [1]),
    ],
)
def test_evenly_spaced(layers: int, count: int, expected: list[int]):
    assert list(LayerIds.evenly_spaced(layers, count)) == expected


@pytest.mark.parametrize(("layers", "count"), [(6, 4), (4, 2), (1, 1), (36, 0), (36, 35)])
def test_evenly_spaced_refuses_what_does_not_fit(layers: int, count: int):
    with pytest.raises(InputError):
        LayerIds.evenly_spaced(layers, count)


@pytest.mark.parametrize("layers", range(3, 80))
def test_evenly_spaced_ids_are_capturable_wherever_they_exist(layers: int):
    for count in range(1, max(layers - 3, 1) + 1):
        assert len(LayerIds.evenly_spaced(layers, count).checked(layers)) == count


def test_hidden_states_numbering_is_one_more():
    ids = LayerIds([1, 9, 17, 25, 33])
    assert ids.to_hidden_states() == [2, 10, 18, 26, 34]
    assert LayerIds.from_hidden_states([2, 10, 18, 26, 34]) == ids


@pytest.mark.parametrize("ids", [[-1], [-1, 0, 5], [0], [3, 4, 5]])
def test_numberings_round_trip(ids: list[int]):
    assert LayerIds.from_hidden_states(LayerIds(ids).to_hidden_states()) == LayerIds(ids)
    assert LayerIds(ids).to_hidden_states()[0] >= 0  # -1, the embedding output, is hidden_states[0]


@pytest.mark.parametrize("ids", [[], [3, 1], [1, 1], [-2], [1.0], ["1"], [True], [None]])
def test_malformed_ids_are_refused(ids: list[Any]):
    with pytest.raises(InputError, match="target_layer_ids"):
        LayerIds(ids)


def test_the_last_layer_is_refused():
    assert LayerIds([1, 34]).checked(36) == (1, 34)
    for ids in ([1, 35], [1, 99]):
        with pytest.raises(InputError, match=r"out of range.*0 to 34"):
            LayerIds(ids).checked(36)
