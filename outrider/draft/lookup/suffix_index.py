"""A suffix automaton with occurrence counts: every substring of some token texts, in flat arrays run by compiled code.

Structure: Blumer et al. 1985, as SAM-Decoding (arXiv 2411.10666) uses it; counts of substrings up to `depth` tokens as
in SuffixDecoding (arXiv 2411.04975), exact while the text grows. A state stands for substrings that always occur at the
same places; its link is the state of the longest shorter suffix seen elsewhere too. Texts are kept apart by going back
to the root, so no match spans two of them. Cost: O(1) amortised a token to extend, at most `depth` states to count;
at most two states and three edges a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.core.numeric.compiled import compiled

# Fields of a state (int32). Edges are named by their number plus one, so that untouched memory means "none".
LENGTH, LINK, COUNT, LATEST, HEAD, TOP = 0, 1, 2, 3, 4, 5  # LATEST: tokens read when it last occurred
WIDTH = 4  # most frequent continuations that a state keeps in order
_STATE = TOP + WIDTH
SOURCE, TOKEN, TO, NEXT = 0, 1, 2, 3  # fields of an edge (int32); NEXT: another edge of the same state
STATES, EDGES, LAST, READ, ACTIVE, REACH = 0, 1, 2, 3, 4, 5  # what is in use; where the text stands
_SLOTS = 4  # places of the edge table a token: at most three are taken
BYTES_PER_TOKEN = 4 * (2 * _STATE + 3 * 4 + _SLOTS)

Arrays = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]


@dataclass(slots=True)
class SuffixIndex:
    """Room for `capacity` tokens, touched only as it fills. `extend` and `separate` change state."""

    capacity: int
    depth: int  # longest substring whose occurrences are counted
    arrays: Arrays = field(init=False, repr=False)  # states, edges, edge table, marks

    def __post_init__(self) -> None:
        self.arrays = (
            np.zeros((2 * self.capacity + 2, _STATE), dtype=np.int32),
            np.zeros((3 * self.capacity + 3, 4), dtype=np.int32),
            np.zeros(_SLOTS * self.capacity + 8, dtype=np.int32),
            np.zeros(6, dtype=np.int64),
        )
        self.arrays[0][0, LINK] = -1
        self.arrays[3][STATES] = 1

    def __len__(self) -> int:
        """Tokens read."""
        return int(self.arrays[3][READ])

    @property
    def room(self) -> int:
        return self.capacity - len(self)

    def extend(self, tokens: NDArray[np.int64]) -> None:
        assert len(tokens) <= self.room, "the index is full"
        extend(self.arrays, tokens, self.depth)

    def separate(self) -> None:
        """The text ends here; what follows is another one."""
        self.arrays[3][LAST] = self.arrays[3][ACTIVE] = self.arrays[3][REACH] = 0

    def count(self, tokens: NDArray[np.int64]) -> int:
        """Occurrences of these at most `depth` tokens."""
        state, length = match(self.arrays, tokens)
        return int(self.arrays[0][state, COUNT]) if length == len(tokens) else 0


@compiled
def find(edges: NDArray[np.int32], table: NDArray[np.int32], state: int, token: int) -> int:
    """The edge of `state` that reads `token`, or -1."""
    slot = place(len(table), state, token)
    while table[slot]:
        edge = table[slot] - 1
        if edges[edge, SOURCE] == state and edges[edge, TOKEN] == token:
            return edge
        slot = slot + 1 if slot + 1 < len(table) else 0
    return -1


@compiled
def place(size: int, state: int, token: int) -> int:
    mixed = (np.uint64(state) << np.uint64(32) | np.uint64(token)) * np.uint64(0x9E3779B97F4A7C15)
    return int(np.int64(((mixed >> np.uint64(32)) * np.uint64(size)) >> np.uint64(32)))  # signed: slots are compared


@compiled
def step(index: Arrays, state: int, length: int, token: int) -> tuple[int, int]:
    """The longest suffix of (matched text, token) that occurs: its state and length."""
    states, edges, table, _ = index
    while True:
        edge = find(edges, table, state, token)
        if edge >= 0:
            return edges[edge, TO], length + 1
        if state == 0:
            return 0, 0
        state = states[state, LINK]
        length = states[state, LENGTH]


@compiled
def shorten(states: NDArray[np.int32], state: int, length: int) -> int:
    """The state of the last `length` tokens of what `state` stands for."""
    while state and states[states[state, LINK], LENGTH] >= length:
        state = states[state, LINK]
    return state


@compiled
def match(index: Arrays, tokens: NDArray[np.int64]) -> tuple[int, int]:
    """The longest suffix of `tokens` that occurs in the index: its state and length."""
    state, length = 0, 0
    if not index[3][READ]:
        return state, length  # its arrays were never touched, and looking into them would cost the most
    for token in tokens:
        state, length = step(index, state, length, token)
    return state, length


@compiled
def earlier(index: Arrays, depth: int) -> tuple[int, int]:
    """The longest suffix of the text being read that also occurs before its end, cut to `depth` tokens."""
    states, _, _, marks = index
    state = max(states[marks[LAST], LINK], 0)
    length = min(states[state, LENGTH], depth)
    return shorten(states, state, length), length


@compiled
def extend(index: Arrays, tokens: NDArray[np.int64], depth: int) -> None:
    states, edges, table, marks = index
    for token in tokens:
        _read(states, edges, table, marks, token)
        _count(states, edges, table, marks, token, depth)


@compiled
def _read(states, edges, table, marks, token):  # type: ignore[no-untyped-def]
    """Make the automaton accept every suffix of the text with one more token."""
    last = marks[LAST]
    edge = find(edges, table, last, token)
    if edge >= 0:  # an earlier text began in the same way
        marks[LAST] = _stretch(states, edges, table, marks, last, token, edges[edge, TO])
        return
    new = marks[STATES]
    marks[STATES] += 1
    states[new, LENGTH] = states[last, LENGTH] + 1
    state = last
    while state >= 0 and edge < 0:
        _connect(states, edges, table, marks, state, token, new)
        state = states[state, LINK]
        if state >= 0:
            edge = find(edges, table, state, token)
    if state >= 0:
        states[new, LINK] = _stretch(states, edges, table, marks, state, token, edges[edge, TO])
    marks[LAST] = new


@compiled
def _connect(states, edges, table, marks, state, token, to):  # type: ignore[no-untyped-def]
    edge = marks[EDGES]
    marks[EDGES] += 1
    edges[edge, SOURCE], edges[edge, TOKEN], edges[edge, TO] = state, token, to
    edges[edge, NEXT] = states[state, HEAD]
    states[state, HEAD] = edge + 1
    slot = place(len(table), state, token)
    while table[slot]:
        slot = slot + 1 if slot + 1 < len(table) else 0
    table[slot] = edge + 1
    return edge


@compiled
def _stretch(states, edges, table, marks, state, token, to):  # type: ignore[no-untyped-def]
    """The state of exactly (longest text of `state`, token), where `to` also stands for longer texts: split off."""
    if states[to, LENGTH] == states[state, LENGTH] + 1:
        return to
    short = marks[STATES]
    marks[STATES] += 1
    states[short, LENGTH] = states[state, LENGTH] + 1
    states[short, LINK], states[short, COUNT] = states[to, LINK], states[to, COUNT]
    states[short, LATEST] = states[to, LATEST]
    edge = states[to, HEAD]
    while edge:
        copy = _connect(states, edges, table, marks, short, edges[edge - 1, TOKEN], edges[edge - 1, TO])
        for i in range(TOP, TOP + WIDTH):
            if states[to, i] == edge:
                states[short, i] = copy + 1
        edge = edges[edge - 1, NEXT]
    states[to, LINK] = short
    while state >= 0:
        edge = find(edges, table, state, token)
        if edges[edge, TO] != to:
            break
        edges[edge, TO] = short
        state = states[state, LINK]
    return short


@compiled
def _count(states, edges, table, marks, token, depth):  # type: ignore[no-untyped-def]
    """One more occurrence of every suffix up to `depth` tokens; the suffixes before the token reorder what follows.

    ACTIVE is the state of the last REACH tokens before this one: at most depth - 1, so that one more can be counted.
    """
    marks[READ] += 1
    active = marks[ACTIVE]  # where it has been split since, its link is the shorter part: walked all the same
    to = edges[find(edges, table, active, token), TO]
    state = to
    while state:
        states[state, COUNT] += 1
        states[state, LATEST] = marks[READ]
        state = states[state, LINK]
    state = active
    while state:  # the root's own order is of no use and would be the longest to keep
        _promote(states, edges, state, find(edges, table, state, token))
        state = states[state, LINK]
    marks[REACH] = min(marks[REACH] + 1, depth - 1)
    marks[ACTIVE] = shorten(states, to, marks[REACH])


@compiled
def _promote(states, edges, state, edge):  # type: ignore[no-untyped-def]
    """Keep the continuations of `state` in order after `edge` was taken once more: by count, then the latest first."""
    count = states[edges[edge, TO], COUNT]
    at = TOP
    while at < TOP + WIDTH - 1 and states[state, at] != edge + 1:
        at += 1
    kept = states[state, at]
    if kept and kept != edge + 1 and states[edges[kept - 1, TO], COUNT] > count:
        return
    while at > TOP:
        kept = states[state, at - 1]
        if kept and states[edges[kept - 1, TO], COUNT] > count:
            break
        states[state, at] = kept
        at -= 1
    states[state, at] = edge + 1
