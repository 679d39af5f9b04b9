"""The re-ranked tree holds the likeliest prefixes of all, and is connected even where values tie."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.check.exhaustive import CONTEXT, grow_tree
from outrider.check.toy import ToyLM, ToySource
from outrider.core.records import Budget
from outrider.grow import topk
from outrider.grow.topk import TopK


class Text:
    tokens = np.array(CONTEXT)


def chance(lm: ToyLM, path: tuple[int, ...]) -> float:
    p = 1.0
    for i, token in enumerate(path):
        p *= float(lm.probs((*CONTEXT, *path[:i]))[token])
    return p


def best(lm: ToyLM, nodes: int, depth: int) -> float:
    paths = [path for d in range(1, depth + 1) for path in product(range(lm.vocab), repeat=d)]
    return sum(sorted((chance(lm, p) for p in paths), reverse=True)[:nodes])


def worth(lm: ToyLM, tree) -> float:
    return sum(chance(lm, tuple(tree.path_tokens(node))) for node in range(1, len(tree)))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), nodes=st.integers(1, 14), depth=st.integers(1, 3))
def test_a_wide_beam_keeps_the_likeliest_prefixes(seed: int, nodes: int, depth: int) -> None:
    lm = ToyLM(4, seed=seed)
    tree = grow_tree(TopK(beam=64, branch=4, depth=depth), lm, Budget(nodes, 9), None)
    assert tree.candidates == min(nodes, sum(4**d for d in range(1, depth + 1)))
    assert worth(lm, tree) == pytest.approx(best(lm, nodes, depth))


def test_ties_keep_the_parent() -> None:
    class Certain(ToyLM):
        def probs(self, context):
            return np.array([1.0, 0.0, 0.0])

    tree = grow_tree(TopK(beam=2, branch=2, depth=4), Certain(3), Budget(3, 9), None)
    assert tree.is_chain and tree.candidates == 3


def test_keeping_the_last_level_instead_of_the_best_would_be_seen(monkeypatch) -> None:
    monkeypatch.setattr(
        topk, "sorted", lambda items, **kw: sorted(items, reverse=kw.get("reverse", False)), raising=False
    )
    lm = ToyLM(4, seed=3)
    tree = grow_tree(TopK(beam=64, branch=4, depth=3), lm, Budget(10, 9), None)
    assert worth(lm, tree) < best(lm, 10, 3) - 1e-3


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), least=st.floats(0.0, 1.0))
def test_every_path_that_is_worth_another_level_gets_one_and_no_other_does(seed: int, least: float) -> None:
    lm = ToyLM(3, seed=seed)
    tree = grow_tree(TopK(beam=64, branch=3, depth=3), lm, Budget(39, 3, least), None)
    inner = {tuple(tree.path_tokens(node)) for node in range(1, len(tree)) if tree.children(node)}
    shallow = [path for d in (1, 2) for path in product(range(3), repeat=d)]
    assert inner == {path for path in shallow if chance(lm, path) >= least}


def test_a_full_tree_is_not_asked_what_follows_its_last_node() -> None:
    calls = 0

    class Watched(ToySource):
        def extend(self, slots, trees, done):
            nonlocal calls
            calls += 1
            return super().extend(slots, trees, done)

    class Sure(ToyLM):
        def probs(self, context):
            return np.array([0.9, 0.06, 0.04])

    lm = Sure(3)
    for nodes in (1, 2, 3):  # each a chain: as many levels as nodes, of which the first needs no call
        calls, source = 0, Watched(lm)
        source.begin(0, Text())
        TopK(beam=3, branch=3, depth=6).grow(source, [0], [CONTEXT[-1]], [Budget(nodes, 6)], [None])
        assert calls == nodes - 1


def test_the_beam_bounds_the_rows_of_each_source_call() -> None:
    sizes: list[int] = []
    original = ToySource.extend

    class Watched(ToySource):
        def extend(self, slots, trees, done):
            sizes.append(len(trees[0]) - done[0])
            return original(self, slots, trees, done)

    source = Watched(ToyLM(6, seed=1, concentration=5.0))
    source.begin(0, Text())
    (tree,) = TopK(beam=3, branch=4, depth=4).grow(source, [0], [CONTEXT[-1]], [Budget(40, 9)], [None])
    assert sizes == [3, 3, 3] and tree.candidates == 40
