"""A chain ends where its source doubts; the doubtful token itself is proposed, with its row."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.core.records import Budget
from outrider.core.tree import QRow
from outrider.grow.confident import Confident


class Fading:
    """Sure of its first tokens, less of each later one: 0.9, 0.7, 0.5, ..."""

    name = "fading"

    def row(self, depth: int) -> QRow:
        top = 0.9 - 0.2 * depth
        return QRow(np.array([depth, 50]), np.array([top, 1 - top]) if top >= 0.5 else np.array([0.5, 0.5]))

    def start(self, slots):
        return [self.row(0) for _ in slots]

    def extend(self, slots, trees, done):
        return [[self.row(int(d)) for d in tree.depths[first:]] for tree, first in zip(trees, done, strict=True)]


@pytest.mark.parametrize(("threshold", "length"), [(0.0, 6), (0.6, 3), (0.8, 2), (1.01, 1)])
def test_it_stops_after_the_first_token_below_the_threshold(threshold: float, length: int) -> None:
    (tree,) = Confident(threshold).grow(Fading(), [0], [7], [Budget(6, 6)], [None])
    assert tree.candidates == length and tree.is_chain


def test_the_doubt_is_about_the_distribution_not_about_what_was_drawn() -> None:
    class Unlucky:
        def draw(self, weights, node, draw):
            return 1  # always the unlikely token

    (tree,) = Confident(0.6).grow(Fading(), [0], [7], [Budget(6, 6)], [Unlucky()])
    assert tree.tokens.tolist() == [7, 50, 50, 50] and tree.is_sampled
    assert [draws[0].row.probs.max() for draws in tree.draws[:-1]] == pytest.approx([0.9, 0.7, 0.5])


def test_slots_stop_by_themselves() -> None:
    trees = Confident(0.6).grow(Fading(), [0, 1], [7, 8], [Budget(6, 6), Budget(2, 2)], [None, None])
    assert [tree.candidates for tree in trees] == [3, 2]
