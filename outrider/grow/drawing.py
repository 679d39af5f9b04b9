"""Drawing: the ways to choose the children of one node from the source's row q, each with the row it was drawn from.

A row that is drawn from is scaled to sum to 1 first, so that the verifier divides by the probabilities with which the
draw was made. No noise means that nothing is drawn: the likeliest tokens become point masses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.core.numeric.compiled import compiled
from outrider.core.protocols import Noise
from outrider.core.tree import QRow

DrawnTokens = list[tuple[int, QRow | None]]  # each with the row it was drawn from; None: a point mass
Drawing = Callable[[QRow, int, Noise | None, int], DrawnTokens]  # q, how many at most, noise, node


def likeliest(q: QRow, count: int, noise: Noise | None, node: int) -> DrawnTokens:
    """The top tokens as point masses, best first, ties in the order of the row."""
    if count == 1 and len(q.ids):
        return [(int(q.ids[q.probs.argmax()]), None)]
    return [(token, None) for token in q.ids[ranked(q)[:count]].tolist()]


def independent(q: QRow, count: int, noise: Noise | None, node: int) -> DrawnTokens:
    """With replacement: every draw from the one row."""
    if noise is None:
        return likeliest(q, count, noise, node)
    row = proper(q)
    return [(int(row.ids[noise.draw(row.probs, node, j)]), row) for j in range(count)] if len(row.ids) else []


def without_replacement(q: QRow, count: int, noise: Noise | None, node: int) -> DrawnTokens:
    """Each draw from the row less what was drawn before; ends where the row does."""
    if noise is None or count == 1:
        return independent(q, count, noise, node)
    row = proper(q)
    weights, drawn = row.probs.copy(), list[int]()
    for j in range(min(count, len(weights))):
        drawn.append(noise.draw(weights, node, j))
        weights[drawn[-1]] = 0.0
    return reduced(row, drawn)


def top_plus_one(q: QRow, count: int, noise: Noise | None, node: int) -> DrawnTokens:
    """The top count - 1 as point masses, then one draw from the rest of the row; where nothing is left, no draw."""
    if noise is None:
        return likeliest(q, count, noise, node)
    order = ranked(q)
    points, rest = order[: count - 1], order[count - 1 :]
    proposals: DrawnTokens = [(int(token), None) for token in q.ids[points]]
    if len(rest):
        row = proper(q if count == 1 else QRow(q.ids[rest], q.probs[rest]))
        proposals.append((int(row.ids[noise.draw(row.probs, node, 0)]), row))
    return proposals


def reduced(row: QRow, drawn: Sequence[int]) -> DrawnTokens:
    """The proposals of draws without replacement, given the indices drawn, in order.

    With the drawn tokens moved to the front in that order, the row of draw j is everything from place j on, scaled.
    """
    if len(drawn) < 2:
        return [(int(row.ids[i]), row) for i in drawn]
    ids, probs = _fronted(row.ids, row.probs, np.array(drawn))
    return [(token, QRow(ids[j:], probs[j, j:])) for j, token in enumerate(ids[: len(drawn)].tolist())]


@compiled
def _fronted(
    ids: NDArray[np.int64], probs: NDArray[np.float64], drawn: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:  # fmt: skip
    """The tokens, drawn ones first; and for each draw [k, m] their probabilities, from its own place on."""
    count, size = len(drawn), len(ids)
    tokens, rows, left = np.empty_like(ids), np.empty((count, size)), np.empty(count)
    taken = np.zeros(size, dtype=np.bool_)
    for j in range(count):
        taken[drawn[j]], tokens[j], rows[0, j] = True, ids[drawn[j]], probs[drawn[j]]
    at = count
    for i in range(size):
        if not taken[i]:
            tokens[at], rows[0, at] = ids[i], probs[i]
            at += 1
    total = 0.0
    for i in range(size - 1, -1, -1):
        total += rows[0, i]
        if i < count:
            left[i] = total  # of row i before scaling
    for j in range(1, count):
        scale = left[0] / left[j]
        for i in range(j, size):
            rows[j, i] = rows[0, i] * scale
    return tokens, rows


def proper(q: QRow) -> QRow:
    """q scaled to sum to 1: a grower always proposes something where it may."""
    total = float(np.add.reduce(q.probs))
    return q if abs(total - 1.0) < 1e-9 or not len(q.ids) else QRow(q.ids, q.probs / total)


def ranked(q: QRow) -> np.ndarray:
    return np.argsort(-q.probs, kind="stable")
