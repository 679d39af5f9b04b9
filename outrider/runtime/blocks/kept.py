"""KeptTexts: copies of finished texts' rows, outside the slots, for caches in which texts cannot share rows.

A copy of a block's worth of positions is one array, or whatever the cache gives; texts that begin alike share copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.runtime.blocks.pool import BlockPool
from outrider.runtime.blocks.prefixes import Prefixes


class KeptTexts:
    def __init__(self, blocks: int, size: int) -> None:
        """`size` positions a block."""
        self.size = size
        self._pool = BlockPool(blocks)
        self._prefixes = Prefixes(self._pool, size)
        self._copies: dict[int, Any] = {}  # by block

    def find(self, tokens: NDArray[np.int64], salt: str) -> tuple[list[Any], int]:
        """Copies that hold the beginning of a text, and how many tokens of it; of the last one maybe a part."""
        blocks, length = self._prefixes.find(tokens, salt)
        return [self._copies[block] for block in blocks], length

    def add(self, tokens: NDArray[np.int64], salt: str, copied: Callable[[int, int], Any]) -> None:
        """Changes state: keeps a text, or as much of it as there is room for; `copied(begin, end)` gives its rows."""
        known, length = self._prefixes.find(tokens, salt)
        blocks = known[: length // self.size]
        for block in blocks:
            self._pool.hold(block)  # while others are evicted
        wanted = -(-len(tokens) // self.size) - len(blocks)
        if wanted > self._pool.free:
            self._prefixes.evict(wanted - self._pool.free)
        for _ in range(min(wanted, self._pool.free)):
            begin, block = len(blocks) * self.size, self._pool.take()
            self._copies[block] = copied(begin, min(begin + self.size, len(tokens)))
            blocks.append(block)
        self._prefixes.add(tokens[: len(blocks) * self.size], salt, blocks)
        for block in blocks:
            self._pool.drop(block)

    def forget(self) -> None:
        """Changes state: no text is kept any more."""
        self._prefixes.evict(len(self._prefixes))
        self._copies.clear()
