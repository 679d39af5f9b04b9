"""TokenTree: candidates as flat arrays, and the ordered draws that brought them there.

Node 0 is the pending token (already text, not yet in the cache); every other node is a candidate, parents before
children. A verifier never looks at children directly: it reads the *draws* of a node, in order, because an exact
acceptance rule must know how each candidate was chosen. Knows no model and no probability of the target.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import UnsupportedDraws

_NO_PARENT, _NO_DEPTH = np.array([-1], dtype=np.int64), np.array([0], dtype=np.int64)  # of node 0; never written to
FEW = 8  # nodes up to which a loop here is as fast as a compiled one
NOTHING = -1  # a draw without a token, a draw without a child, a draw without a row


class Law(StrEnum):
    """How the draws of one node were made; computed from the draws, never declared."""

    NONE = "none"  # a leaf: nothing was drawn
    FIXED = "fixed"  # point masses only
    IID = "iid"  # every draw from one row (a single sampled draw is this)
    WITHOUT_REPLACEMENT = "without-replacement"  # each row is the previous one less its drawn token
    TOP_PLUS_ONE = "top-plus-one"  # point masses, and one sampled from a row that excludes them
    MIXED = "mixed"  # sampled draws of any rows first, then point masses
    OTHER = "other"  # point masses ahead of sampled draws whose rows may hold them: no coupled rule is exact


@dataclass(frozen=True, slots=True)
class QRow:
    """A sparse draft distribution: the probabilities of a few tokens. What they lack to 1 is that of "no proposal"."""

    ids: NDArray[np.int64]  # [m], distinct
    probs: NDArray[np.float64]  # [m], positive; float32 sources are widened once, so ratios and draws share numbers

    def prob(self, token: int) -> float:
        hit = np.nonzero(self.ids == token)[0]
        return float(self.probs[hit[0]]) if hit.size else 0.0

    def without(self, token: int) -> QRow:
        """The row of the next draw without replacement: `token` removed, the others scaled up to the same total."""
        keep = self.ids != token
        rest = self.probs[keep]
        left = rest.sum()
        scale = self.probs.sum() / left if left > 0 else 0.0
        return QRow(self.ids[keep], rest * scale)


class Draw(NamedTuple):  # a tuple: trees of point masses are made of these, several a step
    """One proposal at a node. `child` is NOTHING when the token was drawn but stands in no node of the forward pass;
    `token` is NOTHING when the row drew "no proposal"; `row` is None for a point mass."""

    token: int
    child: int
    row: QRow | None


class PointDraws(Sequence[tuple[Draw, ...]]):
    """The draws of a tree of point masses, in storage order, made when first read: most such trees become part of
    another one before that, and rules that only follow the target never read them."""

    __slots__ = ("_made", "_parents", "_tokens")

    def __init__(self, tokens: NDArray[np.int64], parents: NDArray[np.int64]) -> None:
        self._tokens, self._parents = tokens, parents
        self._made: tuple[tuple[Draw, ...], ...] | None = None

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, node: Any) -> Any:
        return self._all()[node]

    def __iter__(self) -> Iterator[tuple[Draw, ...]]:
        return iter(self._all())

    def _all(self) -> tuple[tuple[Draw, ...], ...]:
        if self._made is None:
            draws: list[list[Draw]] = [[] for _ in range(len(self))]
            # as Python's integers: indexing arrays costs more
            each = zip(self._tokens.tolist(), self._parents.tolist(), strict=True)
            next(each)
            for node, (token, parent) in enumerate(each, 1):
                draws[parent].append(Draw(token, node, None))
            self._made = tuple(map(tuple, draws))
        return self._made


@dataclass(frozen=True, slots=True)
class TokenTree:
    tokens: NDArray[np.int64]  # [N + 1]
    parents: NDArray[np.int64]  # [N + 1], -1 for node 0
    draws: Sequence[tuple[Draw, ...]]  # per node, in the order they were made
    origins: tuple[str, ...] = ()  # per node: which drafter proposed it; empty means unnamed
    weights: NDArray[np.float64] | None = None  # per node: the drafter's guess that the path down to it is accepted
    depths: NDArray[np.int64] = field(init=False)  # [N + 1], 0 for node 0

    def __post_init__(self) -> None:
        rows = len(self.tokens)
        assert rows >= 1 and len(self.parents) == rows and len(self.draws) == rows, "one entry a node"
        assert self.weights is None or len(self.weights) == rows, "one weight a node"
        object.__setattr__(self, "depths", _depths(self.parents))

    def __len__(self) -> int:
        """Rows of the forward pass: the pending token and every candidate."""
        return len(self.tokens)

    @property
    def candidates(self) -> int:
        return len(self.tokens) - 1

    @property
    def depth(self) -> int:
        return int(self.depths.max()) if len(self.tokens) > 1 else 0

    def children(self, node: int) -> list[int]:
        return [int(i) for i in np.nonzero(self.parents == node)[0]]

    def child(self, node: int, token: int) -> int:
        """The child of `node` that carries `token`, or NOTHING. One token has at most one child."""
        if len(self.tokens) == 1:
            return NOTHING
        hit = np.nonzero((self.parents == node) & (self.tokens == token))[0]
        return int(hit[0]) if hit.size else NOTHING

    def path(self, node: int) -> list[int]:
        """Nodes from the first candidate down to `node`; empty for node 0."""
        nodes: list[int] = []
        while node > 0:
            nodes.append(node)
            node = int(self.parents[node])
        return nodes[::-1]

    def path_tokens(self, node: int) -> list[int]:
        return [int(self.tokens[i]) for i in self.path(node)]

    def ancestor_mask(self) -> NDArray[np.bool_]:
        """mask[i, j]: node i sees node j, that is j is i itself or an ancestor. Siblings never see each other."""
        rows = len(self)
        if rows > FEW:
            return _walks().ancestors(self.parents)  # type: ignore[no-any-return]
        seen: list[int] = []  # one integer a node, bit j set where it sees node j: no loop over pairs
        for i, parent in enumerate(self.parents.tolist()):
            seen.append((1 << i) | (seen[parent] if i else 0))
        width = (rows + 7) // 8
        packed = np.frombuffer(b"".join(bits.to_bytes(width, "little") for bits in seen), dtype=np.uint8)
        return np.unpackbits(packed.reshape(rows, width), axis=1, count=rows, bitorder="little").view(bool)

    def law(self, node: int) -> Law:
        return law_of(self.draws[node])

    @property
    def is_chain(self) -> bool:
        return bool((self.parents == np.arange(-1, len(self) - 1)).all())

    @property
    def is_sampled(self) -> bool:
        return any(draw.row is not None for draws in self.draws for draw in draws)

    def keep(self, nodes: Iterable[int]) -> TokenTree:
        """Prune to these nodes (node 0 and their ancestors always stay).

        Refused where it would cut a sampled draw, its child or the node it was made at: how much to draw is decided
        before drawing (see `mute`).
        """
        kept = {0}
        for node in nodes:
            kept.update([node, *self.path(node)])
        stays = kept | {NOTHING}
        for node, draws in enumerate(self.draws):
            if any(d.row is not None and (node not in kept or d.child not in stays) for d in draws):
                raise UnsupportedDraws("pruning would cut a sampled draw; decide how much to draw before drawing")
        return self._subtree(kept, drop_points=True)

    def mute(self, nodes: Iterable[int]) -> TokenTree:
        """Take these nodes and all below out of the forward pass; the draws that named them stay: still exact."""
        muted = np.zeros(len(self), dtype=bool)
        muted[list(nodes)] = True
        assert not muted[0], "node 0 is the pending token"
        for i in range(1, len(self)):
            muted[i] |= muted[self.parents[i]]
        return self._subtree(set(np.nonzero(~muted)[0].tolist()), drop_points=False)

    def _subtree(self, kept: set[int], drop_points: bool) -> TokenTree:
        order = sorted(kept)
        index = {node: i for i, node in enumerate(order)}
        index[NOTHING] = NOTHING
        draws = tuple(
            tuple(
                Draw(d.token, index.get(d.child, NOTHING), d.row)
                for d in self.draws[node]
                if not (drop_points and d.row is None and d.child not in index)
            )
            for node in order
        )
        parents = np.array([index[int(self.parents[i])] for i in order], dtype=np.int64)
        origins = tuple(self.origins[i] for i in order) if self.origins else ()
        weights = self.weights[order] if self.weights is not None else None
        return TokenTree(self.tokens[order], parents, draws, origins, weights)


def root(pending: int) -> TokenTree:
    """A tree with nothing to verify: plain decoding's step."""
    return TokenTree(np.array([pending], dtype=np.int64), _NO_PARENT, ((),))


def chain(pending: int, tokens: Sequence[int], rows: Sequence[QRow] | None = None, origin: str = "") -> TokenTree:
    """A single path: point masses, or one draw from `rows[i]` at depth i."""
    count = len(tokens)
    ids = np.empty(count + 1, dtype=np.int64)
    ids[0] = pending
    ids[1:] = tokens
    draws = tuple((Draw(int(t), i + 1, rows[i] if rows else None),) for i, t in enumerate(tokens)) + ((),)
    return TokenTree(ids, np.arange(-1, count, dtype=np.int64), draws, ("",) + (origin,) * count if origin else ())


def from_paths(pending: int, paths: Iterable[Sequence[int]], origin: str = "") -> TokenTree:
    """Point-mass candidates from token paths; shared prefixes become shared nodes."""
    tokens, parents = [pending], [-1]
    index: dict[tuple[int, int], int] = {}
    for path in paths:
        node = 0
        for token in path:
            key = (node, int(token))
            if key not in index:
                index[key] = len(tokens)
                tokens.append(int(token))
                parents.append(node)
            node = index[key]
    return fixed(np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64), origin)


def fixed(
    tokens: NDArray[np.int64], parents: NDArray[np.int64], origin: str | Sequence[str] = "",
    weights: NDArray[np.float64] | None = None,
) -> TokenTree:  # fmt: skip
    """A tree of point masses; each child is one draw of its parent, in storage order. `origin`: of all, or of each."""
    if isinstance(origin, str):
        origin = ("",) + (origin,) * (len(tokens) - 1) if origin else ()
    return TokenTree(tokens, parents, PointDraws(tokens, parents), tuple(origin), weights)


def merge(first: TokenTree, second: TokenTree) -> TokenTree:
    """Both trees in one: shared nodes become one, draws are concatenated there, sampled ones before point masses.

    A shared node keeps the larger weight; weights are lost where either tree has none.
    """
    assert first.tokens[0] == second.tokens[0], "both trees hang on the same pending token"
    tokens, parents = first.tokens.tolist(), first.parents.tolist()
    draws = [list(d) for d in first.draws]
    origins = list(first.origins or ("",) * len(first))
    index = {(p, t): i for i, (p, t) in enumerate(zip(parents, tokens, strict=True)) if i}
    place = [0]  # node of `second` -> node of the merged tree
    for i in range(1, len(second)):
        key = (place[int(second.parents[i])], int(second.tokens[i]))
        if key not in index:
            index[key] = len(tokens)
            tokens.append(key[1])
            parents.append(key[0])
            draws.append([])
            origins.append(second.origins[i] if second.origins else "")
        place.append(index[key])
    for i, more in enumerate(second.draws):
        draws[place[i]].extend(Draw(d.token, place[d.child] if d.child >= 0 else NOTHING, d.row) for d in more)
    ordered = tuple(tuple(sorted(d, key=lambda draw: draw.row is None)) for d in draws)  # sorted() is stable
    weights = None
    if first.weights is not None and second.weights is not None:
        weights = np.zeros(len(tokens))
        weights[: len(first)] = first.weights
        np.maximum.at(weights, place, second.weights)
    return TokenTree(np.array(tokens), np.array(parents), ordered, tuple(origins) if any(origins) else (), weights)


def law_of(draws: Sequence[Draw]) -> Law:
    """Classify the ordered draws of one node."""
    if not draws:
        return Law.NONE
    sampled = [d for d in draws if d.row is not None]
    if not sampled:
        return Law.FIXED
    points = [d for d in draws if d.row is None]
    if points:
        if len(sampled) == 1 and draws[-1].row is not None and _excludes(sampled[0].row, points):
            return Law.TOP_PLUS_ONE
        return Law.MIXED if all(d.row is not None for d in draws[: len(sampled)]) else Law.OTHER
    rows = [d.row for d in sampled if d.row is not None]
    if all(row is rows[0] or _same(row, rows[0]) for row in rows):
        return Law.IID
    reduced = all(_same(b, a.without(d.token)) for a, b, d in zip(rows, rows[1:], sampled, strict=False))
    return Law.WITHOUT_REPLACEMENT if reduced else Law.MIXED


def _excludes(row: QRow | None, points: Sequence[Draw]) -> bool:
    return row is not None and not np.isin([d.token for d in points], row.ids).any()


def _same(a: QRow, b: QRow) -> bool:
    return (
        len(a.ids) == len(b.ids) and np.array_equal(a.ids, b.ids) and np.allclose(a.probs, b.probs, rtol=1e-9, atol=0)
    )


def _depths(parents: NDArray[np.int64]) -> NDArray[np.int64]:
    if parents is _NO_PARENT:
        return _NO_DEPTH
    if len(parents) > FEW:
        found = _walks().depths(parents)
        assert found[0] == 0, "node 0 has no parent, the others have theirs before them"
        return found  # type: ignore[no-any-return]
    first, *below = parents.tolist()
    assert first == -1, "node 0 has no parent"
    depths = [0]
    for i, parent in enumerate(below, 1):
        assert 0 <= parent < i, "parents before children"
        depths.append(depths[parent] + 1)
    return np.array(depths, dtype=np.int64)


@cache
def _walks() -> ModuleType:
    """Imported with the first wide tree: plain decoding does not wait for the compiler."""
    from outrider.core.numeric import walks

    return walks
