"""What is asked of the parts of a mixture, and how much is kept: learning finds who is right and what pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.control.acceptance import Acceptance, ranked
from outrider.control.backoff import Backoff
from outrider.control.budget_shares import BudgetShares
from outrider.core.errors import InputError
from outrider.core.proposals import Proposals, united
from outrider.core.protocols import Noise
from outrider.core.records import Budget, Load, Needs, Role, Scores, StepRecord, Verdict
from outrider.core.tree import TokenTree, from_paths
from tests.draft.mixtures import (
    PENDING,
    Paths,
    Says,
    flat,
    mix_of,
    paths_of,
    spelled,
    weighted,
)


@given(first=paths_of, second=paths_of, data=st.data())
def test_weights_fall_along_paths_siblings_share_one_and_the_order_keeps_parents_first(first, second, data) -> None:
    acceptance = Acceptance(2)
    acceptance.counts[:] = data.draw(st.integers(0, 50))
    acceptance.counts[..., 1:] *= data.draw(st.tuples(st.floats(0, 1), st.floats(0, 1)))  # right, claimed
    candidates = united([(0, weighted(first, 0.9)), (1, weighted(second, 0.3))])
    weights = acceptance.weights(candidates)
    seen = {0}
    for node in ranked(weights).tolist():
        parent = int(candidates.parents[node])
        assert parent in seen and weights[node] <= weights[parent] + 1e-12
        seen.add(node)
    for parent in range(len(candidates.tokens)):
        children = weights[candidates.parents == parent]
        assert children[children > 0].sum() <= weights[parent] + 1e-9


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
    sizes, offers = [tree.candidates for tree in trees], [mix.control._step.offers[slot] for slot in slots]
    kept = [offer.weights[offer.order[:size]].sum() for offer, size in zip(offers, sizes, strict=True)]
    rate = (len(slots) + sum(kept)) / (1.0 + slope * sum(sizes))
    every = np.sort(np.concatenate([offer.weights[1:] for offer in offers]))[::-1]
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

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        self.seen += len(slots)


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
        mix = mix_of(network, last=Role.RUNS, seconds=flat, clock=lambda part=network: part.now)
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

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        self.seen += len(slots)
        self.now += self.takes * sum(len(record.tree) for record in records)


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


def test_more_drafters_than_the_table_of_kinds_holds_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="at most 6"):
        mix_of(*[Says(list)] * 7)


def test_a_drawing_part_whose_candidates_are_accepted_gets_a_larger_share() -> None:
    shares = BudgetShares(2)
    before = shares.now()
    tree = TokenTree(*(lambda t: (t.tokens, t.parents, t.draws, ("", "b")))(from_paths(PENDING, [(2,)])))
    for _ in range(50):
        shares.learn(StepRecord(tree, Verdict((1,), 3), (2, 3), Scores(None)), ["a", "b"])
    after = shares.now()
    assert before[0] == before[1] and after[1] > before[1] and after[0] >= shares.least * 0.9
    assert sum(after) <= shares.together + 1e-9


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
    mix.control.draft_depths[0].time(6, 0.7)
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

    mix.control._backoffs[1] = Backoff(resting=0, trial=1000)
    assert steps(60, [3]) == 4
    state["path"] = (2,) * 16
    assert steps(5, [2] * 17) == 32
    assert mix_of(part).control.plan([0], [Budget(32, 16)], Load(1)) == [Budget(32, 16)]
