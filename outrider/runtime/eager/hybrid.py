"""HybridSlots: the cache of a model with recurrent layers, keys and values of the others beside their states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.runtime.eager.cache import SlotCache
from outrider.runtime.passes import Pass
from outrider.runtime.recurrent.hybrid_cache import HybridCache
from outrider.runtime.recurrent.snapshots import States
from outrider.runtime.recurrent.states import StateStore


@dataclass(frozen=True, slots=True)
class Stretch:
    """A copy of so many tokens of a text, with the states behind the last of them where those were there."""

    rows: list[Tensor]  # of keys and values
    count: int
    states: States | None


class HybridSlots(HybridCache):
    attention: SlotCache

    def __init__(self, attention: SlotCache, layers: dict[int, int], states: StateStore) -> None:
        super().__init__(attention, layers, states)
        self.capacity = attention.capacity

    @property
    def bytes(self) -> int:
        return self.attention.bytes + self.states.bytes

    def bind(self, current: Pass) -> HybridSlots:
        """Changes state: the next forward reads and writes where this pass says."""
        self.attention.bind(current)
        self.states.bind(current)
        return self

    def bind_fixed(self, current: Pass) -> HybridSlots:
        """Changes state: the next forward reads and writes where this pass says, which a recording may be made of."""
        self.attention.bind(current)
        return self

    def finish(self) -> None:
        """Changes state: the forward is over, and its text is committed."""
        self.states.finish()

    def keep(self, slots: Sequence[int], lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        self.attention.keep(slots, lengths, paths)
        self.states.keep(slots, lengths, paths)

    def copy(self, source: int, target: int, length: int) -> None:
        self.attention.copy(source, target, length)
        self.states.copy(source, target, length)

    def rows_at(self, slot: int, begin: int, end: int) -> Stretch:
        return Stretch(self.attention.rows_at(slot, begin, end), end - begin, self.states.states_at(slot, end))

    def put(self, slot: int, begin: int, rows: Stretch, count: int) -> None:
        self.attention.put(slot, begin, rows.rows, count)
        if rows.states is not None and count == rows.count:
            self.states.put(slot, begin, begin + count, rows.states)

    def cut(self, slot: int, length: int) -> None:
        self.attention.cut(slot, length)
        self.states.cut(slot, length)

    def wipe(self, slot: int) -> None:
        self.attention.wipe(slot)
        self.states.restore(slot, 0, None)
        self.states.cut(slot, 0)

    # Which beginnings of a text can be taken up again

    def of_slot(self, slot: int, length: int) -> int:
        return self.states.last(slot, length)

    def of_copies(self, copies: Sequence[Stretch], length: int) -> int:
        end = longest = 0
        for stretch in copies:
            end += stretch.count
            if end <= length and stretch.states is not None:
                longest = end
        return longest
