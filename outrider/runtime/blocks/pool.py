"""BlockPool: which blocks of a cache are free, and how many hold each of the others.

A block is room for so many positions of one text, in all layers. Several texts with the same beginning hold the same
blocks; what is held more than once is never written.
"""

from __future__ import annotations

import numpy as np

from outrider.core.errors import OutriderError


class BlockPool:
    def __init__(self, count: int) -> None:
        self.count = count
        self.holders = np.zeros(count, dtype=np.int64)  # of each block
        self._free = list(range(count - 1, -1, -1))  # the last is taken first: memory that was touched before

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Changes state: a block for its only holder. Ask `free` before."""
        if not self._free:
            raise OutriderError(f"all {self.count} blocks of the cache are held")
        block = self._free.pop()
        self.holders[block] = 1
        return block

    def hold(self, block: int) -> None:
        """Changes state: one holder more."""
        if self.holders[block] < 1:
            raise OutriderError(f"block {block} is free; it cannot be shared")
        self.holders[block] += 1

    def drop(self, block: int) -> None:
        """Changes state: one holder less; the last one frees it."""
        if self.holders[block] < 1:
            raise OutriderError(f"block {block} is free already")
        self.holders[block] -= 1
        if not self.holders[block]:
            self._free.append(block)
