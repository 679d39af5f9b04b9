"""PUCT: a short Monte-Carlo tree search over a tri-gram table, and the tree of its most visited prefixes.

A state is the last pair of tokens. Unvisited children come first; then the one of largest W/n + P (c1 + ln((N + c2 +
1)/c2)) sqrt(N)/(1 + n), where W are its rewards, n its visits, N its parent's and P its weight in the table. Compiled;
the roll-outs' random numbers follow from the seed given, so equal tables and seeds give equal trees.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.core.numeric.compiled import compiled
from outrider.draft.table.ngram_table import Table, find, size
from outrider.draft.table.odds import Odds, chance_of

_GOLDEN, _MIX1, _MIX2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Settings(NamedTuple):
    iterations: int = 150
    length: int = 4  # pairs in a state, the first included: 3 new tokens
    c1: float = 32.0
    c2: float = 8.0
    as_published: bool = False  # the reward looks up the token that the pair already holds


class Search(NamedTuple):
    """Nodes in the order they were made; node 0 is the last pair of the text."""

    tokens: NDArray[np.int64]
    befores: NDArray[np.int64]  # the token before each
    parents: NDArray[np.int64]
    levels: NDArray[np.int64]  # pairs of the state, 1 for node 0
    firsts: NDArray[np.int64]  # first child; children stand together, largest weight first
    counts: NDArray[np.int64]  # children; -1: not expanded yet
    priors: NDArray[np.float64]  # weight in the table
    visits: NDArray[np.int64]
    rewards: NDArray[np.float64]  # summed


@compiled
def pair_key(before: int, token: int) -> int:
    """The second half of a table's key; the first half of a pair's is 0."""
    return ((before + 1) << 32) | (token + 1)


@compiled
def search(table: Table, owner: int, before: int, token: int, settings: Settings, seed: int) -> Search:
    room = 1 + settings.iterations * table.ids.shape[1]
    found = Search(
        np.empty(room, dtype=np.int64), np.empty(room, dtype=np.int64), np.empty(room, dtype=np.int64),
        np.empty(room, dtype=np.int64), np.empty(room, dtype=np.int64), np.empty(room, dtype=np.int64),
        np.empty(room), np.empty(room, dtype=np.int64), np.empty(room),
    )  # fmt: skip
    _set(found, 0, token, before, -1, 1, 0.0)
    made = 1
    bits = np.uint64(seed)
    said = np.empty(settings.length + 1, dtype=np.int64)
    for _ in range(settings.iterations):
        node = 0
        while found.counts[node] > 0:
            node = _select(found, node, settings)
        if found.counts[node] < 0 and found.levels[node] < settings.length:
            made = _expand(table, owner, found, node, made)
            if found.counts[node] > 0:
                node = found.firsts[node]
        level = found.levels[node]
        at, worth = node, 1.0
        for i in range(level, 0, -1):
            said[i] = found.tokens[at]
            worth += found.priors[at]
            at = found.parents[at]
        said[0] = before
        while level < settings.length:
            entry = find(table, owner, 0, pair_key(said[level - 1], said[level]))
            if entry < 0:
                break
            bits += _GOLDEN
            pick = _draw(table, entry, _uniform(bits))
            level += 1
            said[level] = table.ids[entry, pick]
            worth += table.values[entry, pick]
        if settings.as_published:
            worth = _published(table, owner, said, level)
        while node >= 0:
            found.visits[node] += 1
            found.rewards[node] += worth
            node = found.parents[node]
    return Search(
        found.tokens[:made], found.befores[:made], found.parents[:made], found.levels[:made], found.firsts[:made],
        found.counts[:made], found.priors[:made], found.visits[:made], found.rewards[:made],
    )  # fmt: skip


@compiled
def _set(found: Search, node: int, token: int, before: int, parent: int, level: int, prior: float) -> None:
    found.tokens[node], found.befores[node], found.parents[node], found.levels[node] = token, before, parent, level
    found.firsts[node], found.counts[node], found.priors[node] = 0, -1, prior
    found.visits[node], found.rewards[node] = 0, 0.0


@compiled
def _expand(table: Table, owner: int, found: Search, node: int, made: int) -> int:
    """All successors at once; how many nodes there are now."""
    entry = find(table, owner, 0, pair_key(found.befores[node], found.tokens[node]))
    found.firsts[node], found.counts[node] = made, 0
    if entry < 0:
        return made
    for i in range(size(table, entry)):
        _set(found, made, table.ids[entry, i], found.tokens[node], node, found.levels[node] + 1, table.values[entry, i])
        made += 1
    found.counts[node] = made - found.firsts[node]
    return made


@compiled
def _select(found: Search, node: int, settings: Settings) -> int:
    visits = float(found.visits[node])
    scale = (settings.c1 + np.log((visits + settings.c2 + 1.0) / settings.c2)) * np.sqrt(visits)
    best, score = -1, -np.inf
    for child in range(found.firsts[node], found.firsts[node] + found.counts[node]):
        n = found.visits[child]
        if n == 0:
            return child
        value = found.rewards[child] / n + found.priors[child] * scale / (1.0 + n)
        if value > score:
            best, score = child, value
    return best


@compiled
def _draw(table: Table, entry: int, u: float) -> int:
    """A successor in proportion to its weight."""
    count = size(table, entry)
    total = 0.0
    for i in range(count):
        total += table.values[entry, i]
    reached = 0.0
    for i in range(count):
        reached += table.values[entry, i]
        if reached > u * total:
            return i
    return count - 1


@compiled
def _published(table: Table, owner: int, said: NDArray[np.int64], level: int) -> float:
    worth = 1.0
    for i in range(1, level):
        entry = find(table, owner, 0, pair_key(said[i - 1], said[i]))
        if entry >= 0:
            for j in range(size(table, entry)):
                if table.ids[entry, j] == said[i]:
                    worth += table.values[entry, j]
    return worth


@compiled
def most_visited(
    table: Table, owner: int, odds: Odds, found: Search, nodes: int, depth: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Tokens, parents and weights of the most visited prefixes, each with its last pair's likeliest successor."""
    order = np.argsort(-found.visits, kind="mergesort")  # of equals the one made earlier: a parent before its child
    tokens, parents, weights = (
        np.empty(nodes + 1, dtype=np.int64),
        np.empty(nodes + 1, dtype=np.int64),
        np.ones(nodes + 1),
    )
    tokens[0], parents[0] = found.tokens[0], -1
    stands = np.full(len(order), -1, dtype=np.int64)
    ends = np.full(nodes + 1, -1, dtype=np.int64)  # of each node: the successor that was appended to it
    stands[0] = 0
    made = 1
    for node in order:
        if made > nodes or found.visits[node] == 0:
            break
        if node > 0:
            parent = stands[found.parents[node]]
            if parent < 0 or found.levels[node] - 1 > depth:
                continue
            if ends[parent] >= 0 and tokens[ends[parent]] == found.tokens[node]:
                stands[node] = ends[parent]
            else:
                entry = find(table, owner, 0, pair_key(found.befores[found.parents[node]], found.befores[node]))
                rank = node - found.firsts[found.parents[node]]
                weights[made] = weights[parent] * _chance(table, odds, entry, rank)
                tokens[made], parents[made] = found.tokens[node], parent
                stands[node] = made
                made += 1
        at = stands[node]
        if made > nodes or found.levels[node] > depth:
            continue
        entry = find(table, owner, 0, pair_key(found.befores[node], found.tokens[node]))
        if entry >= 0 and ends[at] < 0:
            ends[at] = made
            tokens[made], parents[made] = table.ids[entry, 0], at
            weights[made] = weights[at] * _chance(table, odds, entry, 0)
            made += 1
    return tokens[:made], parents[:made], weights[:made]


@compiled
def _chance(table: Table, odds: Odds, entry: int, rank: int) -> float:
    total = 0.0
    for i in range(size(table, entry)):
        total += table.values[entry, i]
    return chance_of(odds, 0, rank, table.values[entry, rank] / total)


@compiled
def _uniform(x: np.uint64) -> float:
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    x = x ^ (x >> np.uint64(31))
    return (float(x >> np.uint64(12)) + 0.5) * 2.0**-52
