"""NativeCache: keys and values of all slots as the native step reads them.

A pool of pages, each with all layers and heads, so that short texts touch little even where memory comes in pieces of
megabytes; what was never used is not touched. A table says which pages a slot has: texts that begin alike share them.
Rows in flight stand behind the committed text, node i of a tree at length + i. What lies behind a row's own place is
never read, so a page need not be wiped for the next text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import InputError
from outrider.core.numeric.compiled import compiled
from outrider.core.numeric.numbers import copy
from outrider.runtime.blocks.paged import PagedSlots
from outrider.runtime.cache import LayerShape, moves, zeros
from outrider.runtime.native.kernels.attention import BLOCK, PAGE, block_of
from outrider.runtime.native.kernels.step import Store

SIZE = PAGE * BLOCK  # positions of a page
MANY = 1 << 16  # pages: more than anybody has texts for


class NativeCache:
    def __init__(self, shapes: Sequence[LayerShape], slots: int, capacity: int, size: int) -> None:
        """Layers of equal shapes; `capacity` positions a slot and `size` bytes in all, at most."""
        shape = shapes[0]
        pages = min(MANY, size // (SIZE * sum(shape.bytes for shape in shapes)))
        rows = (pages, len(shapes), shape.heads, PAGE)
        try:
            keys = zeros((*rows, shape.key_dim, BLOCK), shape.dtype, shape.device).numpy()
            values = zeros((*rows, BLOCK, shape.value_dim), shape.dtype, shape.device).numpy()
        except MemoryError as error:
            raise InputError(f"this system does not give {size} bytes for the cache; lower cache_bytes") from error
        self.slots = PagedSlots(slots, pages, SIZE, capacity, self.copy)
        self.capacity = -(-capacity // SIZE) * SIZE
        self.store = Store(keys, values, self.slots.table)
        self.move((), (), ())  # compiled before anybody waits for it

    @property
    def bytes(self) -> int:
        return self.store.keys.nbytes + self.store.values.nbytes

    def keep(self, slots: Sequence[int], lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Changes state: accepted rows go to their places behind the text."""
        if wanted := moves(slots, lengths, paths):
            self.move(*zip(*wanted, strict=True))

    def move(self, slots: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Changes state: copy row sources[i] of slots[i] to row targets[i], which lies before it."""
        _move(self.store, *(np.array(numbers, dtype=np.int64) for numbers in (slots, sources, targets)))

    def copy(self, source: int, target: int, rows: int) -> None:
        """Changes state: the first rows of one page become those of another."""
        blocks = -(-rows // BLOCK)
        for stored in (self.store.keys, self.store.values):
            stored[target, :, :, :blocks] = stored[source, :, :, :blocks]


@compiled
def _move(
    store: Store, slots: NDArray[np.int64], sources: NDArray[np.int64], targets: NDArray[np.int64]
) -> None:  # fmt: skip
    for i in range(len(slots)):
        pages, source, target = store.tables[slots[i]], sources[i], targets[i]
        for layer in range(store.keys.shape[1]):
            for head in range(store.keys.shape[2]):
                keys = block_of(store.keys, pages, source // BLOCK, layer, head)
                values = block_of(store.values, pages, source // BLOCK, layer, head)
                new_keys = block_of(store.keys, pages, target // BLOCK, layer, head)
                new_values = block_of(store.values, pages, target // BLOCK, layer, head)
                copy(values[source % BLOCK], new_values[target % BLOCK])
                for d in range(len(keys)):
                    new_keys[d, target % BLOCK] = keys[d, source % BLOCK]
