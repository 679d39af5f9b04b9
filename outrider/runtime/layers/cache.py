"""FeatureCache: keys and values of a drafter's layers, one row a position, for all slots in one tensor.

The heads of several layers stand one behind another. Rows of candidates stand behind the committed ones and are simply
written over later: going back costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EVERY = slice(None)


class FeatureCache:
    def __init__(self, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._keys = torch.zeros(0, heads, 0, dim, dtype=dtype, device=device)  # [slots, heads, rows, dim]
        self._values = torch.zeros_like(self._keys)

    @property
    def whole(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all slots, [slots, heads, rows, dim]; others once room was made."""
        return self._keys, self._values

    def reserve(self, slots: int, rows: int) -> None:
        """Changes state: make room for so many slots and rows, by doubling."""
        have_slots, _, have_rows, _ = self._keys.shape
        if slots <= have_slots and rows <= have_rows:
            return
        new_slots = have_slots if slots <= have_slots else max(slots, 2 * have_slots)
        new_rows = have_rows if rows <= have_rows else max(rows, 2 * have_rows, 256)
        self._keys, self._values = (_grown(old, new_slots, new_rows) for old in (self._keys, self._values))

    def write(
        self, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int], keys: Tensor, values: Tensor,
        heads: slice = EVERY,
    ) -> None:  # fmt: skip
        """Changes state: the first counts[i] rows of batch entry i go to rows starts[i].. of slots[i], these heads."""
        for i, (slot, start, count) in enumerate(zip(slots, starts, counts, strict=True)):
            self._keys[slot, heads, start : start + count] = keys[i, :, :count]
            self._values[slot, heads, start : start + count] = values[i, :, :count]

    def read(self, slots: Sequence[int], rows: int, heads: slice = EVERY) -> tuple[Tensor, Tensor]:
        """The first rows of these slots, [batch, heads, rows, dim]; a view where the slots follow each other."""
        first, every = slots[0], (self._keys[:, heads, :rows], self._values[:, heads, :rows])
        if list(slots) == list(range(first, first + len(slots))):
            keys, values = (part[first : first + len(slots)] for part in every)
            return keys, values
        index = torch.tensor(slots, device=self._keys.device)
        keys, values = (part.index_select(0, index) for part in every)
        return keys, values


def _grown(old: Tensor, slots: int, rows: int) -> Tensor:
    new = old.new_zeros(slots, old.shape[1], rows, old.shape[3])
    new[: old.shape[0], :, : old.shape[2]] = old
    return new
