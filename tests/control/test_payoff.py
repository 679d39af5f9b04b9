"""Payoff on a simulated machine with known costs and acceptance: finds the best width, and stops when nothing pays."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.control.payoff import DepthAcceptance, Payoff, RowCosts
from outrider.core.records import Budget, Load, Scores, StepRecord, StepTiming, Verdict
from outrider.core.tree import chain

LIMIT = Budget(64, 64)


def simulate(controller: Payoff, cost, accept: float, steps: int, seed: int = 0, slots=(0,), propose: float = 1.0):
    """Tokens and seconds of `steps` steps; `cost(rows)` seconds each, each depth accepted with `accept`."""
    rng = np.random.default_rng(seed)
    tokens, seconds, widths = 0, 0.0, []
    for slot in slots:
        controller.begin(slot)
    for _ in range(steps):
        budgets = controller.plan(list(slots), [LIMIT] * len(slots), Load(len(slots)))
        records = []
        for budget in budgets:
            width = min(budget.nodes, budget.depth) if rng.random() < propose else 0
            run = 0
            while run < width and rng.random() < accept:
                run += 1
            records.append(StepRecord(chain(0, [1] * width), Verdict(tuple(range(1, run + 1)), 0), (), Scores(None)))
            tokens += run + 1
            widths.append(width)
        rows = sum(len(r.tree) for r in records)
        time = cost(rows) * rng.lognormal(0, 0.05)
        seconds += time
        controller.observe(list(slots), records, StepTiming(0.0, time, 0.0, rows, len(slots)))
    return tokens, seconds, widths


def linear(rows: int) -> float:
    return 1.0 + 0.15 * (rows - 1)


def best_rate(cost, accept: float, deepest: int = 16) -> float:
    return max((1 + sum(accept**d for d in range(1, w + 1))) / cost(w + 1) for w in range(deepest + 1))


@pytest.mark.parametrize("accept", [0.0, 0.05, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize(
    "cost",
    [linear, lambda r: 1.0 + 0.01 * r, lambda r: 1.0 if r == 1 else 1.8 + 0.02 * r, lambda r: 1 + max(r - 8, 0) / 8],
)
def test_it_comes_close_to_the_best_fixed_width(cost, accept: float) -> None:
    tokens, seconds, _ = simulate(Payoff(), cost, accept, 2000)
    assert tokens / seconds > 0.9 * max(best_rate(cost, accept), 1 / cost(1))


@pytest.mark.parametrize("seed", range(5))
def test_a_drafter_that_is_never_right_costs_at_most_five_percent_of_a_short_run(seed: int) -> None:
    tokens, seconds, _ = simulate(Payoff(), linear, 0.0, 128, seed)
    assert seconds / tokens < 1.05 * linear(1)


def test_it_comes_back_when_speculation_starts_to_pay() -> None:
    controller = Payoff()
    simulate(controller, linear, 0.0, 300)
    tokens, seconds, widths = simulate(controller, linear, 0.95, 400)
    assert np.mean(widths[-100:]) > 3
    assert tokens / seconds > 1.5 / linear(1)


def test_a_sequence_that_pays_is_not_held_back_by_one_that_does_not() -> None:
    controller = Payoff()
    rng = np.random.default_rng(0)
    for slot in (0, 1):
        controller.begin(slot)
    widths = np.zeros(2)
    for _ in range(300):
        budgets = controller.plan([0, 1], [LIMIT] * 2, Load(2))
        records = []
        for slot, budget in enumerate(budgets):
            width = min(budget.nodes, budget.depth)
            run = 0
            while slot == 0 and run < width and rng.random() < 0.9:
                run += 1
            records.append(StepRecord(chain(0, [1] * width), Verdict(tuple(range(1, run + 1)), 0), (), Scores(None)))
            widths[slot] += width
        rows = sum(len(r.tree) for r in records)
        controller.observe([0, 1], records, StepTiming(0.0, linear(rows), 0.0, rows, 2))
    assert widths[0] > 20 * widths[1]


class Sluggish:
    """A runtime that goes on in the size of a wide step for six plain ones."""

    since = 9

    def __call__(self, rows: int) -> float:
        self.since = 0 if rows > 1 else self.since + 1
        return 1.4 if self.since < 7 else 1.0


@pytest.mark.parametrize("accept", [0.0, 0.1, 0.2])
def test_plain_steps_that_wide_ones_slow_down_do_not_make_speculation_look_cheap(accept: float) -> None:
    runs = [simulate(Payoff(), Sluggish(), accept, 1000, seed) for seed in range(10)]
    assert np.mean([tokens / seconds for tokens, seconds, _ in runs]) > 0.95


def test_it_keeps_speculating_where_that_pays_on_such_a_runtime() -> None:
    tokens, seconds, _ = simulate(Payoff(), Sluggish(), 0.9, 1000)
    assert tokens / seconds > 0.9 * best_rate(lambda rows: 1.4 if rows > 1 else 1.0, 0.9)


def test_limits_are_never_passed() -> None:
    controller = Payoff()
    simulate(controller, lambda r: 1.0, 0.95, 50)
    for limit in (Budget(0, 5), Budget(3, 1), Budget(2, 9)):
        (budget,) = controller.plan([0], [limit], Load(1))
        assert budget.nodes <= limit.nodes and budget.depth <= limit.depth


def test_costs_are_medians_and_optimistic_where_unmeasured() -> None:
    costs = RowCosts()
    for time in (1.0, 1.0, 50.0):
        costs.add(1, time)
    assert costs.curve(np.array([1, 9])).tolist() == [1.0, 1.0]
    costs.add(5, 3.0)
    assert costs.curve(np.array([3, 5, 7])).tolist() == [2.0, 3.0, 3.0]


def test_odds_count_a_depth_only_when_it_was_reached() -> None:
    odds = DepthAcceptance(keep=1.0)
    odds.add(offered=3, accepted=1)
    odds.add(offered=3, accepted=0)
    assert odds.offered == [2.0, 1.0] and odds.accepted == [1.0, 0.0]
