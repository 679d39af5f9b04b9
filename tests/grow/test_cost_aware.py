"""The shape is within 5% of exhaustive search, plain decoding is chosen where it is faster, and costs are learnt."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from outrider.check.exhaustive import grow_tree
from outrider.check.toy import ToyLM
from outrider.core.records import Budget, Scores, StepRecord, Verdict
from outrider.core.tree import chain
from outrider.grow.acceptance import RankAcceptance
from outrider.grow.cost_aware import CallTimer, CostAware, fastest_shape
from outrider.grow.shape import Shape

RANKS, DEPTH, NODES = 3, 3, 7


@cache
def shapes(nodes: int = NODES) -> tuple[Shape, ...]:
    """Every tree of at most so many candidates, three draws a node, three levels deep, in level order."""
    every: set[tuple[int, ...]] = {()}
    fresh = {()}
    for _ in range(nodes):
        fresh = {new for parents in fresh for new in _larger(parents)}
        every |= fresh
    return tuple(Shape(parents) for parents in sorted(every))


def _larger(parents: tuple[int, ...]) -> list[tuple[int, ...]]:
    """One more node at the end of the level order: every shape is reached this way."""
    shape = Shape(parents)
    first = parents[-1] if parents else 0  # parents never fall in level order
    return [
        (*parents, p)
        for p in range(first, len(parents) + 1)
        if len(shape.children[p]) < RANKS and shape.depths[p] < DEPTH
    ]


def rate(shape: Shape, table, step, call) -> float:
    chance, expanded = [1.0], [0] * (DEPTH + 1)
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        depth = shape.depths[parent]
        chance.append(chance[parent] * table[depth][rank])
        expanded[depth] += rank == 0
    return sum(chance) / (step(len(shape) + 1) + sum(call(n) for n in expanded if n))


def curves(seed: int):
    """Acceptance by depth and rank, a target's cost with flat stretches and jumps, and a source's."""
    rng = np.random.default_rng(seed)
    table = -np.sort(-rng.dirichlet([rng.uniform(0.3, 2.0)] * (RANKS + 1), size=DEPTH)[:, :RANKS], axis=1)
    slope, jump, width = rng.choice([0.0, 0.02, 0.15, 0.6]), rng.choice([0.0, 0.3, 1.0]), int(rng.integers(1, 5))
    fixed, each = rng.choice([0.0, 0.05, 0.4]), rng.choice([0.0, 0.02, 0.1])
    return table, lambda rows: 1 + slope * rows + jump * ((rows - 1) // width), lambda rows: fixed + each * rows


def shortfall(seed: int) -> float:
    """How much of the best rate is missed."""
    table, step, call = curves(seed)
    shape, claimed = fastest_shape(table, Budget(NODES, DEPTH), step, call)
    mine = rate(shape, table, step, call)
    assert mine == pytest.approx(claimed)
    return 1 - mine / max(rate(other, table, step, call) for other in shapes())


def test_the_chosen_shape_is_within_five_percent_of_exhaustive_search() -> None:
    assert len(shapes()) > 200
    missed = [shortfall(seed) for seed in range(100)]
    assert max(missed) <= 0.05
    assert np.mean(np.array(missed) < 1e-9) > 0.8  # mostly it is the best


def test_choices_that_ignore_a_cost_would_be_seen() -> None:
    def missed(seed: int, *, target: bool, source: bool) -> float:
        table, step, call = curves(seed)
        known = (step if target else lambda rows: 1.0), (call if source else lambda rows: 0.0)
        shape, _ = fastest_shape(table, Budget(NODES, DEPTH), *known)
        return 1 - rate(shape, table, step, call) / max(rate(other, table, step, call) for other in shapes())

    assert max(missed(seed, target=False, source=True) for seed in range(30)) > 0.2
    assert max(missed(seed, target=True, source=False) for seed in range(30)) > 0.2


def test_plain_decoding_is_chosen_where_rows_cost_as_much_as_steps_and_is_probed() -> None:
    grower = CostAware(lambda rows, batch, context: float(rows), lambda rows: 0.1, probe_after=4)
    lm = ToyLM(5, seed=1)
    sizes = [grow_tree(grower, lm, Budget(8, 8), None).candidates for _ in range(12)]
    assert [size > 0 for size in sizes] == [False, False, False, True] * 3


def test_free_rows_are_all_used() -> None:
    grower = CostAware(lambda rows, batch, context: 1.0, lambda rows: 0.0)
    assert grow_tree(grower, ToyLM(12, seed=1), Budget(24, 8), None).candidates == 24


def test_a_longer_context_and_a_larger_batch_are_asked_about() -> None:
    asked: set[tuple[int, int]] = set()

    def cost(rows: int, batch: int, context: int) -> float:
        asked.add((batch, context))
        return 1.0

    grower = CostAware(cost, lambda rows: 0.0, length=lambda slot: 1000 + slot)
    grower._shape([0, 1, 2], [Budget(4, 4)] * 3)
    assert asked == {(3, 768)}


def record(tree, path) -> StepRecord:
    return StepRecord(tree, Verdict(tuple(path), 0), (), Scores(None))


def test_what_is_accepted_changes_the_shape() -> None:
    def sizes(accepted: int) -> int:
        cost = CostAware(lambda rows, batch, context: 1 + 0.1 * rows, lambda rows: 0.05, refresh=1)
        for _ in range(200):
            cost.observe([0], [record(chain(0, [1] * 4), range(1, accepted + 1))])
        return grow_tree(cost, ToyLM(5, seed=1), Budget(12, 8), None).depth

    assert sizes(0) == 0 < sizes(1) < sizes(4)


def test_the_timer_fits_a_line_and_forgets() -> None:
    timer = CallTimer()
    assert timer.seconds(5) == 0.0
    timer.add(3, 2.0)
    assert timer.seconds(3) == timer.seconds(9) == 2.0  # one size says nothing about others
    for rows in (1, 4, 2, 8) * 200:
        timer.add(rows, 0.5 + 0.25 * rows)
    assert timer.seconds(16) == pytest.approx(4.5, rel=1e-3)


def test_source_calls_are_timed_where_no_curve_is_given() -> None:
    grower = CostAware(lambda rows, batch, context: 1.0)
    grow_tree(grower, ToyLM(5, seed=1), Budget(8, 8), None)
    assert grower._timer.seconds(1) > 0.0


def test_acceptance_that_rises_with_the_rank_is_levelled() -> None:
    shape, _ = fastest_shape(np.array([[0.1, 0.9]]), Budget(4, 4), lambda rows: 1.0, lambda rows: 0.0)
    assert len(shape) == 4 and RankAcceptance().by_rank().sum() <= 1.0
