"""Trees from rows that are known at once: the likeliest of all trees of their size, from one call of the source."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.records import Budget
from outrider.core.tree import QRow
from outrider.draft.marginals import Marginals
from outrider.grow.block.best_first import BestFirst, best_tree
from outrider.grow.chain import Chain
from outrider.grow.dyspec import Heap, Threshold
from outrider.grow.topk import TopK


class Known(Marginals):
    """Rows by depth, the same for every slot; counts how often it was asked."""

    name = "known"

    def __init__(self, rows: list[QRow]) -> None:
        self.rows, self.asked, self.extended = rows, 0, 0

    def marginals(self, slots):
        self.asked += 1
        return [self.rows for _ in slots]

    def extend(self, slots, trees, done):
        self.extended += 1
        return super().extend(slots, trees, done)


class Unhinted:
    """The same source without the hint."""

    name = "known"

    def __init__(self, inner: Known) -> None:
        self.start, self.extend = inner.start, inner.extend


@st.composite
def rows(draw, depths: int = 3, width: int = 3) -> list[QRow]:
    made = []
    for _ in range(draw(st.integers(1, depths))):
        weights = np.array(draw(st.lists(st.integers(1, 40), min_size=1, max_size=width)), dtype=float)
        made.append(QRow(np.arange(len(weights)) + 7, weights / weights.sum()))
    return made


def value(row_list: list[QRow], path: tuple[int, ...]) -> float:
    return float(np.prod([row_list[depth].prob(token) for depth, token in enumerate(path)]))


@given(rows(), st.integers(1, 9))
def test_no_tree_of_that_size_expects_more_accepted_tokens(known: list[QRow], nodes: int) -> None:
    """The sum of the values of the best nodes at all is that of the tree, whose nodes hang together."""
    tree = best_tree(3, known, Budget(nodes, 3), "known")
    paths = [p for depth in range(1, len(known) + 1) for p in product(*(row.ids.tolist() for row in known[:depth]))]
    best = sorted((value(known, path) for path in paths), reverse=True)[:nodes]
    assert tree.candidates == len(best)
    found = [value(known, tuple(tree.path_tokens(node))) for node in range(1, len(tree))]
    assert tree.weights is not None and tree.weights[1:].tolist() == pytest.approx(found)
    assert sorted(found, reverse=True) == pytest.approx(best)
    assert len({tuple(tree.path_tokens(node)) for node in range(1, len(tree))}) == len(best)


@given(rows(), st.integers(1, 9), st.sampled_from(["chain", "topk", "threshold", "heap"]))
def test_growers_make_the_same_trees_from_one_call_as_level_by_level(known, nodes: int, name: str) -> None:
    makes = {
        "chain": Chain, "topk": lambda: TopK(4, 4, 3), "threshold": lambda: Threshold(3), "heap": lambda: Heap(3, None)
    }  # fmt: skip
    source, budget = Known(known), Budget(nodes, 3)
    (one,) = makes[name]().grow(source, [5], [3], [budget], [None])
    assert source.asked == 1 and source.extended == 0
    (other,) = makes[name]().grow(Unhinted(Known(known)), [5], [3], [budget], [None])
    assert one.tokens.tolist() == other.tokens.tolist() and one.parents.tolist() == other.parents.tolist()


def test_a_slot_without_rows_or_without_a_budget_gets_no_candidates_and_one_call_serves_the_batch() -> None:
    known = [QRow(np.array([4, 5]), np.array([0.6, 0.4]))]

    class Some(Known):
        def marginals(self, slots):
            assert slots == [1, 2]
            return [self.rows, []]

    trees = BestFirst().grow(Some(known), [0, 1, 2], [9, 9, 9], [Budget(0, 0), Budget(4, 4), Budget(4, 4)], [None] * 3)
    assert [tree.candidates for tree in trees] == [0, 2, 0]
