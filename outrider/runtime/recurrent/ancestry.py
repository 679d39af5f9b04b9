"""Ancestry: who comes before whom among the rows in flight of several slots, in the forms that recurrences ask for.

Rows are in topological order: a row's ancestors stand before it, the nearest last. Everything is found from the masks
alone, once a pass, and shared by all layers. A stretch of text is a tree that does not branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Level = tuple[Tensor, Tensor, Tensor]  # of rows at one depth: in which slot, where, and where their parents are


class Ancestry:
    def __init__(self, sees: NDArray[np.bool_], device: torch.device) -> None:
        """`sees` is [B, n, n]: row t of a slot and its ancestors are true in line t."""
        self.sees_on_host, self.device = sees, device
        self.batch, self.rows = sees.shape[:2]
        self._taps: dict[int, Tensor] = {}

    @cached_property
    def sees(self) -> Tensor:
        """[B, n, n], bool."""
        return torch.from_numpy(self.sees_on_host.copy()).to(self.device)

    def sums(self, values: Tensor) -> Tensor:
        """Of the values [B, n, ...] of each row and its ancestors."""
        return (self.sees.to(values.dtype) @ values.flatten(2)).view(values.shape)

    def between(self, sums: Tensor) -> Tensor:
        """[B, n, n, ...]: what is left at row t of what row s wrote, from sums of log-decays; 0 if s is no ancestor.

        Masked before the exponential, which would overflow for rows that do not see each other.
        """
        differences = sums[:, :, None] - sums[:, None]
        blind = ~self.sees[(..., *[None] * (sums.dim() - 2))]
        return differences.masked_fill(blind, -torch.inf).exp()

    def taps(self, width: int) -> Tensor:
        """[B, n, width]: places of a row and its nearest ancestors, itself last, behind `width - 1` of a state."""
        if width not in self._taps:
            seen = self.sees_on_host
            count = seen.sum(-1)  # [B, n], the row itself included
            order = seen.cumsum(-1)
            taps = np.empty((*count.shape, width), dtype=np.int64)
            for back in range(width):
                nth = (order == (count - back)[..., None]) & seen
                place = np.where(count > back, width - 1 + nth.argmax(-1), width - 2 - back + count)
                taps[..., width - 1 - back] = place
            self._taps[width] = torch.from_numpy(taps).to(self.device)
        return self._taps[width]

    @cached_property
    def parents(self) -> NDArray[np.int64]:
        """[B, n]: the nearest ancestor of each row, -1 where there is none."""
        before = self.sees_on_host & ~np.eye(self.rows, dtype=bool)
        nearest = self.rows - 1 - before[..., ::-1].argmax(-1)
        return np.where(before.any(-1), nearest, -1)

    @cached_property
    def levels(self) -> Sequence[Level]:
        depths = self.sees_on_host.sum(-1) - 1
        found = []
        for depth in range(int(depths.max()) + 1):
            slots, rows = np.nonzero(depths == depth)
            index = np.array([slots, rows, self.parents[slots, rows]])
            slot, row, parent = torch.from_numpy(index).to(self.device)
            found.append((slot, row, parent))
        return found


@lru_cache(maxsize=64)
def chain(batch: int, rows: int, device: torch.device) -> Ancestry:
    """Of a stretch of text in each of so many slots."""
    return Ancestry(np.broadcast_to(np.tri(rows, dtype=bool), (batch, rows, rows)), device)
