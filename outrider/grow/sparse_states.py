"""Sparse states: trees of guesses, and of rows that make the next guesses, of most tokens a step for a number of rows.

arXiv 2405.18628. A step is in state n where the last accepted node had n prompt rows behind it: then there are guesses
for n tokens, by rank, and a tree of them. Rows are shared between candidates and prompts, which decide the states to
come; the states are a Markov chain, whose tokens a step are maximised. Lossless: forms are fixed beforehand. Cost:
tenths of a second when a method is built.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Path = tuple[int, ...]  # the rank of each guess from the first candidate down
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class State:
    """What a step runs behind the pending token; entry 0 of each array is the pending token's."""

    paths: tuple[Path, ...]  # of the candidates, parents before children
    chances: Floats  # [1 + candidates]: that a step comes past this node
    stops: Floats  # [1 + candidates]: that it is the last accepted one
    prompts: NDArray[np.int64]  # [1 + candidates]: rows behind it, and the next state if the step stops there

    @property
    def gain(self) -> float:
        """Expected candidates that are accepted."""
        return float(self.chances[1:].sum())


@dataclass(frozen=True, slots=True)
class States:
    """One for each number of guesses, and what they bring."""

    states: tuple[State, ...]
    shares: Floats  # of the steps that are in each state, in the long run
    tokens: float  # a step, the target's own included


def best_paths(rates: Floats, depth: int, count: int) -> list[tuple[Path, float]]:
    """The `count` paths of the largest products of rates [depths, ranks], with these; parents before children."""
    ranked = np.argsort(-rates, axis=1, kind="stable")
    rates, order = np.take_along_axis(rates, ranked, axis=1), list[tuple[Path, float]]()
    heap: list[tuple[float, int, Path, float]] = [(-float(rates[0, 0]), 0, (0,), 1.0)] if depth > 0 else []
    pushed = 1  # among equals the first comes first, so that a parent is before its children
    while heap and len(order) < count:
        minus, _, places, above = heapq.heappop(heap)
        order.append((tuple(int(ranked[at, place]) for at, place in enumerate(places)), -minus))
        level, place = len(places) - 1, places[-1]
        if place + 1 < rates.shape[1]:  # the next best sibling
            heapq.heappush(heap, (-above * rates[level, place + 1], pushed, (*places[:-1], place + 1), above))
        if level + 1 < min(depth, len(rates)):  # the best child
            heapq.heappush(heap, (minus * rates[level + 1, 0], pushed + 1, (*places, 0), -minus))
        pushed += 2
    return order


def sparse_states(rates: Floats, rows: int, members: int = 1) -> States:
    """The best that is found for so many rows beside the pending token's, a prompt taking `members` of them.

    The numbers of candidates are improved one state at a time until none of them can be.
    """
    deepest = len(rates)
    ways = [best_paths(rates, depth, max(0, rows - members)) for depth in range(deepest + 1)]
    sizes = [0] + [min(len(way), max(1, rows // 2)) for way in ways[1:]]
    best = _chain(ways, sizes, rows, members)
    step = max(1, rows // 16)
    improved = True
    while improved:
        improved = False
        for state in range(1, deepest + 1):
            for size in range(0, len(ways[state]) + 1, step):
                tried = [*sizes[:state], size, *sizes[state + 1 :]]
                found = _chain(ways, tried, rows, members)
                if found.tokens > best.tokens + 1e-9:
                    best, sizes, improved = found, tried, True
    return best


def best_rows(
    rates: Floats, members: int, choices: Sequence[int], seconds: Callable[[int], float]
) -> tuple[int, States]:
    """The number of rows beside the pending token's of most tokens a second, and its states."""
    found = {rows: sparse_states(rates, rows, members) for rows in choices}
    rows = max(found, key=lambda rows: found[rows].tokens / seconds(1 + rows))
    return rows, found[rows]


def _chain(ways: Sequence[Sequence[tuple[Path, float]]], sizes: Sequence[int], rows: int, members: int) -> States:
    """With so many candidates in each state."""
    trees = [way[:size] for way, size in zip(ways, sizes, strict=True)]
    gains = np.array([sum(chance for _, chance in tree) for tree in trees])
    states = tuple(_state(tree, gains, (rows - len(tree)) // members) for tree in trees)
    moves = np.zeros((len(states), len(states)))
    for number, state in enumerate(states):
        np.add.at(moves[number], state.prompts, state.stops)
    shares = _stationary(moves)
    return States(states, shares, float(1 + shares @ gains))


def _state(tree: Sequence[tuple[Path, float]], gains: Floats, room: int) -> State:
    """Prompts go where they bring most: each node begins with all, and the least useful last ones are taken away."""
    index = {(): 0} | {path: at for at, (path, _) in enumerate(tree, 1)}
    chances = np.array([1.0, *(chance for _, chance in tree)])
    stops = chances.copy()
    for path, chance in tree:
        stops[index[path[:-1]]] -= chance
    prompts = np.full(len(chances), len(gains) - 1, dtype=np.int64)
    worth = np.diff(gains, prepend=0.0)  # worth[n]: of the n-th prompt, once the step stops there
    heap = [(float(stop * worth[-1]), -node, node) for node, stop in enumerate(stops)]
    heapq.heapify(heap)
    left = int(prompts.sum()) - max(0, room)
    while left > 0:
        _, _, node = heapq.heappop(heap)
        prompts[node] -= 1
        left -= 1
        if prompts[node]:
            heapq.heappush(heap, (float(stops[node] * worth[prompts[node]]), -node, node))
    return State(tuple(path for path, _ in tree), chances, stops, prompts)


def _stationary(moves: Floats) -> Floats:
    """The shares that steps leave as they are, from a beginning without guesses."""
    count = len(moves)
    start = np.zeros(count)
    start[0] = 1.0
    lazy = np.linalg.matrix_power(0.5 * (moves + np.eye(count)), 256)  # halves break cycles and keep the shares
    return start @ lazy
