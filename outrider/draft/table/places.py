"""Places: where the nodes of a drafter's tree stand in the tree that was verified.

The two differ when several drafters' trees were merged; a drafter that reads the target's rows has to find its
nodes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.core.numeric.compiled import compiled
from outrider.core.tree import NOTHING


@compiled
def places(
    tokens: NDArray[np.int64], parents: NDArray[np.int64],
    all_tokens: NDArray[np.int64], all_parents: NDArray[np.int64],
) -> NDArray[np.int64]:  # fmt: skip
    """Each node's number in the other tree, by the tokens on its path; NOTHING where it is not there."""
    out = np.full(len(tokens), NOTHING, dtype=np.int64)
    out[0] = 0
    for i in range(1, len(tokens)):
        parent = out[parents[i]]
        if parent == NOTHING:
            continue
        if i < len(all_tokens) and all_tokens[i] == tokens[i] and all_parents[i] == parent:  # most often the same tree
            out[i] = i
            continue
        for j in range(parent + 1, len(all_tokens)):
            if all_parents[j] == parent and all_tokens[j] == tokens[i]:
                out[i] = j
                break
    return out
