"""Positions: a tree's shape as places for "the j-th child of that place", in the order of what they are worth.

A budget takes places from the front whose parents stand; a place that a drafter cannot fill is passed over and the next
one gets its node. The order comes from counts of how often each place lay on an accepted path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Path = tuple[int, ...]  # ranks from the root down


@dataclass(frozen=True, slots=True)
class Positions:
    """Place 0 is the root. Parents before children, earlier siblings before later ones."""

    parents: NDArray[np.int64]  # [n + 1], -1 for the root
    ranks: NDArray[np.int64]  # [n + 1]
    depths: NDArray[np.int64]  # [n + 1]

    def __len__(self) -> int:
        return len(self.parents) - 1


def positions(paths: Iterable[Path]) -> Positions:
    """Places in this order. Gaps between siblings are closed: the j-th to come is the j-th child."""
    place: dict[Path, int] = {(): 0}
    parents, ranks, depths, children = [-1], [0], [0], [0]
    for path in paths:
        parent = place[path[:-1]]
        place[path] = len(parents)
        parents.append(parent)
        ranks.append(children[parent])
        depths.append(len(path))
        children[parent] += 1
        children.append(0)
    return Positions(np.array(parents), np.array(ranks), np.array(depths))


def most_accepted(counts: Mapping[Path, float], places: int) -> list[Path]:
    """The places counted most often, most of all first, at most so many.

    A place is on an accepted path only if its parent is, so a parent counts no less; among equals the shorter comes
    first, and what is kept is a tree.
    """
    return sorted(counts, key=lambda path: (-counts[path], len(path), path))[:places]


def parse(text: str) -> list[Path]:
    """ "0 1 00 01": one word a place, a digit a rank."""
    return [tuple(map(int, word)) for word in text.split()]


def written(paths: Iterable[Path]) -> str:
    return " ".join("".join(map(str, path)) for path in paths)
