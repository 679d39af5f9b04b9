"""N-gram distributions: running means of the target's distributions in an n-gram table, and trees filled from them.

The compiled half of STAND: learning rows, reading the distribution after the longest known context, and filling the
places of a static shape, with the likeliest successors or by draws without replacement. A draw uses the very bits that
`StreamNoise.draw` would give its node and number, so it is the same draw, made without a call for each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.core.numeric.compiled import compiled
from outrider.draft.table.ngram_table import Table, claim, find, pack
from outrider.draft.table.odds import Odds, chance_of, count_offer

_GOLDEN, _MIX1, _MIX2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Reader(NamedTuple):
    """How one sequence reads the table."""

    owner: int
    longest: int  # tokens of the longest context tried first
    shortest: int
    inverse_temperature: float  # 1 / temperature: stored probabilities are at temperature 1


class Filled(NamedTuple):
    """A tree, and at each expanded node the distribution that its children came from."""

    tokens: NDArray[np.int64]  # [n]
    parents: NDArray[np.int64]
    weights: NDArray[np.float64]
    picks: NDArray[np.int64]  # [n] which entry of the parent's distribution a node is
    ranks: NDArray[np.int64]  # [n] which draw of its parent
    ids: NDArray[np.int64]  # [n, width] the distribution after each node that was expanded
    probs: NDArray[np.float64]  # [n, width]
    sizes: NDArray[np.int64]  # [n] tokens of it; 0: none known, -1: never asked


@compiled
def learn(
    table: Table, owner: int, windows: NDArray[np.int64], ids: NDArray[np.int32], probs: NDArray[np.float64],
    longest: int, shortest: int,
) -> None:  # fmt: skip
    """Changes state: row i was the target's after windows[i]; every order's entry takes it into its mean."""
    for row in range(len(windows)):
        for order in range(longest, shortest - 1, -1):
            if windows[row, 4 - order] >= 0:
                first, second = pack(windows[row], order)
                _average(table, claim(table, owner, first, second), ids[row], probs[row])


@compiled
def _average(table: Table, entry: int, ids: NDArray[np.int32], probs: NDArray[np.float64]) -> None:
    """merged(v) = c/(c + 1) old(v) + 1/(c + 1) new(v) over both, the largest kept; what falls out is lost."""
    width = table.ids.shape[1]
    seen = table.counts[entry]
    old, new = seen / (seen + 1.0), 1.0 / (seen + 1.0)
    tokens, values = np.empty(2 * width, dtype=np.int32), np.empty(2 * width)
    size = 0
    for i in range(width):
        if table.ids[entry, i] >= 0:
            tokens[size], values[size] = table.ids[entry, i], old * table.values[entry, i]
            size += 1
    known = size
    for i in range(width):
        if ids[i] < 0:
            break
        at = 0
        while at < known and tokens[at] != ids[i]:
            at += 1
        if at == known:
            at = size
            tokens[at], values[at] = ids[i], 0.0
            size += 1
        values[at] += new * probs[i]
    for i in range(1, size):  # largest first, of equals the lower id
        token, value, at = tokens[i], values[i], i
        while at > 0 and (values[at - 1] < value or (values[at - 1] == value and tokens[at - 1] > token)):
            tokens[at], values[at] = tokens[at - 1], values[at - 1]
            at -= 1
        tokens[at], values[at] = token, value
    for i in range(width):
        table.ids[entry, i] = tokens[i] if i < size else -1
        table.values[entry, i] = values[i] if i < size else 0.0
    table.counts[entry] = min(seen + 1, 1 << 30)


@compiled
def read(
    table: Table, reader: Reader, window: NDArray[np.int64], ids: NDArray[np.int64], probs: NDArray[np.float64]
) -> tuple[int, int]:
    """Write what follows the longest known end of the window to ids and probs; its order and size, 0 where none is."""
    for order in range(reader.longest, reader.shortest - 1, -1):
        if window[4 - order] < 0:
            continue
        first, second = pack(window, order)
        entry = find(table, reader.owner, first, second)
        if entry < 0:
            continue
        size, total = 0, 0.0
        top = table.values[entry, 0]
        for i in range(table.ids.shape[1]):
            value = table.values[entry, i]
            if table.ids[entry, i] < 0 or value <= 0.0:
                break
            weight = (
                value / top
                if reader.inverse_temperature == 1.0
                else np.exp(reader.inverse_temperature * np.log(value / top))
            )
            if weight <= 0.0:
                break
            ids[size], probs[size] = table.ids[entry, i], weight
            size, total = size + 1, total + weight
        for i in range(size):
            probs[i] /= total
        if size:
            return order, size
    return 0, 0


@compiled
def count_offers(
    table: Table, odds: Odds, reader: Reader, windows: NDArray[np.int64], afters: NDArray[np.int64]
) -> None:
    """Changes the odds: afters[i] is the token that came after windows[i]."""
    ids, probs = np.empty(table.ids.shape[1], dtype=np.int64), np.empty(table.ids.shape[1])
    for row in range(len(windows)):
        order, size = read(table, reader, windows[row], ids, probs)
        for rank in range(size):
            count_offer(odds, order - 1, rank, probs[rank], ids[rank] == afters[row])


@compiled
def fill(
    table: Table, odds: Odds, reader: Reader, tail: NDArray[np.int64], above: NDArray[np.int64],
    ranks: NDArray[np.int64], depths: NDArray[np.int64], nodes: int, depth: int, drawn: bool, step_key: np.uint64,
) -> Filled:  # fmt: skip
    """Places in order of worth while the budget lasts; each is its parent's next likeliest token, or its next draw.

    Whether a place is filled is known before it is drawn: its parent stands and has something left to draw.
    """
    width = table.ids.shape[1]
    out = blank(nodes, width, tail[3])
    stands, windows = np.full(len(above), -1, dtype=np.int64), np.empty((nodes + 1, 4), dtype=np.int64)
    taken, orders = np.zeros((nodes + 1, width), dtype=np.bool_), np.zeros(nodes + 1, dtype=np.int64)
    stands[0], windows[0] = 0, tail
    size = 1
    for place in range(1, len(above)):
        if size > nodes:
            break
        parent = stands[above[place]]
        if parent < 0 or depths[place] > depth:
            continue
        if out.sizes[parent] < 0:
            orders[parent], out.sizes[parent] = read(table, reader, windows[parent], out.ids[parent], out.probs[parent])
        rank = ranks[place]
        if rank >= out.sizes[parent]:
            continue
        pick = rank
        if drawn:
            u = _uniform(step_key, parent, rank)
            pick = _inverse(out.probs[parent], taken[parent], out.sizes[parent], u)
            taken[parent, pick] = True
        token = out.ids[parent, pick]
        out.tokens[size], out.parents[size], out.picks[size], out.ranks[size] = token, parent, pick, rank
        chance = chance_of(odds, orders[parent] - 1, pick, out.probs[parent, pick])
        out.weights[size] = out.weights[parent] * chance
        windows[size, :3] = windows[parent, 1:]
        windows[size, 3] = token
        stands[place] = size
        size += 1
    return cut(out, size)


@compiled
def blank(nodes: int, width: int, pending: int) -> Filled:
    tokens, parents = np.empty(nodes + 1, dtype=np.int64), np.empty(nodes + 1, dtype=np.int64)
    tokens[0], parents[0] = pending, -1
    return Filled(
        tokens, parents, np.ones(nodes + 1), np.zeros(nodes + 1, dtype=np.int64), np.zeros(nodes + 1, dtype=np.int64),
        np.empty((nodes + 1, width), dtype=np.int64), np.empty((nodes + 1, width)),
        np.full(nodes + 1, -1, dtype=np.int64),
    )  # fmt: skip


@compiled
def cut(out: Filled, size: int) -> Filled:
    return Filled(
        out.tokens[:size], out.parents[:size], out.weights[:size], out.picks[:size], out.ranks[:size], out.ids[:size],
        out.probs[:size], out.sizes[:size],
    )  # fmt: skip


@compiled
def rows(filled: Filled) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """The distribution of each draw: node i was drawn from the first lengths[i] tokens of ids[i], with probs[i].

    Draws without replacement: what was drawn before is gone, the rest is scaled to sum to 1; the tokens that will be
    drawn stand in front, in that order, so that each row is the one before less its first token.
    """
    count, width = filled.ids.shape
    ids, probs = np.empty((count, width), dtype=np.int64), np.empty((count, width))
    lengths = np.zeros(count, dtype=np.int64)
    order, fronts = np.empty((count, width), dtype=np.int64), np.zeros(count, dtype=np.int64)
    for node in range(1, count):
        parent = filled.parents[node]
        order[parent, fronts[parent]] = filled.picks[node]
        fronts[parent] += 1
    for parent in range(count):
        size, end = filled.sizes[parent], fronts[parent]
        for i in range(size if fronts[parent] else 0):
            if not _among(order[parent, : fronts[parent]], i):
                order[parent, end] = i
                end += 1
    for node in range(1, count):
        parent, rank = filled.parents[node], filled.ranks[node]
        left = 0.0
        lengths[node] = filled.sizes[parent] - rank
        for i in range(lengths[node]):
            ids[node, i] = filled.ids[parent, order[parent, rank + i]]
            probs[node, i] = filled.probs[parent, order[parent, rank + i]]
            left += probs[node, i]
        for i in range(lengths[node]):
            probs[node, i] /= left
    return ids, probs, lengths


@compiled
def _among(picks: NDArray[np.int64], index: int) -> bool:
    for pick in picks:  # noqa: SIM110 (plain loops compile)
        if pick == index:
            return True
    return False


@compiled
def _inverse(probs: NDArray[np.float64], taken: NDArray[np.bool_], size: int, u: float) -> int:
    """As `noise.inverse` on the probabilities with the taken ones at 0: the same sums in the same order."""
    total = 0.0
    for i in range(size):
        total += 0.0 if taken[i] else probs[i]
    reached, last = 0.0, 0
    for i in range(size):
        if not taken[i]:
            reached += probs[i]
            last = i
            if reached > u * total:
                return i
    return last


@compiled
def _uniform(step_key: np.uint64, node: int, draw: int) -> float:
    """The uniform of `StreamNoise.draw` for this node and draw."""
    bits = _then(_then(_then(step_key, node), draw), 1)
    return (float(bits >> np.uint64(12)) + 0.5) * 2.0**-52


@compiled
def _then(state: np.uint64, part: int) -> np.uint64:
    return _mixed(state + _GOLDEN + _mixed(np.uint64(part) + _GOLDEN))


@compiled
def _mixed(x: np.uint64) -> np.uint64:
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))
