"""What every grower keeps to: budgets, parents, depths, origins, draws and laws, batches, one source call a level."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.check.toy import ToyLM, ToySource
from outrider.core.noise import DRAFT, StreamNoise, inverse
from outrider.core.protocols import Grower
from outrider.core.records import Budget
from outrider.core.tree import Law, QRow, TokenTree
from outrider.grow.chain import Chain
from outrider.grow.cost_aware import CostAware
from outrider.grow.drawing import reduced
from outrider.grow.dyspec import Heap, Threshold
from outrider.grow.growth import Growth
from outrider.grow.kary import KAry
from outrider.grow.rsd import ConstantBranching, StochasticBeam
from outrider.grow.sequoia import Sequoia
from outrider.grow.top_plus_one import TopPlusOne
from outrider.grow.topk import TopK

ONE = {Law.NONE, Law.IID}  # a leaf, a single sampled draw
GROWERS: dict[str, tuple[Callable[[], Grower], set[Law]]] = {
    "chain": (Chain, ONE),
    "iid": (lambda: KAry((3, 2, 1), "iid"), ONE),
    "k-ary without replacement": (lambda: KAry((3, 2, 1), "without-replacement"), ONE | {Law.WITHOUT_REPLACEMENT}),
    "k-ary top": (lambda: KAry((3, 2, 1), "top"), {Law.NONE, Law.FIXED}),
    "top plus one": (lambda: TopPlusOne((3, 2, 1)), ONE | {Law.TOP_PLUS_ONE, Law.FIXED}),
    "top-k": (lambda: TopK(beam=3, branch=3, depth=4), {Law.NONE, Law.FIXED}),
    "rsd-c": (lambda: ConstantBranching((3, 2, 1)), ONE | {Law.WITHOUT_REPLACEMENT}),
    "rsd-s": (lambda: StochasticBeam(width=3, depth=4), ONE | {Law.WITHOUT_REPLACEMENT}),
    "dyspec heap": (lambda: Heap(depth=4), ONE | {Law.WITHOUT_REPLACEMENT}),
    "dyspec threshold": (lambda: Threshold(depth=4), ONE | {Law.WITHOUT_REPLACEMENT}),
    "sequoia": (lambda: Sequoia(depth=4), ONE | {Law.WITHOUT_REPLACEMENT}),
    "cost-aware": (
        lambda: CostAware(lambda rows, batch, context: 1.0, lambda rows: 0.01),
        ONE | {Law.WITHOUT_REPLACEMENT},
    ),
}
every = pytest.mark.parametrize("name", GROWERS)


class Text:
    def __init__(self, *tokens: int) -> None:
        self.tokens = np.array(tokens)


class Counted(ToySource):
    """Counts calls, and may hand out rows that sum below 1 or are empty."""

    calls = 0
    scale = 1.0
    silent: tuple[int, ...] = ()  # contexts that end with these tokens have no row

    def start(self, slots):
        self.calls += 1
        return [
            self._edit(row, self._contexts[slot].tokens[-1])
            for slot, row in zip(slots, super().start(slots), strict=True)
        ]

    def extend(self, slots, trees, done):
        self.calls += 1
        rows = super().extend(slots, trees, done)
        return [
            [self._edit(row, tree.tokens[first + i]) for i, row in enumerate(given)]
            for given, tree, first in zip(rows, trees, done, strict=True)
        ]

    def _edit(self, row: QRow, token: int) -> QRow:
        return QRow(row.ids[:0], row.probs[:0]) if token in self.silent else QRow(row.ids, row.probs * self.scale)


def source_of(lm: ToyLM, contexts: list[tuple[int, ...]]) -> Counted:
    source = Counted(lm)
    for slot, tokens in enumerate(contexts):
        source.begin(slot, Text(*tokens))
    return source


def noise_of(seed: int, slot: int = 0) -> StreamNoise:
    return StreamNoise(seed, slot, DRAFT, 3, 0)


def check(tree: TokenTree, pending: int, budget: Budget, laws: set[Law]) -> None:
    assert tree.tokens[0] == pending
    assert tree.candidates <= max(budget.nodes, 0) and tree.depth <= max(budget.depth, 0)
    assert tree.origins == ("",) + ("toy",) * tree.candidates
    assert {tree.law(node) for node in range(len(tree))} <= laws
    for node, draws in enumerate(tree.draws):
        assert {d.child for d in draws} == set(tree.children(node))
        assert len({tree.tokens[c] for c in tree.children(node)}) == len(tree.children(node))
        for draw in draws:
            assert tree.tokens[draw.child] == draw.token and tree.parents[draw.child] == node
            if draw.row is not None:
                assert draw.row.prob(draw.token) > 0 and draw.row.probs.sum() == pytest.approx(1.0, abs=1e-9)


@every
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000), vocab=st.integers(2, 6), nodes=st.integers(0, 20), depth=st.integers(0, 6),
    zeros=st.sampled_from([0.0, 0.6]), drawn=st.booleans(), scale=st.sampled_from([1.0, 0.4]),
    silent=st.sampled_from([(), (1,)]),
)  # fmt: skip
def test_trees_keep_budgets_and_name_every_draw(name, seed, vocab, nodes, depth, zeros, drawn, scale, silent) -> None:
    make, laws = GROWERS[name]
    source = source_of(ToyLM(vocab, seed=seed, zeros=zeros), [(0, 1, 0)])
    source.scale, source.silent = scale, silent
    budget = Budget(nodes, depth)
    (tree,) = make().grow(source, [0], [0], [budget], [noise_of(seed) if drawn else None])
    check(tree, 0, budget, laws if drawn else {Law.NONE, Law.FIXED})
    if nodes and depth:
        assert tree.candidates > 0
        assert name == "dyspec heap" or source.calls <= tree.depth + 1
    else:
        assert source.calls == 0


@every
@pytest.mark.parametrize("drawn", [True, False])
def test_a_batch_grows_what_each_slot_grows_alone(name, drawn: bool) -> None:
    make, _ = GROWERS[name]
    lm, contexts = ToyLM(5, seed=2), [(0, 1), (3, 2), (4, 4)]
    budgets = [Budget(12, 4)] * 3  # one shape is chosen for the batch where a grower chooses shapes
    noise = [noise_of(7, slot) if drawn else None for slot in range(3)]
    together = make().grow(source_of(lm, contexts), [0, 1, 2], [1, 2, 4], budgets, noise)
    for slot, tree in enumerate(together):
        grower = make()
        (alone,) = grower.grow(source_of(lm, contexts), [slot], [contexts[slot][-1]], [budgets[slot]], [noise[slot]])
        assert (alone.tokens.tolist(), alone.parents.tolist()) == (tree.tokens.tolist(), tree.parents.tolist())


@every
def test_one_batch_may_hold_slots_that_draw_and_slots_that_do_not(name) -> None:
    make, laws = GROWERS[name]
    budgets = [Budget(9, 3), Budget(0, 0), Budget(4, 2), Budget(1, 1)]
    source = source_of(ToyLM(5, seed=2), [(0, 1)] * 4)
    trees = make().grow(source, [0, 1, 2, 3], [1] * 4, budgets, [noise_of(1), noise_of(2), None, noise_of(3)])
    for i, (tree, budget) in enumerate(zip(trees, budgets, strict=True)):
        check(tree, 1, budget, {Law.NONE, Law.FIXED} if i == 2 else laws)
    assert [tree.candidates > 0 for tree in trees] == [True, False, True, True]


@every
def test_equal_noise_gives_equal_trees_and_other_noise_others(name) -> None:
    make, _ = GROWERS[name]

    def tokens(seed: int) -> list[int]:
        (tree,) = make().grow(source_of(ToyLM(6, seed=4), [(0, 1)]), [0], [1], [Budget(12, 4)], [noise_of(seed)])
        return tree.tokens.tolist()

    assert tokens(1) == tokens(1)
    if Law.IID in GROWERS[name][1]:
        assert len({tuple(tokens(seed)) for seed in range(5)}) > 1


@pytest.mark.parametrize("name", ["iid", "k-ary without replacement", "k-ary top", "top plus one", "rsd-c"])
def test_a_k_ary_tree_has_its_expansion(name) -> None:
    make, _ = GROWERS[name]
    (tree,) = make().grow(source_of(ToyLM(6, seed=4), [(0, 1)]), [0], [1], [Budget(99, 9)], [noise_of(1)])
    want = {0: 3, 1: 2, 2: 1, 3: 0}
    twice = name == "iid"  # a token drawn twice has one child, which makes the draws of both
    for node, depth in enumerate(tree.depths.tolist()):
        assert len(tree.draws[node]) == want[depth] or (twice and len(tree.draws[node]) > want[depth])
    assert sum(map(len, tree.draws)) == 3 + 6 + 6


def test_independent_draws_of_k_paths_keep_k_paths() -> None:
    for seed in range(20):
        source = source_of(ToyLM(3, seed=1), [(0, 1)])
        (tree,) = KAry((4, 1, 1), "iid").grow(source, [0], [1], [Budget(99, 9)], [noise_of(seed)])
        for depth in range(3):
            assert sum(len(tree.draws[i]) for i in range(len(tree)) if tree.depths[i] == depth) == 4


def test_the_source_runs_only_nodes_that_are_expanded() -> None:
    class Watched(Counted):
        rows = 0

        def extend(self, slots, trees, done):
            self.rows += sum(len(tree) - first for tree, first in zip(trees, done, strict=True))
            return super().extend(slots, trees, done)

    source = Watched(ToyLM(6, seed=4))
    source.begin(0, Text(0, 1))
    (tree,) = Sequoia(depth=5).grow(source, [0], [1], [Budget(16, 5)], [noise_of(1)])
    assert tree.candidates == 16
    assert source.rows == sum(bool(draws) for draws in tree.draws[1:]) < 16


@pytest.mark.parametrize("name", ["chain", "k-ary without replacement", "rsd-s", "dyspec heap", "top plus one"])
def test_a_row_that_sums_below_one_is_drawn_from_as_what_it_says_afterwards(name) -> None:
    """Drawing in proportion and reporting the smaller numbers would bias every coupled rule."""
    make, _ = GROWERS[name]
    source = source_of(ToyLM(5, seed=4), [(0, 1)])
    source.scale = 0.5
    (tree,) = make().grow(source, [0], [1], [Budget(12, 4)], [noise_of(1)])
    rows = [d.row for draws in tree.draws for d in draws if d.row is not None]
    assert rows and all(row.probs.sum() == pytest.approx(1.0) for row in rows)


def test_rows_after_each_draw_are_the_rows_less_what_was_drawn() -> None:
    """The compiled reduction against `QRow.without`, draw by draw."""
    generator = np.random.default_rng(3)
    for _ in range(50):
        size = int(generator.integers(2, 40))
        weights = np.exp(generator.normal(size=size) * 3)
        row = QRow(generator.permutation(999)[:size], weights / weights.sum())
        drawn = generator.permutation(size)[: generator.integers(2, size + 1)].tolist()
        left = row
        for index, (token, reduced_row) in zip(drawn, reduced(row, drawn), strict=True):
            assert token == row.ids[index] and set(reduced_row.ids.tolist()) == set(left.ids.tolist())
            assert [reduced_row.prob(t) for t in left.ids.tolist()] == pytest.approx(left.probs.tolist(), rel=1e-9)
            left = left.without(token)


def test_compiled_draws_are_the_ones_written_out() -> None:
    """A short row is searched by compiled code, a long one by numpy: the same index for the same number."""
    generator = np.random.default_rng(4)
    for size in (1, 2, 255, 1000):
        for _ in range(50):
            weights = np.exp(generator.normal(size=size) * 4) * (generator.random(size) < 0.7)
            weights[-1] += 1e-300
            for u in (float(generator.random()), 2.0**-53, 1.0 - 2.0**-53):
                sums = weights.cumsum()
                index = int(sums.searchsorted(u * sums[-1], side="right"))
                assert inverse(weights, u) == (index if index < size else int(np.nonzero(weights)[0][-1]))


def test_the_tree_a_source_is_shown_is_a_proper_one() -> None:
    """It is put together without the checks of a new tree: the depths must be those a new one finds."""
    growth = Growth(7, Budget(9, 9), None)
    a, b = growth.add(0, 1), growth.add(0, 2)
    c = growth.add(b, 3)
    for nodes in ([b], [c, a]):
        tree, done = growth.running(nodes)
        again = TokenTree(tree.tokens, tree.parents, tree.draws)
        assert tree.depths.tolist() == again.depths.tolist() and done == len(tree) - len(nodes)
    assert tree.tokens.tolist() == [7, 2, 3, 1] and tree.parents.tolist() == [-1, 0, 1, 0]
