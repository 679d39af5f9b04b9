"""Block: the rows in flight of one slot, which is what a backend is handed; knows nothing of how they are run.

Of a tree, or of a stretch of text. Whoever lays several of them out for one forward is in `passes`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.core.records import Needs, Race
from outrider.core.tree import TokenTree

_ITSELF = np.ones((1, 1), dtype=np.bool_)  # what a row without candidates sees in flight; never written to


@dataclass(frozen=True, slots=True)
class Block:
    """The rows in flight of one slot: nodes 0 .. n behind `length` committed ones, of which `done` have run before."""

    slot: int
    length: int
    tokens: NDArray[np.int64]  # [n]
    depths: NDArray[np.int64]  # [n]
    sees: NDArray[np.bool_]  # [n - done, n]
    done: int = 0
    text: bool = False  # a chain that stays: the next rows of this slot come behind it
    race: Race | None = None

    @property
    def rows(self) -> int:
        return len(self.tokens) - self.done

    @property
    def reach(self) -> int:
        """Rows of the slot's cache that this block may look at."""
        return self.length + len(self.tokens)

    def scored(self, needs: Needs) -> bool:
        """Whether logits are asked for: of candidates always, of text only where a drafter needs them."""
        return needs.logits or not self.text


def text_block(slot: int, length: int, tokens: NDArray[np.int64]) -> Block:
    """A stretch of text: every row sees the ones before it."""
    rows = len(tokens)
    return Block(slot, length, tokens, np.arange(rows), np.tri(rows, dtype=bool), text=True)


def tree_block(slot: int, length: int, tree: TokenTree, done: int = 0, race: Race | None = None) -> Block:
    """The nodes of a tree from `done` on: every row sees its ancestors."""
    if len(tree) == 1:
        return Block(slot, length, tree.tokens, tree.depths, _ITSELF, race=race)
    return Block(slot, length, tree.tokens, tree.depths, tree.ancestor_mask()[done:], done, race=race)
