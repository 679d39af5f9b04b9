"""Rows of a forward and of the cache: few sizes, always enough; the last again where padding is the cheaper way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.runtime.openvino.cache import stride
from outrider.runtime.openvino.rows import FEW, PATIENCE, Steady, padded


def test_sizes_are_few_and_never_much_too_large() -> None:
    assert all(n <= padded(n) <= max(n + 1, 1.25 * n) for n in range(1, 600))
    assert len({padded(n) for n in range(1, 257)}) <= 45


def test_capacities_are_few() -> None:
    assert {stride(n) for n in range(1, 4097)} == {stride(stride(n)) for n in range(1, 4097)}
    assert len({stride(n) for n in range(1, 4097)}) < 25
    assert all(n <= stride(n) < n + max(1, n / 2) + 1 for n in range(1, 4097))


@given(st.lists(st.integers(1, 64), min_size=1, max_size=60))
def test_there_is_always_room_and_never_more_than_twice_what_is_needed_beyond_a_few(needs: list[int]) -> None:
    steady = Steady()
    for needed in needs:
        rows = steady.rows(needed)
        assert needed <= rows <= max(FEW, 2 * padded(needed)) and rows == padded(rows)


def test_steps_that_differ_by_a_few_rows_run_the_same_size() -> None:
    steady = Steady()
    assert [steady.rows(n) for n in (8, 1, 5, 3, 8, 2, 7)] == [8] * 7


def test_a_run_of_small_steps_makes_the_forward_as_small_as_the_largest_of_them() -> None:
    steady = Steady()
    steady.rows(8)
    sizes = [steady.rows(n) for n in (1, 4, 1, 1, 1, 1, 1, 1)]
    assert sizes[:PATIENCE] == [8] * PATIENCE and sizes[PATIENCE] == 4
    assert [steady.rows(1) for _ in range(PATIENCE + 1)][-1] == 1


def test_a_prompt_does_not_make_the_steps_behind_it_wide() -> None:
    steady = Steady()
    steady.rows(128)
    assert steady.rows(1) == 1


def test_after_forgetting_just_what_is_needed_runs() -> None:
    steady = Steady()
    steady.rows(8)
    steady.forget()
    assert steady.rows(1) == 1
