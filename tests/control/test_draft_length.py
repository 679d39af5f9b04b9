"""The adaptive draft length of DiffuSpec, step by step."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.control.draft_length import DraftLength
from outrider.core.records import Budget, Load, Scores, StepRecord, StepTiming, Verdict
from outrider.core.tree import chain

TIMING = StepTiming(0.0, 0.0, 0.0, 1, 1)
ANY = Budget(99, 99)


def asked(control: DraftLength, slot: int = 0) -> int:
    (budget,) = control.plan([slot], [ANY], Load(1))
    assert budget.nodes == budget.depth
    return budget.depth


def step(control: DraftLength, proposed: int, accepted: int, last: int = 7, slot: int = 0) -> None:
    tree = chain(1, [*([5] * (proposed - 1)), last])
    verdict = Verdict(tuple(range(1, accepted + 1)), 6)
    control.observe([slot], [StepRecord(tree, verdict, (6,), Scores(None))], TIMING)


def test_with_the_papers_numbers_what_is_taken_whole_grows_and_what_falls_shrinks() -> None:
    control = DraftLength(30, 20, keep=0.5)
    control.begin(0)
    assert asked(control) == 30 and control.delta == 3
    step(control, 30, 0)
    assert asked(control) == 20  # G is 15
    for _ in range(4):
        step(control, asked(control), 0)
    assert asked(control) == 20
    for _ in range(20):
        length = asked(control)
        step(control, length, length)
    assert asked(control) == 30


def test_a_token_that_ends_the_text_is_no_length() -> None:
    one, other = DraftLength(9, ends=frozenset({99})), DraftLength(9, ends=frozenset({99}))
    for control, last, proposed in ((one, 99, 5), (other, 7, 4)):
        control.begin(0)
        for _ in range(6):
            step(control, proposed, 2, last)
    assert asked(one) == asked(other)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), max_size=30), st.integers(2, 12))
def test_it_never_asks_for_less_or_more_than_it_may(steps, longest: int) -> None:
    control = DraftLength(longest)
    control.begin(0)
    for proposed, accepted in steps:
        step(control, proposed, min(accepted, proposed))
        assert 2 <= asked(control) <= longest


def test_each_request_starts_anew() -> None:
    control = DraftLength(12)
    control.begin(0)
    step(control, 2, 0)
    assert asked(control) == 2
    control.end(0)
    control.begin(0)
    assert asked(control) == 12


def test_rows_that_cost_more_than_they_can_bring_are_not_asked_for() -> None:
    def seconds(rows: int) -> float:
        return 1.0 if rows <= 5 else 1.0 + 10.0 * (rows - 5)

    control = DraftLength(12, seconds=seconds)
    control.begin(0)
    assert asked(control) == 4
    free = DraftLength(12, seconds=lambda rows: 1.0)
    free.begin(0)
    assert asked(free) == 12


def test_steps_without_candidates_teach_nothing() -> None:
    control = DraftLength(12)
    control.begin(0)
    tree = chain(1, [])
    control.observe([0], [StepRecord(tree, Verdict((), 6), (6,), Scores(None))], TIMING)
    assert asked(control) == 12 and np.isfinite(control._best)
    assert control.plan([0], [Budget(3, 2)], Load(1)) == [Budget(3, 2)]
