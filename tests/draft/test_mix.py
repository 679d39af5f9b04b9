"""Mix: the union is a set union, sizes are the best ones, learning finds who is right, no draw is ever cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.check.enumeration import Branches
from outrider.check.exhaustive import CASES, CONTEXT, TOLERANCE, Case, _Text, distance, step_law
from outrider.check.toy import ToySource
from outrider.draft.evidence import Evidence
from outrider.draft.grown import Grown
from outrider.draft.mix import Mix, _levels
from outrider.draft.predicted import Predicted
from outrider.draft.recycling import Recycling
from outrider.draft.rehearsal import rehearse
from outrider.errors import InputError
from outrider.grow.kary import KAry
from outrider.grow.shared import SharedRace
from outrider.protocols import Budget, Chunk, Context, Needs, Noise, Scores, StepRecord, Verdict, Verifier
from outrider.tree import TokenTree, from_paths, root
from outrider.verify.naive import Naive
from outrider.verify.recursive import Recursive
from outrider.verify.traversal import Traversal

Paths = list[tuple[int, ...]]
PENDING = 1
paths_of = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=6)


@dataclass(slots=True)
class Says:
    """Proposes the paths it is told, all equally sure."""

    paths: Callable[[], Paths]
    sure: float = 0.5
    name: str = "says"
    needs: Needs = field(default_factory=Needs)
    shared_noise: bool = False

    def begin(self, slot: int, context: Context, chunks: Iterable[Chunk]) -> None: ...
    def end(self, slot: int) -> None: ...
    def observe(self, slot: int, record: StepRecord) -> None: ...

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> list[TokenTree]:
        return [weighted(self.paths(), self.sure) for _ in slots]


def weighted(paths: Paths, sure: float = 0.5) -> TokenTree:
    tree = from_paths(PENDING, paths)
    return TokenTree(tree.tokens, tree.parents, tree.draws, tree.origins, sure ** tree.depths.astype(float))


def prefixes(paths: Iterable[Sequence[int]]) -> set[tuple[int, ...]]:
    return {tuple(path[:n]) for path in paths for n in range(1, len(path) + 1)}


def spelled(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.path_tokens(node)) for node in range(1, len(tree))}


def mix_of(*says: Says, slots: int = 1, **options) -> Mix:
    mix = Mix(says, **options)
    for slot in range(slots):
        mix.begin(slot, _Text(np.array([0, PENDING])), ())
    return mix


def step(mix: Mix, emitted: Sequence[int], budget: Budget = Budget(16, 4)) -> TokenTree:
    """One step whose text goes on with `emitted`."""
    (tree,) = mix.propose([0], [budget], [None])  # type: ignore[list-item]
    path, node = [], 0
    for token in emitted[:-1]:
        node = tree.child(node, token)
        if node < 0:
            break
        path.append(node)
    mix.observe(0, StepRecord(tree, Verdict(tuple(path), emitted[-1]), tuple(emitted), Scores(None)))
    return tree


@given(first=paths_of, second=paths_of, third=paths_of)
def test_the_union_holds_every_path_of_every_drafter_once(first: Paths, second: Paths, third: Paths) -> None:
    own = Evidence(3).weigh([weighted(first), weighted(second), weighted(third)])
    found = []
    for node in own.order.tolist():
        path = []
        while node:
            path.append(int(own.tokens[node]))
            node = int(own.parents[node])
        found.append(tuple(path[::-1]))
    assert len(found) == len(set(found)) and set(found) == prefixes([*first, *second, *third])
    for node in own.order.tolist():
        whole = found[own.order.tolist().index(node)]
        assert [bool(own.masks[node] >> s & 1) for s in range(3)] == [
            whole in prefixes(paths) for paths in (first, second, third)
        ]


@given(first=paths_of, second=paths_of, data=st.data())
def test_weights_fall_along_paths_siblings_share_one_and_the_order_keeps_parents_first(first, second, data) -> None:
    evidence = Evidence(2)
    evidence.counts[:] = data.draw(st.integers(0, 50))
    evidence.counts[..., 1:] *= data.draw(st.tuples(st.floats(0, 1), st.floats(0, 1)))  # right, claimed
    own = evidence.weigh([weighted(first, 0.9), weighted(second, 0.3)])
    seen = {0}
    for node in own.order.tolist():
        parent = int(own.parents[node])
        assert parent in seen and own.weights[node] <= own.weights[parent] + 1e-12
        seen.add(node)
    for parent in range(len(own.tokens)):
        children = own.weights[own.parents == parent]
        assert children[children > 0].sum() <= own.weights[parent] + 1e-9


@given(first=paths_of, second=paths_of, text=st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_with_room_for_both_the_mixture_accepts_what_the_better_one_would(first: Paths, second: Paths, text) -> None:
    mix = mix_of(Says(lambda: first), Says(lambda: second))
    (tree,) = mix.propose([0], [Budget(64, 4)], [None])  # type: ignore[list-item]

    def accepted(tree: TokenTree) -> int:
        return max((len(path) for path in spelled(tree) if list(path) == text[: len(path)]), default=0)

    assert accepted(tree) == max(accepted(weighted(first)), accepted(weighted(second)))


@given(first=paths_of, second=paths_of, nodes=st.integers(0, 6))
def test_the_budget_holds_and_what_stays_is_a_tree(first: Paths, second: Paths, nodes: int) -> None:
    mix = mix_of(Says(lambda: first, 0.9), Says(lambda: second, 0.4))
    (tree,) = mix.propose([0], [Budget(nodes, 4)], [None])  # type: ignore[list-item]
    assert tree.candidates == min(nodes, len(prefixes([*first, *second])))
    assert spelled(tree) == prefixes(spelled(tree))


@given(
    paths=st.lists(paths_of, min_size=1, max_size=3), sure=st.floats(0.05, 0.95), slope=st.floats(0.0, 0.5),
)  # fmt: skip
def test_sizes_give_the_most_tokens_per_second_over_the_batch(paths: list[Paths], sure: float, slope: float) -> None:
    def seconds(batch: int, most: int) -> np.ndarray:
        return 1.0 + slope * np.arange(most + 1)

    slots = list(range(len(paths)))
    mix = Mix([Says(list)], seconds=seconds, margin=1.0)
    unions = [mix.evidence.weigh([weighted(own, sure)]) for own in paths]
    sizes = mix._sizes(unions, [64] * len(slots), 0, 0.0)
    kept = [own.weights[own.order[:size]].sum() for own, size in zip(unions, sizes, strict=True)]
    rate = (len(slots) + sum(kept)) / (1.0 + slope * sum(sizes))
    every = np.sort(np.concatenate([own.weights[1:] for own in unions]))[::-1]
    best = max((len(slots) + every[:n].sum()) / (1.0 + slope * n) for n in range(len(every) + 1))
    assert rate == pytest.approx(best)


def test_where_no_candidate_pays_the_step_is_plain() -> None:
    dear = mix_of(Says(lambda: [(2,)], 0.3), seconds=lambda batch, most: 1.0 + np.arange(most + 1))
    assert step(dear, [3]).candidates == 0


@dataclass(slots=True)
class Counted(Says):
    """Also counts how often it was asked, how deep, and how many steps it saw."""

    asked: list[Budget] = field(default_factory=list)
    seen: int = 0

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> list[TokenTree]:
        self.asked += budgets
        return [weighted([path[: budget.depth] for path in self.paths()], self.sure) for budget in budgets]

    def observe(self, slot: int, record: StepRecord) -> None:
        self.seen += 1


def flat(batch: int, most: int) -> np.ndarray:
    return np.ones(most + 1)


def test_a_dear_part_is_asked_where_the_cheap_ones_know_nothing_and_not_where_they_copy() -> None:
    state = {"copying": True}
    cheap = Says(lambda: [(2, 2, 2, 2)] if state["copying"] else [], 0.99)
    dear = Counted(lambda: [(2, 2, 2, 2)], 0.7)
    mix = mix_of(cheap, dear, dear=1, seconds=flat)
    mix.worths[0].time(6, 0.5)  # half a step for the whole depth; the fake itself takes no time
    counts = {True: 0, False: 0}
    for i in range(400):
        state["copying"] = i % 2 == 0
        before = len(dear.asked)
        step(mix, [2, 2, 2, 2, 3], Budget(16, 6))
        mix.worths[0]._times.clear()
        mix.worths[0].time(6, 0.5)
        counts[state["copying"]] += len(dear.asked) - before
    assert counts[False] > 190 and counts[True] < 40
    assert dear.seen == 400  # it hears of steps in which it was not asked


def test_without_costs_a_dear_part_is_always_asked_for_the_whole_budget() -> None:
    dear = Counted(lambda: [(2, 2)], 0.01)
    mix = mix_of(Says(lambda: [(3,)]), dear, dear=1)
    for _ in range(30):
        step(mix, [3])
    assert dear.asked == [Budget(16, 4)] * 30


def test_candidates_that_were_not_verified_are_judged_all_the_same() -> None:
    """A mixture that stopped speculating must notice when its drafters are right again."""
    mix = mix_of(Says(lambda: [(2,)], 0.3), seconds=lambda batch, most: 1.0 + 0.5 * np.arange(most + 1))
    sizes = [step(mix, [2]).candidates for _ in range(30)]
    assert sizes[0] == 0 and sizes[-1] == 1


def test_a_drafter_that_is_always_wrong_loses_its_place_to_one_that_is_right() -> None:
    mix = mix_of(Says(lambda: [(0,), (1,)], 0.95), Says(lambda: [(2,)], 0.1))
    trees = [step(mix, [2, 3], Budget(1, 1)) for _ in range(40)]
    assert spelled(trees[0]) == {(0,)} and spelled(trees[-1]) == {(2,)}


def test_a_drafter_that_claimed_too_much_is_not_believed_at_a_strength_it_never_used_before() -> None:
    boaster = Says(lambda: [(0,)], 0.9)
    mix = mix_of(boaster, Says(lambda: [(2,)], 0.3))
    for i in range(30):
        step(mix, [2 + i % 2], Budget(1, 1))
    boaster.sure = 0.6  # a kind that was never seen
    assert spelled(step(mix, [2, 3], Budget(1, 1))) == {(2,)}


def test_agreement_of_two_drafters_is_a_kind_of_its_own() -> None:
    """Alone each is right once in two, together always: the shared candidate comes first."""
    turn = iter(range(1000))
    state = {"together": True}

    def first() -> Paths:
        state["together"] = next(turn) % 2 == 0
        return [(2,), (0,)] if state["together"] else [(0,)]

    mix = mix_of(Says(first), Says(lambda: [(2,)] if state["together"] else [(3,)]))
    for i in range(200):
        step(mix, [2] if i % 2 == 0 else [0 if i % 4 == 1 else 3])
    alone, both = mix.evidence.counts[1], mix.evidence.counts[3]
    assert both[..., 1].sum() / both[..., 0].sum() > 0.99
    assert alone[..., 1].sum() / alone[..., 0].sum() < 0.6


def test_routing_takes_the_tree_of_the_better_drafter() -> None:
    rng = np.random.default_rng(0)
    noise = Says(lambda: [tuple(rng.integers(10, 90, 3))], 0.6, name="noise")
    good = Says(lambda: [(2, 2, 2)], 0.4, name="good")
    mix = mix_of(noise, good, combine="route")
    trees = [step(mix, [2, 2, 2, 2]) for _ in range(60)]
    assert sum(spelled(tree) == {(2,), (2, 2), (2, 2, 2)} for tree in trees[10:]) > 45
    assert all(len({*tree.origins[1:]}) == 1 for tree in trees)


def drawn_mix(
    case: Case, nodes: int, scheme: str = "without-replacement", alone: bool = False
) -> Callable[[Branches], TokenTree]:  # fmt: skip
    """A sampled tree, and point masses from other drafters, merged; or the first alone."""

    def draft(paths: Branches) -> TokenTree:
        sampled = Grown(ToySource(case.draft), KAry((2, 1), scheme), sampled=True)
        ranked = [Says(lambda: [(0, 2), (2, 1), (1,)], 0.7), Says(lambda: [(0, 1), (3,)], 0.6)]
        mix = Mix([] if alone else ranked, drawn=[sampled], dear=0 if alone else 1, seconds=flat)
        mix.begin(0, _Text(np.array(CONTEXT)), ())
        return mix.propose([0], [Budget(nodes, 3)], [paths.noise("draft")])[0]

    return draft


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_sampled_part_and_ranked_point_masses_give_the_targets_law(case: Case) -> None:
    law, count = step_law(Recursive(), drawn_mix(case, 7), case.target)
    assert count > 1 or case.target.greedy
    assert distance(law, case.target, 4) <= TOLERANCE


@pytest.mark.parametrize("rule", [Recursive(), Naive(), Traversal()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_how_many_point_masses_stay_may_depend_on_what_was_drawn(case: Case, alone: bool, rule: Verifier) -> None:
    """Equal draws share a node and leave room for another candidate."""
    law, count = step_law(rule, drawn_mix(case, 7, "iid", alone), case.target)
    assert count > 1 and distance(law, case.target, 4) <= TOLERANCE


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
    mix = Mix([Says(list)], drawn=parts)
    mix.begin(0, _Text(np.array(CONTEXT)), ())
    recorder = Recorder()
    mix.propose([0], [Budget(16, 2)], [recorder])  # type: ignore[list-item]
    assert len(recorder.keys) >= 4 and len(set(recorder.keys)) == len(recorder.keys)


def test_a_part_that_follows_the_targets_noise_sees_the_targets_own() -> None:
    class LastFirst:
        def first(self, ids, probs, depth: int, count: int) -> list[int]:
            return list(range(len(ids)))[::-1][:count]

    case, noise = CASES[0], LastFirst()
    parts = [Grown(ToySource(case.draft), SharedRace((2, 1)), sampled=True, shared_noise=True) for _ in range(2)]
    mix = Mix([], drawn=parts)
    mix.begin(0, _Text(np.array(CONTEXT)), ())
    (tree,) = mix.propose([0], [Budget(16, 2)], [noise])  # type: ignore[list-item]
    (alone,) = parts[0].propose([0], [Budget(4, 2)], [noise])  # type: ignore[list-item]
    assert mix.shared_noise and tree.candidates and spelled(tree) == spelled(alone)


def test_more_drafters_than_the_table_of_kinds_holds_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="at most 5"):
        Mix([Says(list)] * 6)


def test_a_drawing_part_whose_candidates_are_accepted_gets_a_larger_share() -> None:
    mix = mix_of(Says(list))
    mix.shares = type(mix.shares)(2)
    before = mix.shares.now()
    tree = TokenTree(*(lambda t: (t.tokens, t.parents, t.draws, ("", "b")))(from_paths(PENDING, [(2,)])))
    for _ in range(50):
        mix.shares.learn(StepRecord(tree, Verdict((1,), 3), (2, 3), Scores(None)), ["a", "b"])
    after = mix.shares.now()
    assert before[0] == before[1] and after[1] > before[1] and after[0] >= mix.shares.least * 0.9
    assert sum(after) <= mix.shares.most + 1e-9


def test_a_rehearsal_leaves_the_drafters_as_new() -> None:
    mix = Mix([Says(lambda: [(2,), (0, 1)])])
    rehearse(mix, 10)
    mix.begin(0, _Text(np.array([0, PENDING])), ())
    assert not mix.evidence.counts.any() and step(mix, [2]).candidates == 3


@pytest.mark.parametrize("size", [1, 2, 3, 4, 50])
def test_a_rehearsal_says_no_token_that_a_small_vocabulary_lacks(size: int) -> None:
    said: list[int] = []

    class Listens(Says):
        def begin(self, slot: int, context: Context, chunks: Iterable[Chunk]) -> None:
            (row,) = context.draft_rows(torch.zeros(1, size), [()], 4)
            texts = (context.tokens, context.prompt, context.prediction, row.ids, *(chunk.tokens for chunk in chunks))
            said.extend(token for text in texts for token in text)

    rehearse(Listens(lambda: [(0,)]), size)
    rehearse(Mix([Recycling(size), Predicted()]), size)
    assert said and min(said) >= 0 and max(said) < size


def test_what_was_learnt_comes_back_and_can_be_forgotten() -> None:
    mix = mix_of(Says(lambda: [(2,)]))
    for _ in range(5):
        step(mix, [2])
    other = mix_of(Says(lambda: [(2,)]))
    other.remember({name: array.copy() for name, array in mix.memory().items()})
    assert np.array_equal(other.evidence.counts, mix.evidence.counts) and other.evidence.counts.any()
    other.forget()
    assert not other.evidence.counts.any()


def test_a_dear_part_that_stopped_early_is_charged_for_the_levels_it_ran() -> None:
    tree = weighted([(2, 3, 4)], 0.5)
    assert [_levels(tree, Budget(8, 6, least)) for least in (0.0, 0.2, 0.4, 0.9)] == [4, 3, 2, 1]
    assert _levels(tree, Budget(8, 2, 0.2)) == 2
    assert _levels(tree, Budget(tree.candidates, 6)) == 3  # full: nothing was asked below its last node
    assert _levels(root(PENDING), Budget(8, 6)) == 0  # it knew nothing, which takes no time


@pytest.mark.parametrize("batch", [1, 4])
def test_what_a_path_must_be_worth_does_not_grow_with_the_batch_that_shares_a_level(batch: int) -> None:
    dear = Counted(lambda: [(2, 2)], 0.7)
    mix = mix_of(dear, dear=1, slots=batch, seconds=flat)
    mix.worths[0].time(6, 0.7)
    mix.propose(range(batch), [Budget(16, 6)] * batch, [None] * batch)  # type: ignore[list-item]
    assert [budget.least for budget in dear.asked] == pytest.approx([0.2] * batch)


def test_parts_are_asked_for_twice_what_is_in_use_and_a_copy_gets_its_room_within_a_few_steps() -> None:
    state = {"path": (3,)}
    part = Counted(lambda: [state["path"]], 0.99)
    mix = mix_of(part, seconds=flat)
    for _ in range(60):
        step(mix, [3], Budget(32, 16))
    assert part.asked[-1].nodes == 4
    state["path"] = (2,) * 16
    for _ in range(4):
        step(mix, [2] * 17, Budget(32, 16))
    assert part.asked[-1].nodes == 32
    assert mix_of(part).propose([0], [Budget(32, 16)], [None]) and part.asked[-1].nodes == 32  # type: ignore[list-item]
