"""Cost model: the measured curve, corrected by what steps take, and not misled by the first step of a size."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.control.cost_model import ENOUGH, OLD, PERIOD, SETTLED, CostModel


def curve(rows: int) -> float:
    return 1.0 + 0.1 * rows


def test_without_steps_it_is_the_curve() -> None:
    assert CostModel(curve).seconds(2, 3) == pytest.approx([curve(r) for r in (2, 3, 4, 5)])


def test_estimates_lie_side_by_side_as_compiled_code_is_made_ready_for() -> None:
    cost = CostModel(curve)
    cost.add(3, 1, curve(3))
    assert cost.seconds(1, 6).flags.c_contiguous and cost.seconds(1, 4)[1:].flags.c_contiguous


def test_steps_correct_the_curve_at_their_size_and_between() -> None:
    cost = CostModel(curve)
    for _ in range(ENOUGH):
        cost.add(1, 1, 0.5 * curve(1))
        cost.add(5, 1, 1.5 * curve(5))
    expected = np.array([0.5, 0.75, 1.0, 1.25, 1.5, 1.5, 1.5]) * [curve(r) for r in range(1, 8)]
    assert cost.seconds(1, 6) == pytest.approx(expected)
    assert cost.seconds(2, 1) == pytest.approx([curve(2), curve(3)])  # another batch is another matter


def test_a_size_that_was_slow_once_or_twice_is_not_given_up() -> None:
    cost = CostModel(curve)
    for _ in range(6):
        cost.add(1, 1, curve(1))
    for _ in range(ENOUGH - 1):
        cost.add(8, 1, 5 * curve(8))  # something is compiled
    assert cost.seconds(1, 7)[-1] == pytest.approx(curve(8))
    for _ in range(PERIOD):
        cost.add(8, 1, 5 * curve(8))  # it is slow
    assert cost.seconds(1, 7)[-1] == pytest.approx(5 * curve(8))


def test_before_any_size_is_known_well_all_steps_count_together() -> None:
    cost = CostModel(curve)
    for rows, factor in ((1, 0.9), (4, 0.8), (8, 7.0)):
        cost.add(rows, 1, factor * curve(rows))
    assert cost.seconds(1, 3) == pytest.approx([0.9 * curve(r) for r in (1, 2, 3, 4)])


def test_only_the_last_steps_count() -> None:
    cost = CostModel(curve)
    for factor in (3.0,) * 20 + (1.0,) * 9:
        cost.add(2, 1, factor * curve(2))
    assert cost.seconds(1, 1) == pytest.approx([curve(1), curve(2)])


def test_fewer_rows_never_cost_more_than_more_rows() -> None:
    """Plain steps were timed while the machine was slow, wide ones since."""
    cost = CostModel(curve)
    for _ in range(ENOUGH):
        cost.add(1, 1, 3.0)
        cost.add(4, 1, 1.5)
    assert cost.seconds(1, 3) == pytest.approx([1.5] * 4)


def test_as_many_new_steps_as_are_enough_outweigh_the_old() -> None:
    cost = CostModel(curve)
    for seconds in (3.0,) * 20 + (1.0,) * ENOUGH:
        cost.add(1, 1, seconds)
    assert cost.seconds(1, 0) == pytest.approx([1.0])


def test_sizes_up_to_the_same_power_of_two_learn_together() -> None:
    cost = CostModel(curve)
    for rows in (5, 6, 8):
        cost.add(rows, 1, 2 * curve(rows))
    assert cost.seconds(1, 7)[6] == pytest.approx(2 * curve(7))


def test_rows_that_a_target_pads_to_cost_nothing_and_the_next_one_its_whole_width() -> None:
    cost = CostModel(curve, lambda rows: -(-rows // 4) * 4)
    assert cost.seconds(1, 5) == pytest.approx([curve(4)] * 4 + [curve(8)] * 2)
    for _ in range(ENOUGH):
        cost.add(5, 1, 2 * curve(8))
    assert cost.seconds(1, 7)[-1] == pytest.approx(2 * curve(8))
    assert cost.seconds(2, 1) == pytest.approx([curve(2), curve(3)])  # it says nothing of batches


def test_a_size_that_was_slow_long_ago_is_judged_by_its_neighbours_again() -> None:
    cost = CostModel(curve)
    for _ in range(ENOUGH):
        cost.add(1, 1, curve(1))
        cost.add(4, 1, 9 * curve(4))  # the machine had other work
    assert cost.seconds(1, 3)[-1] == pytest.approx(9 * curve(4))
    for _ in range(OLD + ENOUGH):
        cost.add(1, 1, curve(1))
    assert cost.seconds(1, 3)[-1] == pytest.approx(curve(4))


def test_a_batch_that_comes_again_after_long_is_judged_by_its_last_steps() -> None:
    cost = CostModel(curve)
    for rows in (4, 16):
        cost.add(rows, 4, 2 * curve(rows))
    for _ in range(OLD + 1):  # all but one of the sequences are done
        cost.add(1, 1, curve(1))
    assert cost.seconds(4, 12)[-1] == pytest.approx(2 * curve(16))


def test_plain_steps_that_a_wide_one_has_slowed_down_do_not_count() -> None:
    cost = CostModel(curve, even=False)
    for _ in range(ENOUGH):
        cost.add(1, 1, curve(1))
    cost.add(8, 1, curve(8))
    for _ in range(SETTLED):
        cost.add(1, 1, 5 * curve(1))  # it goes on in the size of the wide one
    assert cost.seconds(1, 0) == pytest.approx([curve(1)])
    for _ in range(PERIOD):
        cost.add(1, 1, 1.2 * curve(1))  # it has settled
    assert cost.seconds(1, 0) == pytest.approx([1.2 * curve(1)])
    even = CostModel(curve)
    even.add(8, 1, curve(8))
    for _ in range(ENOUGH):
        even.add(1, 1, 2 * curve(1))
    assert even.seconds(1, 0)[0] > curve(1)


def test_a_long_text_does_not_make_short_ones_look_expensive() -> None:
    cost = CostModel(curve)
    for _ in range(PERIOD):
        cost.add(1, 1, curve(1), context=100)
        cost.add(1, 1, 4 * curve(1), context=8000)
    assert cost.seconds(1, 0, context=120) == pytest.approx([curve(1)])
    assert cost.seconds(1, 0, context=9000) == pytest.approx([4 * curve(1)])


def test_what_was_not_seen_at_this_length_is_taken_from_the_nearest() -> None:
    cost = CostModel(curve)
    for _ in range(PERIOD):
        cost.add(1, 1, 2 * curve(1), context=300)
        cost.add(8, 1, 3 * curve(8), context=300)
        cost.add(1, 1, 5 * curve(1), context=9000)
    known = cost.seconds(1, 7, context=2000)
    assert known[0] == pytest.approx(2 * curve(1)) and known[7] == pytest.approx(3 * curve(8))
    assert cost.seconds(1, 7, context=9000)[7] == pytest.approx(3 * curve(8))
