"""Mix: the union is a set union, no draw is ever cut, and the text keeps the target's distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.check.enumeration import Branches
from outrider.check.exhaustive import CASES, CONTEXT, TOLERANCE, Case, _Text, distance, step_distribution
from outrider.check.toy import ToySource
from outrider.core.proposals import united
from outrider.core.protocols import Context, Verifier
from outrider.core.records import Budget, Chunk, Role
from outrider.core.tree import TokenTree
from outrider.draft.grown import Grown
from outrider.draft.lookup.predicted import Predicted
from outrider.draft.lookup.suffix import Suffix
from outrider.draft.rehearsal import rehearse
from outrider.draft.table.recycling import Recycling
from outrider.grow.kary import KAry
from outrider.grow.shared import SharedRace
from outrider.verify.naive import Naive
from outrider.verify.recursive import Recursive
from outrider.verify.traversal import Traversal
from tests.draft.mixtures import (
    Paths,
    Says,
    flat,
    joined,
    mix_of,
    paths_of,
    prefixes,
    spelled,
    weighted,
)


@given(first=paths_of, second=paths_of, third=paths_of)
def test_the_union_holds_every_path_of_every_drafter_once(first: Paths, second: Paths, third: Paths) -> None:
    candidates = united(list(enumerate([weighted(first), weighted(second), weighted(third)])))
    found = []
    for node in range(1, len(candidates.tokens)):
        path = []
        while node:
            path.append(int(candidates.tokens[node]))
            node = int(candidates.parents[node])
        found.append(tuple(path[::-1]))
    assert len(found) == len(set(found)) and set(found) == prefixes([*first, *second, *third])
    for node, whole in enumerate(found, 1):
        assert [bool(candidates.makers[node] >> s & 1) for s in range(3)] == [
            whole in prefixes(paths) for paths in (first, second, third)
        ]


@given(first=paths_of, second=paths_of, text=st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_with_room_for_both_the_mixture_accepts_what_the_better_one_would(first: Paths, second: Paths, text) -> None:
    mix = mix_of(Says(lambda: first), Says(lambda: second))
    (tree,) = mix.trees([0], [Budget(64, 4)], [None])

    def accepted(tree: TokenTree) -> int:
        return max((len(path) for path in spelled(tree) if list(path) == text[: len(path)]), default=0)

    assert accepted(tree) == max(accepted(weighted(first)), accepted(weighted(second)))


@given(first=paths_of, second=paths_of, nodes=st.integers(0, 6))
def test_the_budget_holds_and_what_stays_is_a_tree(first: Paths, second: Paths, nodes: int) -> None:
    mix = mix_of(Says(lambda: first, 0.9), Says(lambda: second, 0.4))
    (tree,) = mix.trees([0], [Budget(nodes, 4)], [None])
    assert tree.candidates == min(nodes, len(prefixes([*first, *second])))
    assert spelled(tree) == prefixes(spelled(tree))


def drawn_mix(
    case: Case, nodes: int, scheme: str = "without-replacement", alone: bool = False
) -> Callable[[Branches], TokenTree]:  # fmt: skip
    """A sampled tree, and point masses from other drafters, merged; or the first alone."""

    def draft(paths: Branches) -> TokenTree:
        sampled = Grown(ToySource(case.draft), KAry((2, 1), scheme), sampled=True)
        ranked = [
            (Says(lambda: [(0, 2), (2, 1), (1,)], 0.7), Role.FREE),
            (Says(lambda: [(0, 1), (3,)], 0.6), Role.RUNS),
        ]
        mixture = joined([*([] if alone else ranked), (sampled, Role.DRAWS)], seconds=flat)
        mixture.mix.begin(0, _Text(np.array(CONTEXT)))
        return mixture.trees([0], [Budget(nodes, 3)], [paths.noise("draft")])[0]

    return draft


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_sampled_part_and_ranked_point_masses_give_the_targets_distribution(case: Case) -> None:
    emitted, count = step_distribution(Recursive(), drawn_mix(case, 7), case.target)
    assert count > 1 or case.target.greedy
    assert distance(emitted, case.target, 4) <= TOLERANCE


@pytest.mark.parametrize("rule", [Recursive(), Naive(), Traversal()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_how_many_point_masses_stay_may_depend_on_what_was_drawn(case: Case, alone: bool, rule: Verifier) -> None:
    """Equal draws share a node and leave room for another candidate."""
    emitted, count = step_distribution(rule, drawn_mix(case, 7, "iid", alone), case.target)
    assert count > 1 and distance(emitted, case.target, 4) <= TOLERANCE


def test_two_drawing_parts_do_not_share_their_random_bits() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.keys: list[tuple[int, int]] = []

        def draw(self, weights, node: int, draw: int) -> int:
            self.keys.append((node, draw))
            return 0

        def coin(self, p: float, node: int, draw: int) -> bool:
            raise AssertionError

    case = CASES[0]
    parts = [Grown(ToySource(model), KAry((2, 1), "iid"), sampled=True) for model in (case.draft, case.second)]
    mixture = joined([(Says(list), Role.FREE), *((part, Role.DRAWS) for part in parts)])
    mixture.mix.begin(0, _Text(np.array(CONTEXT)))
    recorder = Recorder()
    mixture.trees([0], [Budget(16, 2)], [recorder])  # type: ignore[list-item]
    assert len(recorder.keys) >= 4 and len(set(recorder.keys)) == len(recorder.keys)


def test_a_part_that_follows_the_targets_noise_sees_the_targets_own() -> None:
    class LastFirst:
        def first(self, ids, probs, depth: int, count: int) -> list[int]:
            return list(range(len(ids)))[::-1][:count]

    case, noise = CASES[0], LastFirst()
    parts = [Grown(ToySource(case.draft), SharedRace((2, 1)), sampled=True, shared_noise=True) for _ in range(2)]
    mixture = joined([(part, Role.DRAWS) for part in parts])
    mixture.mix.begin(0, _Text(np.array(CONTEXT)))
    (tree,) = mixture.trees([0], [Budget(16, 2)], [noise])  # type: ignore[list-item]
    (alone,) = parts[0].propose([0], [Budget(4, 2)], [noise])  # type: ignore[list-item]
    assert mixture.mix.shared_noise and tree.candidates and spelled(tree) == spelled(alone)


def test_a_rehearsal_leaves_the_drafters_as_new() -> None:
    copying = Suffix()
    rehearse(joined([(copying, Role.FREE)]).mix, 10)
    assert not copying.memory()["tokens"].any() if "tokens" in copying.memory() else True
    mixture = joined([(copying, Role.FREE)])
    mixture.mix.begin(0, _Text(np.array([1, 2, 3, 1])))
    assert mixture.trees([0], [Budget(4, 4)], [None])[0].candidates  # it works, and knows this text


@pytest.mark.parametrize("size", [1, 2, 3, 4, 50])
def test_a_rehearsal_says_no_token_that_a_small_vocabulary_lacks(size: int) -> None:
    said: list[int] = []

    class Listens(Says):
        def begin(self, slot: int, context: Context) -> None:
            (row,) = context.draft_rows(torch.zeros(1, size), [()], 4)
            for text in (context.tokens, context.prompt, context.prediction, row.ids):
                said.extend(text)

        def absorb(self, chunks: Sequence[Chunk]) -> None:
            for chunk in chunks:
                said.extend(chunk.tokens)

    rehearse(Listens(lambda: [(0,)]), size)
    rehearse(joined([(Recycling(size), Role.LOOKS), (Predicted(), Role.FREE)]).mix, size)
    assert said and min(said) >= 0 and max(said) < size
