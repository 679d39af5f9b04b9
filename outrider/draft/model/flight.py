"""Flight: the draft tokens that a draft model with another tokenizer has run since its last commit, as a growing tree.

Ids that lead up to the end of the text come first, drafts behind them. Cost: a dictionary entry a node.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.tree import NOTHING, TokenTree


@dataclass(slots=True)
class Flight:
    """The draft tokens that ran since the last commit, as a tree: ids that lead up to the text's end, then drafts."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    ran: int = 0
    logits: dict[int, Tensor] = field(default_factory=dict)
    rows: dict[int, tuple[NDArray[np.int64], NDArray[np.float64]]] = field(default_factory=dict)
    index: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, parent: int, token: int) -> int:
        node = self.index.get((parent, token), NOTHING)
        if node == NOTHING:
            node = self.index[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)
        return node

    def tree(self) -> TokenTree:
        return TokenTree(np.array(self.tokens), np.array(self.parents), ((),) * len(self.tokens))
