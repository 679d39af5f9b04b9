"""Side rows: rows of a pass that are no candidates, made of a drafter's vectors in the place of embeddings.

They stand behind nodes of a tree and see what these see, and each other where they say so. No candidate sees them, and
they are no part of the tree: a verifier cannot follow them, nothing counts them, and no cache keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.tree import TokenTree


@dataclass(frozen=True, slots=True, eq=False)
class SideRows:
    """The rows of one slot in one pass; another pass may have other vectors."""

    nodes: NDArray[np.int64]  # [S]: of the tree; each row stands behind one of them
    offsets: NDArray[np.int64]  # [S]: how many places behind it
    sees: NDArray[np.bool_]  # [S, S]: which side rows each one sees, itself among them
    vectors: Tensor  # [S, hidden]: what the model reads instead of its embedding of a token

    def __post_init__(self) -> None:
        rows = len(self.nodes)
        assert len(self.offsets) == len(self.vectors) == rows and self.sees.shape == (rows, rows), "one entry a row"
        assert self.sees.diagonal().all() and (self.offsets > 0).all(), "a row sees itself and stands behind its node"

    def __len__(self) -> int:
        return len(self.nodes)

    def depths(self, tree: TokenTree) -> NDArray[np.int64]:
        """How far each stands behind the text, the pending token being 0."""
        return tree.depths[self.nodes] + self.offsets

    def fits(self, tree: TokenTree, rows: int, depth: int) -> bool:
        """Whether tree and side rows are at most so many, and none stands deeper."""
        return len(tree) + len(self) <= rows and int(self.depths(tree).max(initial=0)) <= depth


def chains(nodes: Sequence[int], lengths: Sequence[int], vectors: Tensor) -> SideRows | None:
    """Behind each of these nodes a chain of the first so many vectors; None where there is none."""
    counts = np.asarray(lengths, dtype=np.int64)
    if not counts.sum():
        return None
    chain = np.repeat(np.arange(len(counts)), counts)
    offsets = np.concatenate([np.arange(1, count + 1) for count in counts])
    sees = (chain[:, None] == chain) & (offsets[:, None] >= offsets)
    return SideRows(np.repeat(np.asarray(nodes, dtype=np.int64), counts), offsets, sees, vectors[offsets - 1])
