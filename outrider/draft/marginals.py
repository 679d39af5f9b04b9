"""Marginals: a source whose distribution at each depth is known at once, whatever is drafted at the other depths.

A grower that knows the hint (`marginals`) asks once for a whole tree; any other asks level by level and is answered
from what was made at the start. What is drawn at one depth is independent of the others, and each draw's row says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from outrider.core.numeric.likeliest import NO_ROW
from outrider.core.tree import QRow, TokenTree


class Marginals:
    """`marginals` is the drafter's part; the rest follows. The last start of a slot is kept until its next."""

    @cached_property
    def _made(self) -> dict[int, list[QRow]]:
        """Of each slot, as of its last start."""
        return {}

    def marginals(self, slots: Sequence[int]) -> list[list[QRow]]:
        """Of each slot the distributions of the next tokens, one a depth; none where there is nothing to go on from."""
        raise NotImplementedError

    def start(self, slots: Sequence[int]) -> list[QRow]:
        found = self.marginals(slots)
        self._made.update(zip(slots, found, strict=True))
        return [rows[0] if rows else NO_ROW for rows in found]

    def extend(self, slots: Sequence[int], trees: Sequence[TokenTree], done: Sequence[int]) -> list[list[QRow]]:
        return [
            [self._at(slot, int(depth)) for depth in tree.depths[first:]]
            for slot, tree, first in zip(slots, trees, done, strict=True)
        ]

    def _at(self, slot: int, depth: int) -> QRow:
        rows = self._made[slot]
        return rows[depth] if depth < len(rows) else NO_ROW
