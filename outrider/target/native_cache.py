"""NativeCache: keys and values of all slots as the native step reads them.

Nothing grows: memory that was never used is not touched. Pages of a slot's text lie one after another, each with all
layers and heads, so that short texts touch little even where memory comes in pieces of megabytes. Rows in flight stand
behind the committed text, node i of a tree at length + i. What lies behind a row's own place is never read, so a
released slot need not be wiped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.compiled import compiled
from outrider.native.attention import BLOCK, PAGE, block_of
from outrider.native.numbers import copy
from outrider.native.step import Store
from outrider.target.cache import LayerShape, zeros


class NativeCache:
    def __init__(self, shapes: Sequence[LayerShape], slots: int, capacity: int) -> None:
        """Layers of equal shapes."""
        shape, pages = shapes[0], -(-capacity // (PAGE * BLOCK))
        rows = (slots, pages, len(shapes), shape.heads, PAGE)
        self.slots, self.capacity = slots, pages * PAGE * BLOCK
        keys = zeros((*rows, shape.key_dim, BLOCK), shape.dtype, shape.device).numpy()
        values = zeros((*rows, BLOCK, shape.value_dim), shape.dtype, shape.device).numpy()
        self.store = Store(keys, values)
        self.move((), (), ())  # compiled before anybody waits for it

    @property
    def bytes(self) -> int:
        return self.store.keys.nbytes + self.store.values.nbytes

    def move(self, slots: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Changes state: copy row sources[i] of slots[i] to row targets[i], which lies before it."""
        _move(self.store, *(np.array(own, dtype=np.int64) for own in (slots, sources, targets)))

    def copy(self, source: int, target: int, length: int) -> None:
        """Changes state: the first `length` rows of one slot become those of another."""
        pages = -(-length // (PAGE * BLOCK))
        for stored in self.store:
            stored[target, :pages] = stored[source, :pages]

    def wipe(self, slot: int, length: int) -> None:
        """Forget a slot: nothing to do."""


@compiled
def _move(
    store: Store, slots: NDArray[np.int64], sources: NDArray[np.int64], targets: NDArray[np.int64]
) -> None:  # fmt: skip
    for i in range(len(slots)):
        slot, source, target = slots[i], sources[i], targets[i]
        for layer in range(store.keys.shape[2]):
            for head in range(store.keys.shape[3]):
                keys = block_of(store.keys[slot], source // BLOCK, layer, head)
                values = block_of(store.values[slot], source // BLOCK, layer, head)
                new_keys = block_of(store.keys[slot], target // BLOCK, layer, head)
                new_values = block_of(store.values[slot], target // BLOCK, layer, head)
                copy(values[source % BLOCK], new_values[target % BLOCK])
                for d in range(len(keys)):
                    new_keys[d, target % BLOCK] = keys[d, source % BLOCK]
