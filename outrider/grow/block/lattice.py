"""Lattice: of a block drafter's tokens at each place the path that reads best from left to right, as a chain.

The causal-consistency path search of DiffuSpec (arXiv 2510.02358). The likeliest tokens of each place, up to a share of
its probability, are a lattice; a beam search through it adds the logarithm of the block drafter's chance of a token and
that of a causal model, which knows the tokens before it. A token that ends the text may stand at every place; where it
is among the likeliest by itself the lattice ends. Lossless: the path is searched, not drawn, so its tokens are point
masses whatever the temperature. Cost: one source call, then a look-up in the causal model for each of some hundred
pairs of a path and a place's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from outrider.core.protocols import Noise, Source, WholeSource
from outrider.core.records import Budget, StepRecord
from outrider.core.tree import QRow, TokenTree, chain, root
from outrider.grow.drawing import ranked

Following = Callable[[Sequence[int], NDArray[np.int64]], NDArray[np.float64]]  # logarithms of chances of tokens
LEAST = 1e-6  # chance of a token that is in the lattice without being in the row


class CausalSource(WholeSource, Protocol):
    """A block drafter with a causal model beside it."""

    def following(self, slot: int) -> Following: ...  # behind the slot's text and then a path


class Place(NamedTuple):
    """The tokens that may stand at one place, likeliest first, and the logarithms of their chances."""

    ids: NDArray[np.int64]
    logs: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Lattice:
    ends: frozenset[int]  # tokens that end a text
    depth: int = 16
    mass: float = 0.8  # tau: of a place's probability, in the lattice
    most: int = 15  # M_max: tokens of a place
    beam: int = 3  # B
    share: float = 0.5  # lambda: weight of the block drafter against the causal model
    length_norm: bool = False  # compare means a token, not sums

    def grow(
        self, source: Source, slots: Sequence[int], pending: Sequence[int], budgets: Sequence[Budget],
        noise: Sequence[Noise | None],
    ) -> list[TokenTree]:  # fmt: skip
        trees = [root(token) for token in pending]
        asked = [i for i, budget in enumerate(budgets) if budget]
        if not asked:
            return trees
        found = cast(CausalSource, source).marginals([slots[i] for i in asked])
        for i, rows in zip(asked, found, strict=True):
            depth = min(budgets[i].depth, budgets[i].nodes, self.depth)
            path = self.search(self.places(rows[:depth]), cast(CausalSource, source).following(slots[i]))
            trees[i] = chain(pending[i], path, origin=source.name)
        return trees

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        """Learns nothing."""

    def places(self, rows: Sequence[QRow]) -> list[Place]:
        """The lattice of these rows, a place each, up to the one where the text is likely to end."""
        made = []
        for row in rows:
            order = ranked(row)[: self.most]
            enough = int(np.searchsorted(np.cumsum(row.probs[order]), self.mass)) + 1
            ids, probs = row.ids[order[:enough]], row.probs[order[:enough]]
            forced = [end for end in sorted(self.ends) if end not in ids]
            chances = np.concatenate([probs, [max(row.prob(end), LEAST) for end in forced]])
            made.append(Place(np.concatenate([ids, np.array(forced, dtype=np.int64)]), np.log(chances)))
            if len(forced) < len(self.ends):
                break
        return made

    def search(self, places: Sequence[Place], following: Following) -> tuple[int, ...]:
        """The best of the paths through all places and of those that end before; the first of equals."""
        alive: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        ended: list[tuple[float, tuple[int, ...]]] = []
        for place in places:
            grown = []
            for value, path in alive:
                scores = value + self.share * place.logs + (1 - self.share) * following(path, place.ids)
                grown += [
                    (score, (*path, token)) for score, token in zip(scores.tolist(), place.ids.tolist(), strict=True)
                ]
            ended += [item for item in grown if item[1][-1] in self.ends]
            alive = sorted((item for item in grown if item[1][-1] not in self.ends), key=lambda item: -item[0])
            alive = alive[: self.beam]
        whole = [*alive, *ended]
        return max(whole, key=self._rank)[1] if whole else ()

    def _rank(self, item: tuple[float, tuple[int, ...]]) -> float:
        return item[0] / max(len(item[1]), 1) if self.length_norm else item[0]
