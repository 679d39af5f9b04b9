"""Token Recycling: for every token the successors that the target ranked highest when it last saw it, walked as a tree.

Paper: Luo et al. (arXiv 2408.08696). Lossless: candidates are point masses chosen from the matrix alone, greedy or
sampled. Every row that the target computes teaches, rejected candidates too; the committed path is written last. Beside
the ids stand their probabilities, so that a tree can grow where it is likeliest to be accepted (`adaptive`, not in the
paper) instead of in one fixed form (`static`). Cost: a matrix of 8 bytes x vocabulary x 8, microseconds a step, and one
top-8 over the rows that were verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import InputError
from outrider.core.numeric.compiled import compiled
from outrider.core.proposals import Proposals
from outrider.core.protocols import Context, Noise
from outrider.core.records import Budget, Chunk, Needs, StepRecord, TopRows
from outrider.core.tree import TokenTree, fixed, root
from outrider.draft.table.odds import Odds, chance_of, count_offer, new_odds, reset, restore_odds, stored_odds
from outrider.draft.table.positions import Path, Positions, positions
from outrider.draft.table.top_rows import top_of

# Children of each place, level by level: 80 places on six levels, the first successor of the first kept longest.
_CHILDREN = (
    (8,),
    (8, 4, 3, 2, 1, 1, 1, 1),
    (8, 3, 2, 1, 1, 1, 0, 0, 3, 1, 1, 0, 2, 0, 0, 1, 0, 1, 0, 0, 0),
    (5, 2, 1, 0, 0, 0, 0, 0, 2, 0, 0, 1, 0, 1, 0, 0, 2, 0, 0, 0, 0, 1, 0, 0, 0),
    (3, 1, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0),
    (2, 1, 0, 0, 0, 0, 0, 0),
)
_WORTH = (0.55, 0.14, 0.07, 0.04, 0.03, 0.02, 0.015, 0.01)  # of a rank: orders the places for smaller budgets


class Matrix(NamedTuple):
    ids: NDArray[np.int32]  # [V, k], likeliest first, -1 where nothing is known
    logprobs: NDArray[np.float32]  # [V, k]

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.logprobs.nbytes


@dataclass(slots=True)
class _Seat:
    context: Context
    matrix: Matrix | None  # None: no memory left for a private one


@dataclass(slots=True)
class Recycling:
    """`scope` private gives each sequence a copy of what was remembered; what it learns ends with it."""

    vocab_size: int
    successors: int = 8
    shape: Literal["adaptive", "static"] = "adaptive"
    learn_prompt: bool = True
    scope: Literal["shared", "private"] = "shared"
    memory_bytes: int = 128 << 20
    static: Positions = field(default_factory=lambda: published())
    name: str = "token-recycling"
    shared_noise: bool = False
    _matrix: Matrix = field(init=False)
    _odds: Odds = field(default_factory=lambda: new_odds(1))
    _seats: dict[int, _Seat] = field(default_factory=dict)
    _spare: list[Matrix] = field(default_factory=list)

    def __post_init__(self) -> None:
        one = self.vocab_size * self.successors * 8
        least = one if self.scope == "shared" else 2 * one
        if self.memory_bytes < least:
            raise InputError(f"option memory_bytes is {self.memory_bytes}; the least that works here is {least}")
        self._matrix = _empty(self.vocab_size, self.successors)

    @property
    def needs(self) -> Needs:
        return Needs(logits=self.learn_prompt, top=self.successors)

    @property
    def nbytes(self) -> int:
        seats = self._seats.values() if self.scope == "private" else ()
        matrices = [self._matrix, *self._spare, *(seat.matrix for seat in seats if seat.matrix is not None)]
        return sum(matrix.nbytes for matrix in matrices)

    def begin(self, slot: int, context: Context) -> None:
        matrix = self._matrix if self.scope == "shared" else self._copy()
        self._seats[slot] = _Seat(context, matrix)

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks if self.learn_prompt else ():
            matrix = self._seats[chunk.slot].matrix
            if matrix is not None and (top := top_of(chunk.scores, self.successors)) is not None:
                tokens = self._known(np.asarray(chunk.tokens, dtype=np.int64), top)
                _write(matrix, tokens, np.arange(len(tokens)), top.ids, top.logprobs)

    def end(self, slot: int) -> None:
        seat = self._seats.pop(slot, None)
        if seat is not None and seat.matrix is not None and self.scope == "private":
            self._spare.append(seat.matrix)

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        return Proposals([self._grow(self._seats[slot], budget) for slot, budget in zip(slots, budgets, strict=True)])

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        for slot, record in zip(slots, records, strict=True):
            matrix = self._seats[slot].matrix
            if matrix is None or (top := top_of(record.scores, self.successors)) is None:
                continue
            tokens, path = self._known(record.tree.tokens, top), np.array((0, *record.verdict.path), dtype=np.int64)
            _learn(matrix, self._odds, tokens, path, record.verdict.next_token, top.ids, top.logprobs)

    def memory(self) -> dict[str, NDArray[Any]]:
        return {"ids": self._matrix.ids.copy(), "logprobs": self._matrix.logprobs.copy(), **stored_odds(self._odds)}

    def remember(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        ids, logprobs = (np.asarray(arrays.get(name, np.zeros(0))) for name in ("ids", "logprobs"))
        shape = self._matrix.ids.shape
        if ids.shape != shape or logprobs.shape != shape or ids.dtype.kind != "i" or logprobs.dtype.kind != "f":
            raise InputError(f"the stored matrix is {ids.shape}, here it is {shape}; it is of another model or setting")
        if (ids < -1).any() or (ids >= self.vocab_size).any() or np.isnan(logprobs).any() or (logprobs > 1e-3).any():
            raise InputError(f"the stored matrix holds ids outside 0..{self.vocab_size - 1} or no probabilities")
        restore_odds(self._odds, arrays)
        self._matrix.ids[:], self._matrix.logprobs[:] = ids, logprobs

    def forget(self) -> None:
        self._matrix.ids[:] = -1
        self._matrix.logprobs[:] = -np.inf
        reset(self._odds)

    def _known(self, tokens: NDArray[np.int64], top: TopRows) -> NDArray[np.int64]:
        """The same, if each is a row of the matrix and has its successors: compiled code would not notice."""
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise InputError(f"a token is not one of the {self.vocab_size} that this drafter knows")
        if top.ids.shape != (len(tokens), self.successors) or top.ids.max() >= self.vocab_size:
            raise InputError(f"the target brought {top.ids.shape} successors of {len(tokens)} tokens")
        return tokens

    def _copy(self) -> Matrix | None:
        """A private matrix that starts from what was remembered, while the limit leaves room for one."""
        if not self._spare and self.nbytes + self._matrix.nbytes > self.memory_bytes:
            return None
        matrix = self._spare.pop() if self._spare else _empty(self.vocab_size, self.successors)
        matrix.ids[:], matrix.logprobs[:] = self._matrix.ids, self._matrix.logprobs
        return matrix

    def _grow(self, seat: _Seat, budget: Budget) -> TokenTree:
        pending = int(seat.context.tokens[-1])
        if seat.matrix is None or pending >= self.vocab_size:
            return root(pending)
        if self.shape == "static":
            s = self.static
            grown = _fill(seat.matrix, self._odds, pending, s.parents, s.ranks, s.depths, budget.nodes, budget.depth)
        else:
            grown = _likeliest(seat.matrix, self._odds, pending, budget.nodes, budget.depth)
        return fixed(*grown[:2], self.name, grown[2])


def published() -> Positions:
    """The paper's form of 80 places, ordered for smaller budgets by what ranks are usually worth."""
    level: list[Path] = [()]
    paths: list[Path] = []
    for counts in _CHILDREN:
        level = [(*path, rank) for path, count in zip(level, counts, strict=True) for rank in range(count)]
        paths += level
    return positions(sorted(paths, key=lambda path: (-np.prod([_WORTH[rank] for rank in path]), len(path), path)))


def _empty(vocab_size: int, successors: int) -> Matrix:
    shape = (vocab_size, successors)
    return Matrix(np.full(shape, -1, dtype=np.int32), np.full(shape, -np.inf, dtype=np.float32))


@compiled
def _write(
    matrix: Matrix, tokens: NDArray[np.int64], rows: NDArray[np.int64], ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
) -> None:  # fmt: skip
    """In this order: of a token that occurs twice the later row stays."""
    for row in rows:
        matrix.ids[tokens[row]] = ids[row]
        matrix.logprobs[tokens[row]] = logprobs[row]


@compiled
def _learn(
    matrix: Matrix, odds: Odds, tokens: NDArray[np.int64], path: NDArray[np.int64], next_token: int,
    ids: NDArray[np.int32], logprobs: NDArray[np.float32],
) -> None:  # fmt: skip
    for i in range(len(path)):
        token = tokens[path[i]]
        after = tokens[path[i + 1]] if i + 1 < len(path) else next_token
        for rank in range(matrix.ids.shape[1]):
            if matrix.ids[token, rank] >= 0:
                p = np.exp(matrix.logprobs[token, rank])
                count_offer(odds, 0, rank, p, matrix.ids[token, rank] == after)
    _write(matrix, tokens, np.arange(len(tokens)), ids, logprobs)
    _write(matrix, tokens, path, ids, logprobs)  # committed evidence last


@compiled
def _likeliest(
    matrix: Matrix, odds: Odds, pending: int, nodes: int, depth: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Always the candidate of largest path chance next, until the budget or the table is used up."""
    tokens, parents = np.empty(nodes + 1, dtype=np.int64), np.empty(nodes + 1, dtype=np.int64)
    weights, depths = np.empty(nodes + 1), np.empty(nodes + 1, dtype=np.int64)
    ranks, offers = np.zeros(nodes + 1, dtype=np.int64), np.zeros(nodes + 1)  # of each node's next child
    tokens[0], parents[0], weights[0], depths[0] = pending, -1, 1.0, 0
    offers[0] = _offer(matrix, odds, pending, 0) if depth > 0 else 0.0
    size = 1
    while size <= nodes:
        best = 0
        for node in range(1, size):
            if offers[node] > offers[best]:
                best = node
        if offers[best] <= 0.0:
            break
        token = matrix.ids[tokens[best], ranks[best]]
        tokens[size], parents[size], weights[size], depths[size] = token, best, offers[best], depths[best] + 1
        if depths[size] < depth:
            offers[size] = weights[size] * _offer(matrix, odds, token, 0)
        ranks[best] += 1
        # a later sibling never counts for more than an earlier one
        offers[best] = min(offers[best], weights[best] * _offer(matrix, odds, tokens[best], ranks[best]))
        size += 1
    return tokens[:size], parents[:size], weights[:size]


@compiled
def _fill(
    matrix: Matrix, odds: Odds, pending: int, above: NDArray[np.int64], ranks: NDArray[np.int64],
    depths: NDArray[np.int64], nodes: int, depth: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:  # fmt: skip
    """Places in order of worth; one whose parent or successor is missing is passed over with all below it."""
    tokens, parents = np.empty(nodes + 1, dtype=np.int64), np.empty(nodes + 1, dtype=np.int64)
    weights, stands = np.empty(nodes + 1), np.full(len(above), -1, dtype=np.int64)
    tokens[0], parents[0], weights[0], stands[0] = pending, -1, 1.0, 0
    size = 1
    for place in range(1, len(above)):
        parent = stands[above[place]]
        if size > nodes:
            break
        if parent < 0 or depths[place] > depth or ranks[place] >= matrix.ids.shape[1]:
            continue
        chance = _offer(matrix, odds, tokens[parent], ranks[place])
        if chance <= 0.0:
            continue
        tokens[size], parents[size] = matrix.ids[tokens[parent], ranks[place]], parent
        weights[size], stands[place] = weights[parent] * chance, size
        size += 1
    return tokens[:size], parents[:size], weights[:size]


@compiled
def _offer(matrix: Matrix, odds: Odds, token: int, rank: int) -> float:
    """The chance that the token's successor of this rank comes next; 0 where there is none."""
    if rank >= matrix.ids.shape[1] or matrix.ids[token, rank] < 0:
        return 0.0
    return max(chance_of(odds, 0, rank, np.exp(matrix.logprobs[token, rank])), 1e-9)
