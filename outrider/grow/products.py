"""Products: the likeliest paths where a node's chance is a product of one factor a depth, best first.

A factor depends on the depth and on the rank among siblings only, so the values along a path never rise, the likeliest
nodes form a tree, and no other tree of that size expects more accepted tokens. Cost: a heap with an entry a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

Path = tuple[int, int, int, float]  # parent in this list's numbering (0 is the root), depth, rank, value


def likeliest_paths(table: Sequence[Sequence[float]], count: int, depth: int) -> list[Path]:
    """The `count` nodes at most `depth` deep of largest value, parents and earlier siblings first."""
    values, nodes = [1.0], list[Path]()
    heap = [(-table[0][0], 0, 1, 0)]  # -value, parent, depth, rank
    while heap and len(nodes) < count:
        minus, parent, level, rank = heappop(heap)
        if minus == 0.0:
            break  # nothing left has a chance
        nodes.append((parent, level, rank, -minus))
        values.append(-minus)
        row = table[min(level - 1, len(table) - 1)]
        if rank + 1 < len(row):
            heappush(heap, (-values[parent] * row[rank + 1], parent, level, rank + 1))
        if level < depth:
            heappush(heap, (minus * table[min(level, len(table) - 1)][0], len(nodes), level + 1, 0))
    return nodes
