"""Block: the rows in flight of one slot, which is what a backend is handed; knows nothing of how they are run.

Of a tree, or of a stretch of text. Whoever lays several of them out for one forward is in `passes`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.records import Needs, Race
from outrider.core.rows.side import SideRows
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
    side: Tensor | None = None  # [s, hidden]: what the last s rows of all read; they are no candidates
    race: Race | None = None

    @property
    def rows(self) -> int:
        return len(self.tokens) - self.done

    @property
    def reach(self) -> int:
        """Rows of the slot's cache that this block may look at."""
        return self.length + len(self.tokens)

    @property
    def nodes(self) -> int:
        """Rows that have a token of the vocabulary."""
        return len(self.tokens) - (0 if self.side is None else len(self.side))

    @property
    def vectors(self) -> Tensor | None:
        """What the last rows of this pass read in the place of embeddings."""
        return None if self.side is None else self.side[max(0, self.done - self.nodes) :]

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


def side_block(slot: int, length: int, tree: TokenTree, done: int, side: SideRows, above: int) -> Block:
    """The same with side rows behind the nodes; their ids are `above` and up, which are no tokens."""
    nodes, rows = len(tree), len(side)
    sees = np.zeros((nodes + rows, nodes + rows), dtype=np.bool_)
    sees[:nodes, :nodes] = of_nodes = tree.ancestor_mask()
    sees[nodes:, :nodes], sees[nodes:, nodes:] = of_nodes[side.nodes], side.sees
    tokens = np.concatenate([tree.tokens, above + np.arange(rows)])
    depths = np.concatenate([tree.depths, side.depths(tree)])
    return Block(slot, length, tokens, depths, sees[done:], done, side=side.vectors)
