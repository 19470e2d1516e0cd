"""Which decoder layers of the target are captured, and the two numberings that the field uses for them.

Here (and in z-lab and DeepSpec files) id `i` is the OUTPUT of decoder layer `i`, that is Hugging Face's
`hidden_states[i + 1]`; id -1 is the embedding output. speculators and vLLM write `j` for `hidden_states[j]`, one more.
The last layer is refused: HF returns it with the final norm applied, hooks and vLLM return it raw (SPEC 1.2).

Letters: `L` decoder layers of the target, `M` captured layers.
"""

from __future__ import annotations

from collections.abc import Iterable

from .errors import InputError


class LayerIds(tuple[int, ...]):
    """Strictly increasing ids in the z-lab convention, at least one of them."""

    def __new__(cls, ids: Iterable[int]) -> LayerIds:
        ids = tuple(ids)
        if not ids or any(not isinstance(i, int) or isinstance(i, bool) for i in ids):
            raise InputError(f"target_layer_ids must be a non-empty list of whole numbers, got {list(ids)}.")
        if list(ids) != sorted(set(ids)) or ids[0] < -1:
            raise InputError(f"target_layer_ids must be strictly increasing and at least -1, got {list(ids)}.")
        return super().__new__(cls, ids)

    @classmethod
    def evenly_spaced(cls, num_target_layers: int, count: int) -> LayerIds:
        """`count` ids from 1 to L-3, the choice of the public DFlash checkpoints (SPEC 1.2).

        `evenly_spaced(36, 5)` is `[1, 9, 17, 25, 33]`. Raises InputError when the target has too few layers for that.
        """
        if count < 1:
            raise InputError(f"at least one target layer must be captured, got {count}.")
        if count == 1:
            return cls([num_target_layers // 2]).checked(num_target_layers)
        first, last = 1, num_target_layers - 3
        if last - first < count - 1:
            raise InputError(
                f"a target with {num_target_layers} layers has no {count} evenly spaced layers between 1 and its third "
                f"last; name target_layer_ids explicitly (each from 0 to {num_target_layers - 2})."
            )
        return cls(round(first + k * (last - first) / (count - 1)) for k in range(count))

    @classmethod
    def from_hidden_states(cls, ids: Iterable[int]) -> LayerIds:
        """From the speculators/vLLM numbering, where `j` means `hidden_states[j]`."""
        return cls(j - 1 for j in ids)

    def to_hidden_states(self) -> list[int]:
        """To the speculators/vLLM numbering: indices into HF's `output_hidden_states`."""
        return [i + 1 for i in self]

    def checked(self, num_target_layers: int) -> LayerIds:
        """Returns itself if every id names a capturable layer of a target with `num_target_layers` layers."""
        if self[-1] > num_target_layers - 2:
            raise InputError(
                f"target layer id {self[-1]} is out of range: the target has {num_target_layers} layers and the last "
                "cannot be captured (its state is ambiguous about the final norm); "
                f"use ids from 0 to {num_target_layers - 2}."
            )
        return self
