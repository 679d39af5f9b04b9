"""PagedSlots: every slot has a table of blocks of one pool; texts with the same beginning have the same blocks.

A slot holds as many blocks as its text and its rows in flight need. A block with several holders is copied by the one
that is to write into it, once it does; full ones never are. A finished text stays until its blocks are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import CacheFull
from outrider.runtime.blocks.pool import BlockPool
from outrider.runtime.blocks.prefixes import Prefixes
from outrider.runtime.blocks.texts import Text, nearest


class PagedSlots:
    def __init__(
        self, slots: int, blocks: int, size: int, capacity: int, copy: Callable[[int, int, int], None]
    ) -> None:
        """`size` positions a block, `capacity` positions a slot at most; `copy(from, to, n)`: n rows of a block."""
        self.size, self._copy = size, copy
        self.pool = BlockPool(blocks)
        self.prefixes = Prefixes(self.pool, size)
        self.table = np.zeros((slots, -(-capacity // size) + 1), dtype=np.int64)  # what is not in use: any block
        self._counts = [0] * slots  # blocks of each slot
        self._texts: dict[int, Text] = {}  # of the slots in use
        self._free = list(range(slots))

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def length(self, slot: int) -> int:
        return len(self._texts[slot].tokens) if slot in self._texts else 0

    def acquire(self, tokens: NDArray[np.int64], salt: str) -> int | None:
        if not self._free:
            return None
        slot, text = self._free.pop(0), Text(salt, findable=len(tokens) > 0)
        blocks, length = self.prefixes.find(tokens, salt)
        other, more = nearest(self._texts.items(), tokens, salt)
        if more > length:
            blocks, length = self._blocks(other, more), more
        self._begin(slot, text, blocks, tokens[:length])
        return slot

    def fork(self, slot: int, length: int) -> int | None:
        if not self._free:
            return None
        source, twin = self._texts[slot], self._free.pop(0)
        self._begin(twin, Text(source.salt, source.findable), self._blocks(slot, length), source.array(length))
        return twin

    def _begin(self, slot: int, text: Text, blocks: list[int], tokens: NDArray[np.int64]) -> None:
        for place, block in enumerate(blocks):
            self.pool.hold(block)
            self.table[slot, place] = block
        self._counts[slot] = len(blocks)
        text.tokens.frombytes(tokens.tobytes())
        self._texts[slot] = text

    def release(self, slot: int) -> None:
        text = self._texts.pop(slot)
        if text.findable:
            self.prefixes.add(text.array(), text.salt, self._blocks(slot, len(text.tokens)))
        self._shrink(slot, 0)
        self._free.append(slot)
        self._free.sort()

    def forget(self) -> None:
        self.prefixes.evict(len(self.prefixes))

    def append(self, slot: int, tokens: NDArray[np.int64]) -> None:
        text = self._texts[slot]
        text.tokens.frombytes(tokens.tobytes())
        self._shrink(slot, len(text.tokens))

    def truncate(self, slot: int, length: int) -> None:
        del self._texts[slot].tokens[length:]
        self._shrink(slot, length)

    def tokens(self, slot: int) -> NDArray[np.int64]:
        return self._texts[slot].array()

    def fits(self, reaches: Mapping[int, int]) -> bool:
        if any(reach > (self.table.shape[1] - 1) * self.size for reach in reaches.values()):
            return False
        wanted = sum(self._wanted(slot, reach) for slot, reach in reaches.items())
        return wanted <= self.pool.free or wanted <= self.pool.free + self.prefixes.spare

    def reserve(self, reaches: Mapping[int, int]) -> None:
        """Raises where the pool is too small, and changes nothing then."""
        wanted = sum(self._wanted(slot, reach) for slot, reach in reaches.items())
        if wanted > self.pool.free:
            self.prefixes.evict(wanted - self.pool.free)
        if wanted > self.pool.free:
            raise CacheFull(
                f"the cache has {self.pool.free} free blocks of {self.size} positions, and the sequences of this pass "
                f"need {wanted} more; raise cache_bytes, or run fewer at once"
            )
        for slot, reach in reaches.items():
            length = self.length(slot)
            if self._shared(slot, reach):
                place = length // self.size
                shared, mine = int(self.table[slot, place]), self.pool.take()
                self._copy(shared, mine, min(self.size, reach - place * self.size))  # with the rows in flight
                self.table[slot, place] = mine
                self.pool.drop(shared)
            for place in range(self._counts[slot], -(-reach // self.size)):
                self.table[slot, place] = self.pool.take()
                self._counts[slot] += 1

    def _wanted(self, slot: int, reach: int) -> int:
        """Blocks that the slot must take to have so many rows."""
        return max(0, -(-reach // self.size) - self._counts[slot]) + self._shared(slot, reach)

    def _shared(self, slot: int, reach: int) -> bool:
        """Whether the first row behind the text lies in a block that others hold, too."""
        length = self.length(slot)
        place = length // self.size
        return reach > length and place < self._counts[slot] and self.pool.holders[self.table[slot, place]] > 1

    def _blocks(self, slot: int, length: int) -> list[int]:
        """Those that hold the first `length` tokens."""
        found: list[int] = self.table[slot, : -(-length // self.size)].tolist()
        return found

    def _shrink(self, slot: int, length: int) -> None:
        """Changes state: no more blocks than these tokens need."""
        keep = -(-length // self.size)
        for place in range(self._counts[slot] - 1, keep - 1, -1):
            self.pool.drop(int(self.table[slot, place]))
        self._counts[slot] = min(self._counts[slot], keep)
