"""Read cost: what reading rows takes, told apart into what every step takes and what each row adds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.control.read_cost import ReadCost


def after(*steps: tuple[int, float]) -> ReadCost:
    read_cost = ReadCost()
    for rows, seconds in steps:
        read_cost.add(rows, seconds)
    return read_cost


@given(
    fixed=st.floats(0.0, 1.0), per_row=st.floats(0.0, 1.0),
    rows=st.lists(st.integers(1, 64), min_size=2, max_size=17, unique=True),
)  # fmt: skip
def test_a_straight_line_is_found_again(fixed: float, per_row: float, rows: list[int]) -> None:
    read_cost = after(*((count, fixed + per_row * count) for count in rows))
    assert read_cost.seconds(64) == pytest.approx([fixed + per_row * count for count in range(1, 65)], abs=1e-9)


def test_a_call_that_costs_the_same_for_any_rows_does_not_make_large_trees_expensive() -> None:
    read_cost = after(*((rows, 0.2) for rows in (1, 3, 2, 5, 1, 4)))
    assert read_cost.seconds(64)[-1] == pytest.approx(0.2)


def test_one_slow_step_changes_nothing() -> None:
    read_cost = after(*((rows, 0.1 * rows) for rows in (1, 2, 3, 4, 5, 6, 7, 8)), (8, 50.0))
    assert read_cost.seconds(8)[-1] == pytest.approx(0.8, rel=0.2)


def test_steps_of_one_size_say_nothing_of_others() -> None:
    assert after((4, 0.3), (4, 0.3)).seconds(64)[[0, 63]] == pytest.approx([0.3, 0.3])
