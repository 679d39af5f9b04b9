"""DeferredCache: the eager runtime's cache, where accepted rows are moved by the next step of their slot.

A step that moves rows before it does anything else costs no launch more than one that does not, so a commit only notes
what is to be moved. Whatever else looks at a slot, or changes it, has that done first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.runtime.cache import moves
from outrider.runtime.eager.cache import SlotCache


class DeferredCache:
    def __init__(self, rows: SlotCache) -> None:
        self.rows = rows
        self.waiting: dict[int, list[tuple[int, int]]] = {}  # slot -> rows to move, from and to

    @property
    def bytes(self) -> int:
        return self.rows.bytes

    def keep(self, slots: Sequence[int], lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Nothing runs now: the next step of these slots moves the rows."""
        self.settle([slot for slot in slots if slot in self.waiting])  # two commits without a step between them
        for slot, source, target in moves(slots, lengths, paths):
            self.waiting.setdefault(slot, []).append((source, target))

    def take(self, slot: int) -> list[tuple[int, int]]:
        """Changes state: what waits for a slot, which the caller moves."""
        return self.waiting.pop(slot, [])

    @torch.inference_mode()
    def settle(self, slots: Sequence[int]) -> None:
        """Changes state: do what waits for these slots."""
        wanted = [(slot, *move) for slot in slots for move in self.waiting.pop(slot, ())]
        if wanted:
            self.rows.move(*zip(*wanted, strict=True))

    def copy(self, source: int, target: int, length: int) -> None:
        self.settle([source])
        self.rows.copy(source, target, length)

    def rows_at(self, slot: int, begin: int, end: int) -> list[Tensor]:
        self.settle([slot])
        return self.rows.rows_at(slot, begin, end)

    def put(self, slot: int, begin: int, rows: list[Tensor], count: int) -> None:
        self.settle([slot])
        self.rows.put(slot, begin, rows, count)

    def cut(self, slot: int, length: int) -> None:
        self.settle([slot])
        self.rows.cut(slot, length)

    def wipe(self, slot: int) -> None:
        self.waiting.pop(slot, None)
        self.rows.wipe(slot)
