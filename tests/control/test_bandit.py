"""The bandit of rollouts on a simulated clock: the fastest depth of each bucket, and nothing while many run."""

from __future__ import annotations

import random

import pytest

from outrider.control.bandit import Bandit, arms_of
from outrider.core.errors import InputError
from outrider.core.records import Budget, Load

ARMS = (Budget(48, 8), Budget(48, 4), Budget(16, 8), Budget(16, 4))
LIMIT = Budget(64, 16)


def played(bandit, batch: int, steps: int, seconds, length, noise: random.Random) -> list[Budget]:
    """Arms of so many steps; `seconds` and mean `length` by arm."""
    chosen = []
    for _ in range(steps):
        arm = bandit.select(batch)
        chosen.append(arm)
        mean = length(arm)
        lengths = [1 + sum(noise.random() < (mean - 1) / 7 for _ in range(7)) for _ in range(batch)]
        bandit.reward(arm, batch, lengths, seconds(arm) * noise.uniform(0.9, 1.1))
    return chosen


def test_the_faster_arm_of_each_bucket_is_found_and_left_when_it_is_no_longer() -> None:
    bandit, noise = Bandit(ARMS, bounds=(1, 5), window=40, explore=0.2), random.Random(1)
    for batch, nodes in ((1, 48), (8, 16)):
        chosen = played(bandit, batch, 120, lambda arm: 0.02 + 0.002 * arm.depth, lambda arm: 3.0, noise)
        assert {arm.nodes for arm in chosen} == {nodes}  # arms of other buckets never
        assert len(set(chosen[:2])) == 2  # each is tried before one is preferred
        assert sum(arm.depth == 4 for arm in chosen[20:]) > 80
    # deep trees are accepted more now: within two windows they are taken
    chosen = played(
        bandit, 1, 600, lambda arm: 0.02 + 0.002 * arm.depth, lambda arm: 5.0 if arm.depth == 8 else 3.0, noise
    )
    assert sum(arm.depth == 8 for arm in chosen[-50:]) > 35


def test_one_step_that_took_a_hundred_times_as_long_moves_nothing() -> None:
    bandit = Bandit((Budget(8, 8), Budget(8, 4)), bounds=(1,), explore=0.0)
    for arm, seconds in ((Budget(8, 8), 0.02), (Budget(8, 4), 0.03)):
        for _ in range(9):
            bandit.reward(arm, 1, [3], seconds)
    assert bandit.select(1) == Budget(8, 8)
    bandit.reward(Budget(8, 8), 1, [3], 2.0)
    assert bandit.select(1) == Budget(8, 8)


def test_lengths_with_one_median_and_different_means_are_told_apart() -> None:
    bandit = Bandit((Budget(8, 8), Budget(8, 4)), bounds=(1,), explore=0.0)
    for number in range(60):
        bandit.reward(Budget(8, 8), 1, [(1, 2, 2, 2, 2)[number % 5]], 0.02)  # mean 1.8
        bandit.reward(Budget(8, 4), 1, [(2, 2, 2, 2, 3)[number % 5]], 0.02)  # mean 2.2
    assert bandit.select(1) == Budget(8, 4)


def small_steps(bandit: Bandit, batch: int, steps: int) -> list[bool]:
    """Whether anything was drafted, step by step."""
    slots = list(range(batch))
    return [bool(bandit.plan(slots, [LIMIT] * batch, Load(batch))[0]) for _ in range(steps)]


def test_speculation_begins_after_ten_small_steps_in_a_row_and_stays_until_the_rollout_ends() -> None:
    bandit = Bandit(ARMS, bounds=(1, 5))
    for slot in range(40):
        bandit.begin(slot)
    assert not any(small_steps(bandit, 40, 20))
    assert not any(small_steps(bandit, 32, 9)) and not any(small_steps(bandit, 33, 1))
    assert small_steps(bandit, 32, 10) == [False] * 9 + [True]
    assert all(small_steps(bandit, 40, 3))  # latched
    for slot in range(40):
        bandit.end(slot)
    bandit.begin(0)
    assert small_steps(bandit, 1, 10) == [False] * 9 + [True]


def test_arms_are_parts_of_the_budget_and_every_size_needs_a_bound() -> None:
    arms = arms_of(Budget(48, 8))
    assert {arm.nodes for arm in arms} == {48, 32, 16, 8} and {arm.depth for arm in arms} == {8, 4}
    assert Bandit(arms).of_bucket(1)[0].nodes == 48 and Bandit(arms).of_bucket(64)[0].nodes == 8
    assert all(arm.nodes >= arm.depth for arm in arms_of(Budget(3, 8)))
    with pytest.raises(InputError, match="4 sizes of trees need as many bounds"):
        Bandit(arms, bounds=(1, 5))
