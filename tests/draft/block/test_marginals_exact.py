"""Draws from marginals are exact by enumeration; a row that is not what a token was drawn from is not."""

from __future__ import annotations

import numpy as np

from outrider.check.toy import ToyLM
from outrider.core.records import NO_NEEDS, Budget
from outrider.core.tree import QRow, chain
from outrider.draft.grown import Grown
from outrider.draft.marginals import Marginals
from outrider.grow.block.lattice import Lattice
from outrider.grow.chain import Chain
from outrider.grow.dyspec import Threshold
from outrider.verify.recursive import Recursive
from outrider.verify.rejection import Rejection
from tests.draft.toy_loop import distribution_gap

TARGET = ToyLM(3, seed=9)
FIRST, SECOND = np.array([0.2, 0.5, 0.3]), np.array([0.6, 0.1, 0.3])


class Independent(Marginals):
    name, needs = "independent", NO_NEEDS

    def begin(self, slot, context) -> None: ...
    def absorb(self, chunks) -> None: ...
    def end(self, slot) -> None: ...
    def observe(self, slots, records) -> None: ...
    def following(self, slot):
        return lambda path, ids: np.log(SECOND[ids])

    def marginals(self, slots):
        return [[QRow(np.arange(3), FIRST), QRow(np.arange(3), SECOND)] for _ in slots]


class Claimed:
    """A chain that is drawn, or searched, and claims rows that its tokens were not drawn from."""

    def __init__(self, inner, claim) -> None:
        self.inner, self.claim = inner, claim

    def grow(self, source, slots, pending, budgets, noise):
        trees = self.inner.grow(source, slots, pending, budgets, noise)
        return [chain(p, t.tokens[1:].tolist(), self.claim(t)) for p, t in zip(pending, trees, strict=True)]

    def observe(self, slots, records) -> None: ...


def gap(make, rule, sampled: bool = True) -> float:
    """`make` makes a grower that has learnt nothing."""
    return distribution_gap(lambda: Grown(Independent(), make(), sampled), rule, Budget(2, 2), TARGET)


def test_draws_from_marginals_keep_the_targets_distribution() -> None:
    assert gap(Chain, Rejection()) < 1e-6
    assert gap(lambda: Threshold(2), Recursive()) < 1e-6


def test_a_searched_path_keeps_it_as_point_masses_and_not_as_draws_from_the_network() -> None:
    def search() -> Lattice:
        return Lattice(frozenset())

    assert gap(search, Recursive(), sampled=False) < 1e-6
    rows = [QRow(np.arange(3), FIRST), QRow(np.arange(3), SECOND)]
    assert gap(lambda: Claimed(search(), lambda tree: rows[: tree.candidates]), Rejection(), sampled=False) > 1e-3


def test_rows_conditional_on_the_token_before_are_not_what_was_drawn_from() -> None:
    conditional = np.array([[0.1, 0.8, 0.1], [0.8, 0.1, 0.1], [0.1, 0.1, 0.8]])

    def claim(tree):
        rows = [QRow(np.arange(3), FIRST), QRow(np.arange(3), conditional[int(tree.tokens[1])])]
        return rows[: tree.candidates]

    assert gap(lambda: Claimed(Chain(), claim), Rejection()) > 1e-3
