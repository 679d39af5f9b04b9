"""The programme finds the best tree of all, rebuilds it, and its acceptance vector is learnt from what was accepted."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.check.enumeration import branches
from outrider.check.exhaustive import CONTEXT, grow_tree
from outrider.check.toy import TableRows, ToyLM
from outrider.core.noise import DRAFT, StreamNoise
from outrider.core.records import Budget, Scores, StepRecord, Verdict
from outrider.core.tree import chain
from outrider.grow.acceptance import RankAcceptance
from outrider.grow.rsd import ConstantBranching
from outrider.grow.sequoia import Sequoia, best_shape
from outrider.grow.shape import Shape, k_ary
from outrider.verify.recursive import Recursive

Tree = tuple  # of the trees below it


@cache
def forests(nodes: int, depth: int, ranks: int) -> tuple[Tree, ...]:
    """All ordered forests of so many nodes, at most `ranks` trees wide at each node."""
    if nodes == 0:
        return ((),)
    if depth == 0 or ranks == 0:
        return ()
    return tuple(
        (first, *rest)
        for size in range(1, nodes + 1)
        for first in forests(size - 1, depth - 1, WIDTH)
        for rest in forests(nodes - size, depth, ranks - 1)
    )


WIDTH = 3


def worth(forest: Tree, a: list[float]) -> float:
    return 1.0 + sum(p * worth(tree, a) for p, tree in zip(a, forest, strict=False))


def value(shape: Shape, a) -> float:
    chance = [1.0]
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        chance.append(chance[parent] * a[rank])
    return sum(chance)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=WIDTH, max_size=WIDTH), st.integers(0, 8), st.integers(1, 5))
def test_the_programme_equals_brute_force(a: list[float], nodes: int, depth: int) -> None:
    a = [x / max(sum(a), 1.0) for x in a]
    every = forests(nodes, depth, WIDTH)
    shape, found = best_shape(a, Budget(nodes, depth))
    if every:
        assert len(shape) == nodes
        assert found == pytest.approx(max(worth(forest, a) for forest in every), abs=1e-12)
    assert value(shape, a) == pytest.approx(found, abs=1e-12)
    assert max(shape.depths) <= depth and max(map(len, shape.children)) <= WIDTH


def test_a_vector_of_chances_given_rejection_is_another_thing() -> None:
    """The planted mistake: conditional chances overrate wide trees."""
    marginal = np.array([0.5, 0.25, 0.1])
    conditional = marginal / (1.0 - np.cumsum([0.0, *marginal[:-1]]))
    wide, _ = best_shape(conditional, Budget(6, 5))
    assert value(wide, marginal) < best_shape(marginal, Budget(6, 5))[1] - 0.01


@pytest.mark.parametrize(("rows", "depth", "want"), [(5, 5, 2.125), (7, 3, 2.35), (7, 5, 2.375)])
def test_known_values(rows: int, depth: int, want: float) -> None:
    # levels count the root there
    assert best_shape([0.5, 0.25, 0.1], Budget(rows - 1, depth - 1))[1] == pytest.approx(want)


def test_extreme_vectors_give_chains_and_stars() -> None:
    assert best_shape([1.0, 0.0, 0.0], Budget(5, 9))[0].parents == (0, 1, 2, 3, 4)
    assert best_shape([1e-6] * 5, Budget(5, 9))[0].parents == (0, 0, 0, 0, 0)
    assert len(best_shape([0.5, 0.2], Budget(99, 2))[0]) == 6  # no more fit
    assert best_shape([0.5], Budget(0, 0)) == (Shape(), 1.0)


def test_more_nodes_and_more_depth_are_never_worth_less() -> None:
    a = [0.45, 0.2, 0.12, 0.05]
    values = np.array([[best_shape(a, Budget(m, d))[1] for d in range(1, 6)] for m in range(1, 12)])
    feasible = np.array([[len(best_shape(a, Budget(m, d))[0]) == m for d in range(1, 6)] for m in range(1, 12)])
    assert (np.diff(values, axis=0) >= -1e-12).all() and (np.diff(values, axis=1)[feasible[:, :-1]] >= -1e-12).all()


def test_grown_trees_have_the_shape() -> None:
    grower = Sequoia(RankAcceptance((0.5, 0.25, 0.1)), depth=5)
    tree = grow_tree(grower, ToyLM(6, seed=1), Budget(12, 9), StreamNoise(1, 0, DRAFT, 0, 0))
    shape, _ = best_shape([0.5, 0.25, 0.1], Budget(12, 5))
    assert tuple(tree.parents[1:].tolist()) == shape.parents


def record(tree, path, token=0) -> StepRecord:
    return StepRecord(tree, Verdict(tuple(path), token), (), Scores(None))


def test_the_vector_is_learnt_and_changes_the_tree() -> None:
    grower = Sequoia(depth=6, refresh=10)
    lm = ToyLM(6, seed=1)
    before = grow_tree(grower, lm, Budget(8, 8), None)
    assert not before.is_chain
    for _ in range(300):  # the first draw always wins
        grower.observe([0], [record(chain(0, [1, 2, 3]), (1, 2, 3))])
    assert grow_tree(grower, lm, Budget(6, 8), None).is_chain
    assert grower.acceptance.by_rank().sum() <= 1.0  # ranks never offered share what the first leaves
    assert (grower.acceptance.by_depth_and_rank().sum(1) <= 1.0).all()
    frozen = Sequoia(depth=6, refresh=0)
    for _ in range(300):
        frozen.observe([0], [record(chain(0, [1, 2, 3]), (1, 2, 3))])
    assert grow_tree(frozen, lm, Budget(8, 8), None).parents.tolist() == before.parents.tolist()


def learnt() -> tuple[np.ndarray, np.ndarray]:
    """The measured vector over all outcomes of one node with three draws, against the analytic one."""
    target, draft = ToyLM(4, seed=3), ToyLM(4, seed=8)
    wins = np.zeros(3)

    def step(paths):
        tree = grow_tree(ConstantBranching((3,)), draft, Budget(3, 1), paths.noise("draft"))
        return tree, Recursive().verify(tree, TableRows(target, CONTEXT, tree), paths.noise("verify"))

    offered, won = np.zeros(3), np.zeros(3)
    for (tree, verdict), weight in branches(step):
        one = RankAcceptance(prior=(0.0,) * 3)
        one.observe(record(tree, verdict.path))
        offered += weight * one._offered.sum(0)
        won += weight * one._won.sum(0)
        if verdict.path:
            wins[[d.child for d in tree.draws[0]].index(verdict.path[0])] += weight
    return won / offered, wins


def test_the_measured_vector_is_the_chance_of_each_rank() -> None:
    found, want = learnt()
    assert found == pytest.approx(want) and 0.5 < want.sum() < 1.0 and want[0] > want[1] > 0


def test_ranks_counted_by_position_in_the_tree_instead_of_the_draws_would_be_seen(monkeypatch) -> None:
    original = RankAcceptance.observe

    def observe(self, rec):
        original(self, rec)
        self._won = self._won[:, ::-1].copy()

    monkeypatch.setattr(RankAcceptance, "observe", observe)
    found, want = learnt()
    assert found != pytest.approx(want, abs=1e-3)


def test_acceptance_by_depth_leans_on_all_depths_until_it_knows_better() -> None:
    acceptance = RankAcceptance(prior=(0.5, 0.1), weight=4.0, depths=3)
    assert acceptance.by_depth_and_rank() == pytest.approx(np.array([[0.5, 0.1]] * 3))
    for _ in range(400):
        acceptance.observe(record(chain(0, [1, 2]), (1,)))  # depth 0 always, depth 1 never
    table = acceptance.by_depth_and_rank()
    assert table[0, 0] > 0.98 and table[1, 0] < 0.02 and table[2, 0] == pytest.approx(acceptance.by_rank()[0])
    assert acceptance.by_rank()[0] == pytest.approx(0.5) and acceptance.by_rank()[1] == pytest.approx(0.1)
    acceptance.observe(record(chain(0, []), ()))
    assert acceptance.steps == 400  # a step without candidates teaches nothing


def test_forgetting_follows_a_change() -> None:
    steady, nimble = RankAcceptance(weight=1.0), RankAcceptance(weight=1.0, keep=0.9)
    for accepted in [(1,)] * 50 + [()] * 50:
        for acceptance in (steady, nimble):
            acceptance.observe(record(chain(0, [1]), accepted))
    assert steady.by_rank()[0] == pytest.approx(0.5, abs=0.02) and nimble.by_rank()[0] < 0.06


def test_shapes_are_cut_level_by_level() -> None:
    shape = k_ary((2, 2), Budget(99, 9))
    assert shape.parents == (0, 0, 1, 1, 2, 2)
    assert shape.within(Budget(99, 1)).parents == (0, 0)
    assert shape.within(Budget(3, 9)).parents == (0, 0, 1)
    assert k_ary((2, 2), Budget(3, 9)).parents == (0, 0, 1)
    assert shape.within(Budget(0, 9)) == Shape() and shape.within(Budget(6, 2)) is shape
