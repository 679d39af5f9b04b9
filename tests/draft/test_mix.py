"""Mix and its controller: the union is a set union, learning finds who is right, no draw is ever cut."""

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
from outrider.control.acceptance import Acceptance, ranked
from outrider.control.goodput import Goodput
from outrider.control.pace import Pace
from outrider.control.share import Shares
from outrider.draft.grown import Grown
from outrider.draft.mix import Mix
from outrider.draft.predicted import Predicted
from outrider.draft.recycling import Recycling
from outrider.draft.rehearsal import rehearse
from outrider.draft.suffix import Suffix
from outrider.errors import InputError
from outrider.grow.kary import KAry
from outrider.grow.shared import SharedRace
from outrider.proposals import Proposals, united
from outrider.protocols import (
    Budget,
    Chunk,
    Context,
    Drafter,
    Load,
    Needs,
    Noise,
    Part,
    Role,
    Scores,
    StepRecord,
    StepTiming,
    Verdict,
    Verifier,
)
from outrider.tree import TokenTree, from_paths
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

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        return Proposals([weighted(self.paths(), self.sure) for _ in slots])


def weighted(paths: Paths, sure: float = 0.5) -> TokenTree:
    tree = from_paths(PENDING, paths)
    return TokenTree(tree.tokens, tree.parents, tree.draws, tree.origins, sure ** tree.depths.astype(float))


def prefixes(paths: Iterable[Sequence[int]]) -> set[tuple[int, ...]]:
    return {tuple(path[:n]) for path in paths for n in range(1, len(path) + 1)}


def spelled(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.path_tokens(node)) for node in range(1, len(tree))}


@dataclass(slots=True)
class Mixture:
    """A mixture and its controller, driven as the engine does."""

    mix: Mix
    control: Goodput

    def trees(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise | None]) -> list[TokenTree]:
        made = self.mix.propose(slots, budgets, noise)  # type: ignore[arg-type]
        return self.control.size(slots, made, budgets, Load(len(slots)), 0.0)

    def step(self, emitted: Sequence[int], budget: Budget = Budget(16, 4)) -> TokenTree:
        """One step whose text goes on with `emitted`."""
        (tree,) = self.trees([0], [budget], [None])
        path, node = [], 0
        for token in emitted[:-1]:
            node = tree.child(node, token)
            if node < 0:
                break
            path.append(node)
        record = StepRecord(tree, Verdict(tuple(path), emitted[-1]), tuple(emitted), Scores(None))
        self.mix.observe(0, record)
        self.control.observe([0], [record], StepTiming(0.0, 1.0, 0.0, len(tree), 1))
        return tree


@dataclass(slots=True)
class Curve:
    """Costs as they are told, whatever steps take."""

    of: Callable[[int, int], np.ndarray]

    def seconds(self, batch: int, most: int) -> np.ndarray:
        return self.of(batch, most)


def joined(parts: Sequence[tuple[Drafter, Role]], seconds=None, clock=lambda: 0.0, **options) -> Mixture:
    control = Goodput(
        Budget(64, 16), [role for _, role in parts], None if seconds is None else Curve(seconds), **options
    )
    return Mixture(Mix([Part(*part) for part in parts], control, clock), control)


def mix_of(*says: Says, slots: int = 1, last: Role = Role.FREE, **options) -> Mixture:
    """The last one with a role of its own."""
    roles = [*[Role.FREE] * (len(says) - 1), last]
    own = joined(list(zip(says, roles, strict=True)), **options)
    for slot in range(slots):
        own.mix.begin(slot, _Text(np.array([0, PENDING])), ())
    return own


@given(first=paths_of, second=paths_of, third=paths_of)
def test_the_union_holds_every_path_of_every_drafter_once(first: Paths, second: Paths, third: Paths) -> None:
    own = united(list(enumerate([weighted(first), weighted(second), weighted(third)])))
    found = []
    for node in range(1, len(own.tokens)):
        path = []
        while node:
            path.append(int(own.tokens[node]))
            node = int(own.parents[node])
        found.append(tuple(path[::-1]))
    assert len(found) == len(set(found)) and set(found) == prefixes([*first, *second, *third])
    for node, whole in enumerate(found, 1):
        assert [bool(own.makers[node] >> s & 1) for s in range(3)] == [
            whole in prefixes(paths) for paths in (first, second, third)
        ]


@given(first=paths_of, second=paths_of, data=st.data())
def test_weights_fall_along_paths_siblings_share_one_and_the_order_keeps_parents_first(first, second, data) -> None:
    acceptance = Acceptance(2)
    acceptance.counts[:] = data.draw(st.integers(0, 50))
    acceptance.counts[..., 1:] *= data.draw(st.tuples(st.floats(0, 1), st.floats(0, 1)))  # right, claimed
    own = united([(0, weighted(first, 0.9)), (1, weighted(second, 0.3))])
    weights = acceptance.weights(own)
    seen = {0}
    for node in ranked(weights).tolist():
        parent = int(own.parents[node])
        assert parent in seen and weights[node] <= weights[parent] + 1e-12
        seen.add(node)
    for parent in range(len(own.tokens)):
        children = weights[own.parents == parent]
        assert children[children > 0].sum() <= weights[parent] + 1e-9


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


@given(
    paths=st.lists(paths_of, min_size=1, max_size=3), sure=st.floats(0.05, 0.95), slope=st.floats(0.0, 0.5),
)  # fmt: skip
def test_sizes_give_the_most_tokens_per_second_over_the_batch(paths: list[Paths], sure: float, slope: float) -> None:
    def seconds(batch: int, most: int) -> np.ndarray:
        return 1.0 + slope * np.arange(most + 1)

    slots = list(range(len(paths)))
    texts = iter(paths)
    mix = mix_of(Says(lambda: next(texts), sure), slots=len(slots), seconds=seconds, margin=1.0)
    trees = mix.trees(slots, [Budget(64, 4)] * len(slots), [None] * len(slots))
    sizes, offers = [tree.candidates for tree in trees], [mix.control._offers[slot] for slot in slots]
    kept = [own.weights[own.order[:size]].sum() for own, size in zip(offers, sizes, strict=True)]
    rate = (len(slots) + sum(kept)) / (1.0 + slope * sum(sizes))
    every = np.sort(np.concatenate([own.weights[1:] for own in offers]))[::-1]
    best = max((len(slots) + every[:n].sum()) / (1.0 + slope * n) for n in range(len(every) + 1))
    assert rate == pytest.approx(best)


def test_where_no_candidate_pays_the_step_is_plain() -> None:
    expensive = mix_of(Says(lambda: [(2,)], 0.3), seconds=lambda batch, most: 1.0 + np.arange(most + 1))
    assert expensive.step([3]).candidates == 0


@dataclass(slots=True)
class Counted(Says):
    """Also counts how often it was asked, how deep, and how many steps it saw."""

    asked: list[Budget] = field(default_factory=list)
    seen: int = 0
    takes: float = 0.0  # seconds of a level
    now: float = 0.0  # of its clock

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        self.asked += budgets
        trees = [weighted([path[: budget.depth] for path in self.paths()], self.sure) for budget in budgets]
        self.now += self.takes * (1 + max(budget.depth for budget in budgets))
        return Proposals(trees, max(budget.depth for budget in budgets))

    def observe(self, slot: int, record: StepRecord) -> None:
        self.seen += 1


def flat(batch: int, most: int) -> np.ndarray:
    return np.ones(most + 1)


def test_a_network_is_asked_where_the_others_know_nothing_and_not_where_they_copy() -> None:
    state = {"copying": True}
    cheap = Says(lambda: [(2, 2, 2, 2)] if state["copying"] else [], 0.99)
    network = Counted(lambda: [(2, 2, 2, 2)], 0.7, takes=0.07)
    mix = mix_of(cheap, network, last=Role.RUNS, seconds=flat, clock=lambda: network.now)
    counts = {True: 0, False: 0}
    for i in range(400):
        state["copying"] = i % 2 == 0
        before = len(network.asked)
        mix.step([2, 2, 2, 2, 3], Budget(16, 6))
        counts[state["copying"]] += len(network.asked) - before
    assert counts[False] > 190 and counts[True] < 40
    assert network.seen == 400  # it hears of steps in which it was not asked


def test_without_costs_a_network_is_always_asked_for_the_whole_budget() -> None:
    network = Counted(lambda: [(2, 2)], 0.01)
    mix = mix_of(Says(lambda: [(3,)]), network, last=Role.RUNS)
    for _ in range(30):
        mix.step([3])
    assert network.asked == [Budget(16, 4)] * 30


def test_a_network_that_runs_all_its_levels_is_asked_for_all_of_them() -> None:
    """A recording takes the same time however little it is asked for: nothing is saved by asking for less."""

    class Whole(Counted):
        def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
            made = Counted.propose(self, slots, budgets, noise)
            self.now += self.takes * (6 - made.levels)  # what it was not asked for
            return Proposals(made.trees, 6)

    for kind in (Whole, Counted):
        network = kind(lambda: [(2, 3, 0, 0, 0, 0)], 0.8, takes=0.1)
        mix = mix_of(network, last=Role.RUNS, seconds=flat, clock=lambda own=network: own.now)
        for i in range(300):
            mix.step([2, 3, 1] if i % 4 else [2, 3, 0, 1], Budget(16, 6))
        depths = [budget.depth for budget in network.asked[100:]]
        assert np.median(depths) == 6 if kind is Whole else np.median(depths) < 5


@dataclass(slots=True)
class Reader(Says):
    """Takes so long for each row of the target that it reads."""

    takes: float = 0.0
    now: float = 0.0
    seen: int = 0

    def observe(self, slot: int, record: StepRecord) -> None:
        self.seen += 1
        self.now += self.takes * len(record.tree)


@pytest.mark.parametrize(
    ("takes", "right", "reads"), [(0.1, False, False), (0.1, True, True), (0.9, True, False), (0.0, False, True)]
)
def test_a_part_that_reads_rows_sleeps_where_that_costs_more_than_it_brings(takes, right, reads) -> None:
    table = Reader(lambda: [(2,)], 0.5, takes=takes)
    mix = mix_of(Says(list), table, last=Role.LOOKS, seconds=flat, clock=lambda: table.now)
    for _ in range(600):
        mix.step([2, 3] if right else [1])
    assert table.seen > 590 if reads else table.seen < 100


def test_a_network_that_only_tells_which_of_the_others_is_right_is_asked() -> None:
    """Everything that it says is offered anyway; without its word nobody would know which of it to verify."""
    truth = [0]
    others = Says(lambda: [(0,), (1,), (2,), (3,)], 0.25)
    network = Counted(lambda: [(truth[0],)], 0.95, takes=0.04)

    def seconds(batch: int, most: int) -> np.ndarray:
        return 1.0 + 0.2 * np.arange(most + 1)

    mix = mix_of(others, network, last=Role.RUNS, seconds=seconds, clock=lambda: network.now)
    rng = np.random.default_rng(0)
    for _ in range(400):
        truth[0] = int(rng.integers(4))
        mix.step([truth[0], 4], Budget(16, 6))
    assert len(network.asked) > 350


def test_a_part_that_sleeps_asks_for_nothing_and_is_woken_again() -> None:
    table = Reader(lambda: [(2,)], 0.5, needs=Needs(top=4), takes=0.9)
    mix = mix_of(Says(list), table, last=Role.LOOKS, seconds=flat, clock=lambda: table.now)
    asked = []
    for _ in range(300):
        mix.step([1])
        asked.append(mix.mix.needs.top)
    assert asked[0] == 4 and asked[-1] == 0
    table.takes = 0.0  # the machine is quiet again
    for _ in range(5000):
        mix.step([2, 3])
    assert mix.mix.needs.top == 4 and table.seen > 500


def test_candidates_that_were_not_verified_are_judged_all_the_same() -> None:
    """A mixture that stopped speculating must notice when its drafters are right again."""
    mix = mix_of(Says(lambda: [(2,)], 0.3), seconds=lambda batch, most: 1.0 + 0.5 * np.arange(most + 1))
    sizes = [mix.step([2]).candidates for _ in range(30)]
    assert sizes[0] == 0 and sizes[-1] == 1


def test_a_drafter_that_is_always_wrong_loses_its_place_to_one_that_is_right() -> None:
    mix = mix_of(Says(lambda: [(0,), (1,)], 0.95), Says(lambda: [(2,)], 0.1))
    trees = [mix.step([2, 3], Budget(1, 1)) for _ in range(40)]
    assert spelled(trees[0]) == {(0,)} and spelled(trees[-1]) == {(2,)}


def test_a_drafter_that_claimed_too_much_is_not_believed_at_a_strength_it_never_used_before() -> None:
    boaster = Says(lambda: [(0,)], 0.9)
    mix = mix_of(boaster, Says(lambda: [(2,)], 0.3))
    for i in range(30):
        mix.step([2 + i % 2], Budget(1, 1))
    boaster.sure = 0.6  # a kind that was never seen
    assert spelled(mix.step([2, 3], Budget(1, 1))) == {(2,)}


def test_agreement_of_two_drafters_is_a_kind_of_its_own() -> None:
    """Alone each is right once in two, together always: the shared candidate comes first."""
    turn = iter(range(1000))
    state = {"together": True}

    def first() -> Paths:
        state["together"] = next(turn) % 2 == 0
        return [(2,), (0,)] if state["together"] else [(0,)]

    mix = mix_of(Says(first), Says(lambda: [(2,)] if state["together"] else [(3,)]))
    for i in range(200):
        mix.step([2] if i % 2 == 0 else [0 if i % 4 == 1 else 3])
    alone, both = mix.control.acceptance.counts[1], mix.control.acceptance.counts[3]
    assert both[..., 1].sum() / both[..., 0].sum() > 0.99
    assert alone[..., 1].sum() / alone[..., 0].sum() < 0.6


def test_routing_takes_the_tree_of_the_better_drafter() -> None:
    rng = np.random.default_rng(0)
    noise = Says(lambda: [tuple(rng.integers(10, 90, 3))], 0.6, name="noise")
    good = Says(lambda: [(2, 2, 2)], 0.4, name="good")
    mix = mix_of(noise, good, combine="route")
    trees = [mix.step([2, 2, 2, 2]) for _ in range(60)]
    assert sum(spelled(tree) == {(2,), (2, 2), (2, 2, 2)} for tree in trees[10:]) > 45
    assert all(len({*tree.origins[1:]}) == 1 for tree in trees)


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
        own = joined([*([] if alone else ranked), (sampled, Role.DRAWS)], seconds=flat)
        own.mix.begin(0, _Text(np.array(CONTEXT)), ())
        return own.trees([0], [Budget(nodes, 3)], [paths.noise("draft")])[0]

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
    own = joined([(Says(list), Role.FREE), *((part, Role.DRAWS) for part in parts)])
    own.mix.begin(0, _Text(np.array(CONTEXT)), ())
    recorder = Recorder()
    own.trees([0], [Budget(16, 2)], [recorder])  # type: ignore[list-item]
    assert len(recorder.keys) >= 4 and len(set(recorder.keys)) == len(recorder.keys)


def test_a_part_that_follows_the_targets_noise_sees_the_targets_own() -> None:
    class LastFirst:
        def first(self, ids, probs, depth: int, count: int) -> list[int]:
            return list(range(len(ids)))[::-1][:count]

    case, noise = CASES[0], LastFirst()
    parts = [Grown(ToySource(case.draft), SharedRace((2, 1)), sampled=True, shared_noise=True) for _ in range(2)]
    own = joined([(part, Role.DRAWS) for part in parts])
    own.mix.begin(0, _Text(np.array(CONTEXT)), ())
    (tree,) = own.trees([0], [Budget(16, 2)], [noise])  # type: ignore[list-item]
    (alone,) = parts[0].propose([0], [Budget(4, 2)], [noise])  # type: ignore[list-item]
    assert own.mix.shared_noise and tree.candidates and spelled(tree) == spelled(alone)


def test_more_drafters_than_the_table_of_kinds_holds_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="at most 5"):
        mix_of(*[Says(list)] * 6)


def test_a_drawing_part_whose_candidates_are_accepted_gets_a_larger_share() -> None:
    shares = Shares(2)
    before = shares.now()
    tree = TokenTree(*(lambda t: (t.tokens, t.parents, t.draws, ("", "b")))(from_paths(PENDING, [(2,)])))
    for _ in range(50):
        shares.learn(StepRecord(tree, Verdict((1,), 3), (2, 3), Scores(None)), ["a", "b"])
    after = shares.now()
    assert before[0] == before[1] and after[1] > before[1] and after[0] >= shares.least * 0.9
    assert sum(after) <= shares.most + 1e-9


def test_a_rehearsal_leaves_the_drafters_as_new() -> None:
    copying = Suffix()
    rehearse(joined([(copying, Role.FREE)]).mix, 10)
    assert not copying.memory()["tokens"].any() if "tokens" in copying.memory() else True
    own = joined([(copying, Role.FREE)])
    own.mix.begin(0, _Text(np.array([1, 2, 3, 1])), ())
    assert own.trees([0], [Budget(4, 4)], [None])[0].candidates  # it works, and knows this text


@pytest.mark.parametrize("size", [1, 2, 3, 4, 50])
def test_a_rehearsal_says_no_token_that_a_small_vocabulary_lacks(size: int) -> None:
    said: list[int] = []

    class Listens(Says):
        def begin(self, slot: int, context: Context, chunks: Iterable[Chunk]) -> None:
            (row,) = context.draft_rows(torch.zeros(1, size), [()], 4)
            texts = (context.tokens, context.prompt, context.prediction, row.ids, *(chunk.tokens for chunk in chunks))
            said.extend(token for text in texts for token in text)

    rehearse(Listens(lambda: [(0,)]), size)
    rehearse(joined([(Recycling(size), Role.LOOKS), (Predicted(), Role.FREE)]).mix, size)
    assert said and min(said) >= 0 and max(said) < size


def test_what_was_learnt_comes_back_and_can_be_forgotten() -> None:
    mix = mix_of(Says(lambda: [(2,)]))
    for _ in range(5):
        mix.step([2])
    other = mix_of(Says(lambda: [(2,)])).control
    other.remember({name: array.copy() for name, array in mix.control.memory().items()})
    assert np.array_equal(other.acceptance.counts, mix.control.acceptance.counts) and other.acceptance.counts.any()
    other.forget()
    assert not other.acceptance.counts.any()
    with pytest.raises(InputError, match="another mixture"):
        mix_of(Says(list), Says(list)).control.remember(mix.control.memory())


@pytest.mark.parametrize("batch", [1, 4])
def test_what_a_path_must_be_worth_does_not_grow_with_the_batch_that_shares_a_level(batch: int) -> None:
    network = Counted(lambda: [(2, 2)], 0.7)
    mix = mix_of(network, last=Role.RUNS, slots=batch, seconds=flat)
    mix.control.worths[0].time(6, 0.7)
    mix.trees(range(batch), [Budget(16, 6)] * batch, [None] * batch)
    assert [budget.least for budget in network.asked] == pytest.approx([0.2] * batch)


def test_parts_are_asked_for_twice_what_is_in_use_and_a_copy_gets_its_room_within_a_few_steps() -> None:
    state = {"path": (3,)}
    part = Counted(lambda: [state["path"]], 0.99)
    mix = mix_of(part, seconds=flat)

    def steps(count: int, text: list[int]) -> int:
        for _ in range(count):
            (budget,) = mix.control.plan([0], [Budget(32, 16)], Load(1))
            if budget:
                mix.step(text, budget)
        return budget.nodes

    mix.control._paces[1] = Pace(resting=0, trial=1000)
    assert steps(60, [3]) == 4
    state["path"] = (2,) * 16
    assert steps(5, [2] * 17) == 32
    assert mix_of(part).control.plan([0], [Budget(32, 16)], Load(1)) == [Budget(32, 16)]
