"""Stochastic beam search without times: its kept prefixes are distributed like sequences drawn without replacement."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from outrider.check.enumeration import outcomes
from outrider.check.exhaustive import CONTEXT, grow_tree
from outrider.check.toy import ToyLM
from outrider.core.noise import DRAFT, StreamNoise
from outrider.core.records import Budget
from outrider.grow import rsd
from outrider.grow.rsd import ConstantBranching, StochasticBeam

Kept = tuple[frozenset[tuple[int, ...]], ...]  # per depth


def grown(lm: ToyLM, width: int, depth: int) -> dict[Kept, float]:
    def kept(paths) -> Kept:
        tree = grow_tree(StochasticBeam(width, depth), lm, Budget(99, depth), paths.noise("draft"))
        levels: list[set[tuple[int, ...]]] = [set() for _ in range(depth)]
        for node in range(1, len(tree)):
            levels[tree.depths[node] - 1].add(tuple(tree.path_tokens(node)))
        return tuple(map(frozenset, levels))

    return outcomes(kept, limit=50_000)


def drawn(lm: ToyLM, width: int, depth: int) -> dict[Kept, float]:
    """Whole sequences one after another without replacement; each depth keeps the first prefixes it sees."""
    chance = {}
    for tokens in product(range(lm.vocab), repeat=depth):
        p = 1.0
        for i, token in enumerate(tokens):
            p *= float(lm.probs((*CONTEXT, *tokens[:i]))[token])
        if p > 0:
            chance[tokens] = p

    def walk(left: dict, levels: list[list[tuple[int, ...]]], weight: float) -> Iterator[tuple[Kept, float]]:
        if all(len(level) == width for level in levels) or not left:
            yield tuple(map(frozenset, levels)), weight
            return
        total = sum(left.values())
        for tokens, p in left.items():
            new = [list(level) for level in levels]
            for i, level in enumerate(new):
                if len(level) < width and tokens[: i + 1] not in level:
                    level.append(tokens[: i + 1])
            yield from walk({k: v for k, v in left.items() if k != tokens}, new, weight * p / total)

    probs: dict[Kept, float] = {}
    for kept, weight in walk(chance, [[] for _ in range(depth)], 1.0):
        probs[kept] = probs.get(kept, 0.0) + weight
    return probs


def difference(lm: ToyLM, width: int, depth: int) -> float:
    mine, want = grown(lm, width, depth), drawn(lm, width, depth)
    return max(abs(mine.get(key, 0.0) - want.get(key, 0.0)) for key in {*mine, *want})


@pytest.mark.parametrize(
    ("lm", "width", "depth"),
    [
        (ToyLM(3, seed=1), 1, 3),
        (ToyLM(3, seed=1), 2, 2),
        (ToyLM(3, seed=5, concentration=0.3), 2, 2),
        (ToyLM(2, seed=3), 2, 3),
        (ToyLM(2, seed=4), 3, 3),
        (ToyLM(3, seed=6, zeros=0.5), 2, 3),
    ],
)
def test_kept_prefixes_are_those_of_sequences_without_replacement(lm: ToyLM, width: int, depth: int) -> None:
    assert difference(lm, width, depth) < 1e-12


def test_parents_that_all_enter_the_race_at_once_are_seen(monkeypatch) -> None:
    """Children weighted by path probability alone, that is, forgetting that arrived parents arrived early."""
    original = rsd._Beam._race

    def race(self, *args):
        self._outside = 0.0
        return original(self, *args)

    monkeypatch.setattr(rsd._Beam, "_race", race)
    assert difference(ToyLM(3, seed=1), 2, 2) > 1e-3


def test_a_beam_as_wide_as_the_tree_keeps_everything() -> None:
    probs = grown(ToyLM(2, seed=3), 4, 2)
    assert [len(level) for level in next(iter(probs))] == [2, 4] and len(probs) == 1


def test_without_noise_it_is_beam_search() -> None:
    lm = ToyLM(4, seed=2)
    tree = grow_tree(StochasticBeam(3, 2), lm, Budget(99, 9), None)
    first = lm.probs(CONTEXT)
    beam = sorted(range(4), key=lambda t: -first[t])[:3]
    pairs = {(a, b): first[a] * lm.probs((*CONTEXT, a))[b] for a in beam for b in range(4)}
    best = set(sorted(pairs, key=lambda pair: -pairs[pair])[:3])
    assert {tuple(tree.path_tokens(i)) for i in range(len(tree)) if tree.depths[i] == 2} == best


def test_ordered_siblings_have_the_distribution_of_sampling_without_replacement() -> None:
    lm = ToyLM(5, seed=2)
    p = lm.probs(CONTEXT)
    probs = outcomes(
        lambda paths: tuple(
            d.token for d in grow_tree(ConstantBranching((3,)), lm, Budget(9, 1), paths.noise("draft")).draws[0]
        )
    )
    assert len(probs) == 60
    for (a, b, c), found in probs.items():
        assert found == pytest.approx(p[a] * p[b] / (1 - p[a]) * p[c] / (1 - p[a] - p[b]), rel=1e-9)


def test_paths_of_vanishing_probability_still_grow() -> None:
    class Tiny(ToyLM):
        def probs(self, context):
            p = super().probs(context).copy()
            p[:] = [1.0 - 2e-45, 1e-45, 1e-45]
            return p

    tree = grow_tree(StochasticBeam(3, 12), Tiny(3), Budget(99, 12), StreamNoise(1, 0, DRAFT, 0, 0))
    assert tree.depth == 12 and tree.candidates == 36
