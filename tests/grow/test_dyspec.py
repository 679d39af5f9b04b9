"""Best first is best: the heap's tree is worth as much as any, and the threshold form is the same tree by levels."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from outrider.check.exhaustive import CONTEXT, grow_tree
from outrider.check.toy import ToyLM
from outrider.core.noise import DRAFT, StreamNoise
from outrider.core.records import Budget, Scores, StepRecord, Verdict
from outrider.core.tree import QRow, TokenTree, chain
from outrider.grow import dyspec
from outrider.grow.dyspec import Calibration, Heap, Threshold

Path = tuple[int, ...]


def chance(lm: ToyLM, path: Path) -> float:
    p = 1.0
    for i, token in enumerate(path):
        p *= float(lm.probs((*CONTEXT, *path[:i]))[token])
    return p


def worth(lm: ToyLM, tree: TokenTree) -> float:
    """Expected accepted tokens if a candidate is accepted with its own draft probability."""
    return sum(chance(lm, tuple(tree.path_tokens(node))) for node in range(1, len(tree)))


def best(lm: ToyLM, nodes: int, depth: int) -> float:
    """Exhaustive: every set of paths that holds its prefixes."""
    paths: list[Path] = [()]
    for _ in range(depth):
        paths += [(*p, t) for p in paths for t in range(lm.vocab) if (*p, t) not in paths]
    paths = sorted({p for p in paths if p})
    sets = (set(c) for c in combinations(paths, nodes))
    return max(sum(chance(lm, p) for p in s) for s in sets if all(p[:-1] in s or len(p) == 1 for p in s))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("vocab", "nodes", "depth"), [(3, 1, 2), (3, 4, 2), (3, 5, 2), (2, 4, 3), (2, 6, 3)])
def test_without_noise_the_heap_finds_the_best_tree(seed: int, vocab: int, nodes: int, depth: int) -> None:
    lm = ToyLM(vocab, seed=seed)
    tree = grow_tree(Heap(), lm, Budget(nodes, depth), None)
    assert tree.candidates == nodes
    assert worth(lm, tree) == pytest.approx(best(lm, nodes, depth))


def test_a_heap_that_forgets_the_sibling_is_seen(monkeypatch) -> None:
    original = dyspec._Positions.take

    def take(self):
        child, below, _ = original(self)
        return child, below, 0.0

    monkeypatch.setattr(dyspec._Positions, "take", take)
    lm = ToyLM(3, seed=0)
    assert worth(lm, grow_tree(Heap(), lm, Budget(4, 2), None)) < best(lm, 4, 2) - 1e-3


def test_ranking_by_the_chance_to_arrive_alone_is_not_the_best(monkeypatch) -> None:
    monkeypatch.setattr(dyspec._Positions, "rank", lambda self, value, node: value)
    models = [ToyLM(3, seed=seed) for seed in range(4)]
    short = [best(lm, 4, 2) - worth(lm, grow_tree(Heap(), lm, Budget(4, 2), None)) for lm in models]
    assert max(short) > 0.05


def popped(lm: ToyLM, nodes: int, monkeypatch, noise=None) -> list[float]:
    values: list[float] = []
    original = dyspec._Positions.take

    def take(self):
        values.append(-self.open[0][0])
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(dyspec._Positions, "take", take)
        grow_tree(Heap(depth=9, calibration=None), lm, Budget(nodes, 9), noise)
    return values


@pytest.mark.parametrize("seed", range(6))
def test_the_threshold_form_at_the_last_value_is_the_heaps_tree(seed: int, monkeypatch) -> None:
    lm = ToyLM(5, seed=seed)
    values = popped(lm, 12, monkeypatch)
    assert len(values) == 12
    by_heap = grow_tree(Heap(depth=9), lm, Budget(12, 9), None)
    by_level = grow_tree(Threshold(depth=9, threshold=values[-1] * (1 - 1e-9)), lm, Budget(99, 9), None)
    paths = [{tuple(t.path_tokens(i)) for i in range(1, len(t))} for t in (by_heap, by_level)]
    assert paths[0] == paths[1]


@pytest.mark.parametrize("noise", [None, StreamNoise(5, 0, DRAFT, 0, 0)], ids=["greedy", "drawn"])
def test_the_heap_never_finds_a_better_position_later(noise, monkeypatch) -> None:
    for seed in range(6):
        values = popped(ToyLM(5, seed=seed), 20, monkeypatch, noise)
        assert values == sorted(values, reverse=True) and 0 < values[-1] < values[0] <= 1.0


def test_the_threshold_follows_the_budget() -> None:
    for concentration in (0.3, 5.0):  # peaked and flat drafts
        lm, grower = ToyLM(6, seed=2, concentration=concentration), Threshold(depth=6)
        sizes = []
        for step in range(60):
            tree = grow_tree(grower, lm, Budget(16, 16), StreamNoise(3, 0, DRAFT, step, 0), (step % 6, 1))
            sizes.append(tree.candidates)
        assert max(sizes) <= 16 and sum(sizes[20:]) / 40 > 11


def test_a_threshold_too_low_does_not_stay_so() -> None:
    """A cut tree is no proof of a good threshold: otherwise one level of siblings would take every node for ever."""
    grower = Threshold(depth=6)
    grower._learnt[16] = 1e-6
    lm = ToyLM(40, seed=2, concentration=0.05)
    depths = [
        grow_tree(grower, lm, Budget(16, 16), StreamNoise(3, 0, DRAFT, step, 0), (step % 6, 1)).depth
        for step in range(60)
    ]
    assert depths[0] == 1 and sum(depths[40:]) / 20 > 2


def test_a_given_threshold_stays() -> None:
    grower = Threshold(threshold=0.3)
    lm = ToyLM(6, seed=2)
    trees = [grow_tree(grower, lm, Budget(16, 16), None) for _ in range(3)]
    assert len({tuple(tree.tokens.tolist()) for tree in trees}) == 1
    assert all(chance(lm, tuple(trees[0].path_tokens(int(i)))) > 0.3 for i in trees[0].parents[1:] if i > 0)


def record(tree: TokenTree, path: tuple[int, ...]) -> StepRecord:
    return StepRecord(tree, Verdict(path, 0), (), Scores(None))


def first_draws(tree: TokenTree) -> tuple[int, ...]:
    path, node = [], 0
    while tree.draws[node]:
        node = tree.draws[node][0].child
        path.append(node)
    return tuple(path)


def test_chances_start_from_the_drafts_and_follow_what_is_accepted() -> None:
    calibration = Calibration()
    assert calibration.chance(0.3) == 0.3 and calibration.chance(1e-9) == pytest.approx(1e-9)
    assert calibration.gain(0) == calibration.gain(0, 0.2) == dyspec.FIRST_GUESS[0]
    lm = ToyLM(12, seed=1, concentration=500.0)  # flat: every draw has a probability near 0.09
    for step in range(100):
        tree = grow_tree(Heap(depth=1), lm, Budget(3, 1), StreamNoise(1, 0, DRAFT, step, 0))
        calibration.observe(
            record(tree, (2,))
        )  # the second draw: the first was tested and rejected, the third never tested
    assert calibration.chance(0.09, 0) < 0.1 and calibration.chance(0.09, 1) > 0.85 and calibration.chance(0.9) == 0.9
    assert calibration.chance(0.09, 2) == pytest.approx(
        0.5, abs=0.1
    )  # of a rank never seen: what all ranks together say
    assert (
        calibration.gain(0) < 0.05
        and calibration.gain(1) > 0.9
        and calibration.gain(2) == pytest.approx(dyspec.FIRST_GUESS[2])
    )
    tested, won = calibration._drawn
    assert 150 < tested.sum() < 200 and 75 < won.sum() < 100 and not tested[2:].any()  # some forgotten


def test_gains_tell_sure_rows_from_unsure_ones() -> None:
    calibration = Calibration()
    sure, unsure = QRow(np.arange(2), np.array([0.9, 0.1])), QRow(np.arange(8), np.full(8, 0.125))
    for row, path in ((sure, (1,)), (unsure, ())):
        for _ in range(50):
            calibration.observe(record(chain(0, [1], [row]), path))
    assert calibration.gain(0, 0.8) > 0.9 and calibration.gain(0, 0.125) < 0.1 < calibration.gain(0) < 0.9


@pytest.mark.parametrize("make", [Heap, Threshold])
def test_second_draws_that_are_seldom_accepted_leave_their_nodes_to_depth(make, monkeypatch) -> None:
    """The chance to arrive at a second draw is large wherever the first may fail; what it is worth there is not."""
    lm = ToyLM(30, seed=1, concentration=50.0)

    def at_the_root() -> float:
        grower = make()
        calibration = grower.calibration
        calibration._drawn[0] = calibration._asked[0] = 1000.0
        calibration._drawn[1] = calibration._asked[1] = np.array([450.0, 150.0, 100.0, 50.0])[:, None]
        trees = [grow_tree(grower, lm, Budget(16, 16), StreamNoise(2, 0, DRAFT, step, 0)) for step in range(30)]
        return sum(len(tree.children(0)) for tree in trees) / 30

    ranked = at_the_root()
    monkeypatch.setattr(Calibration, "gain", lambda self, rank, largest=None: 1.0)
    assert ranked < 0.7 * at_the_root()


@pytest.mark.parametrize("make", [Heap, Threshold])
def test_flat_drafts_that_are_accepted_give_deep_trees(make) -> None:
    lm = ToyLM(30, seed=1, concentration=50.0)

    def depth(grower) -> float:
        return (
            sum(grow_tree(grower, lm, Budget(12, 12), StreamNoise(2, 0, DRAFT, step, 0)).depth for step in range(30))
            / 30
        )

    by_paper, learnt = make(calibration=None), make()
    for step in range(60):
        tree = grow_tree(learnt, lm, Budget(12, 12), StreamNoise(1, 0, DRAFT, step, 0))
        learnt.observe([0], [record(tree, first_draws(tree))])
    assert depth(by_paper) < 2 < 4 < depth(learnt)
