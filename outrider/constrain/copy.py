"""Verbatim quotes: between two markers every token goes on with a stretch of the prompt; or the whole text is one.

RecaLLM (arXiv 2604.09494), the decoding part. Exact: what may follow are the edges of a suffix automaton of the prompt,
whose nodes are the states, so each node of a tree has one for nothing. Ids that are no text (a template's marks) end
what can be quoted, and the markers are never quoted themselves. Building it costs microseconds a token of the prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import InputError

LONGEST = 128  # tokens of a quote between markers
KEPT = 16  # prompts whose automata are kept
BRANCHES, AHEAD = 3, 64  # of what is drafted in a quote


class Stretches:
    """The suffix automaton of all stretches of a text between `barriers`: node 0 is the empty stretch."""

    def __init__(self, tokens: Sequence[int], barriers: Collection[int] = ()) -> None:
        self.edges: list[dict[int, int]] = [{}]
        self.counts = [0]  # times that a node's stretches occur, once `_count` has run
        self._link, self._length, last = [-1], [0], 0
        for token in tokens:
            last = 0 if token in barriers else self._add(last, int(token))
        order = sorted(range(1, len(self.edges)), key=lambda node: -self._length[node])
        for node in order:
            self.counts[self._link[node]] += self.counts[node]

    def _add(self, last: int, token: int) -> int:
        if token in self.edges[last]:  # this stretch stood in an earlier part
            node = self._split(last, token)
            self.counts[node] += 1
            return node
        new = self._node(self._length[last] + 1, {}, 1)
        at = last
        while at >= 0 and token not in self.edges[at]:
            self.edges[at][token] = new
            at = self._link[at]
        self._link[new] = 0 if at < 0 else self._split(at, token)
        return new

    def _split(self, at: int, token: int) -> int:
        """The node behind `at` whose longest stretch is one longer than that of `at`."""
        behind = self.edges[at][token]
        if self._length[behind] == self._length[at] + 1:
            return behind
        twin = self._node(self._length[at] + 1, dict(self.edges[behind]), 0)
        self._link[twin], self._link[behind] = self._link[behind], twin
        while at >= 0 and self.edges[at].get(token) == behind:
            self.edges[at][token] = twin
            at = self._link[at]
        return twin

    def _node(self, length: int, edges: dict[int, int], count: int) -> int:
        self.edges.append(edges)
        self.counts.append(count)
        self._link.append(0)
        self._length.append(length)
        return len(self.edges) - 1


class Place(NamedTuple):
    """A state: where in the prompt's automaton a quote stands."""

    source: Stretches
    node: int  # -1: outside of a quote
    length: int  # tokens of the quote so far


@dataclass(frozen=True, slots=True, eq=False)
class CopyFrom:
    """With markers, a quote begins behind `open_id` and ends with `close_id`; without, the whole text is one."""

    vocab_size: int
    open_id: int | None = None
    close_id: int | None = None
    longest: int = LONGEST
    barriers: frozenset[int] = frozenset()  # ids that are not quoted
    source_ids: Sequence[int] | None = None  # what may be quoted; None: the prompt
    _made: OrderedDict[tuple[int, ...], Stretches] = field(default_factory=OrderedDict)
    _rows: OrderedDict[tuple[int, int], NDArray[np.int32]] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        markers = [id for id in (self.open_id, self.close_id) if id is not None]
        if len(markers) == 1 or len({*markers}) < len(markers) or any(not 0 <= id < self.vocab_size for id in markers):
            raise InputError(
                f"quote marks are {self.open_id} and {self.close_id}; give two different token ids, or none"
            )

    def start(self, prompt: Sequence[int]) -> Place:
        key = tuple(int(token) for token in (prompt if self.source_ids is None else self.source_ids))
        if key not in self._made:
            marks = {id for id in (self.open_id, self.close_id) if id is not None}
            self._made[key] = Stretches(key, self.barriers | marks)
            while len(self._made) > KEPT:
                self._made.popitem(last=False)
        return Place(self._made[key], -1 if self.open_id is not None else 0, 0)

    def advance(self, state: Place, token: int) -> Place | None:
        if state.node < 0:
            if not 0 <= token < self.vocab_size:
                return None
            return Place(state.source, 0, 0) if token == self.open_id else state
        if token == self.close_id:
            return Place(state.source, -1, 0)
        behind = state.source.edges[state.node].get(token) if self._goes_on(state) else None
        return None if behind is None else Place(state.source, behind, state.length + 1)

    def mask(self, states: Sequence[Place]) -> NDArray[np.int32]:
        return np.stack([self._row(state) for state in states])

    def allows(self, state: Place, token: int) -> bool:
        return self.advance(state, token) is not None

    def forced(self, state: Place) -> Sequence[int]:
        """The longest way on that has one direction only; a quote may end in it all the same."""
        return next(iter(self.continuations(state, 1)), ())

    def continuations(self, state: Place, branches: int = BRANCHES) -> list[list[int]]:
        """Where a quote goes on, the most frequent ways first; nothing at its beginning, where all is open."""
        if state.node <= 0:
            return []
        runs: list[list[int]] = []
        waiting: list[tuple[int, int, list[int]]] = [(state.source.counts[state.node], state.node, [])]
        room = AHEAD if self.close_id is None else min(AHEAD, self.longest - state.length)
        while waiting and len(runs) < branches:
            waiting.sort(key=lambda one: -one[0])
            _, node, run = waiting.pop(0)
            edges = state.source.edges[node]
            while len(edges) == 1 and len(run) < room:
                ((token, node),) = edges.items()
                run = [*run, token]
                edges = state.source.edges[node]
            if branches == 1 or not edges or len(run) >= room:
                runs += [run] if run else []
                continue
            ways = sorted(edges.items(), key=lambda edge: -state.source.counts[edge[1]])[:branches]
            waiting += [(state.source.counts[behind], behind, [*run, token]) for token, behind in ways]
        return runs

    def complete(self, state: Place) -> bool:
        if self.open_id is not None:
            return state.node < 0
        return state.length > 0 or not state.source.edges[0]

    def _goes_on(self, state: Place) -> bool:
        return self.close_id is None or state.length < self.longest

    def _row(self, state: Place) -> NDArray[np.int32]:
        if state.node < 0:
            return _bits(range(self.vocab_size), self.vocab_size)
        key = (id(state.source), state.node if self._goes_on(state) else -1)
        if key not in self._rows:
            tokens = [*state.source.edges[state.node]] if self._goes_on(state) else []
            self._rows[key] = _bits(tokens + ([] if self.close_id is None else [self.close_id]), self.vocab_size)
            while len(self._rows) > 256:
                self._rows.popitem(last=False)
        return self._rows[key].copy()


def _bits(tokens: Collection[int], vocab_size: int) -> NDArray[np.int32]:
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
