"""Draft depth: each is weighed by how the step would have gone; what does not pay is left, what pays is found again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.control.draft_depth import DraftDepth, rates

ALONE = 2  # the mask of candidates that only the expensive drafter proposes


@given(
    nodes=st.lists(st.tuples(st.floats(0.01, 0.9), st.integers(1, 4), st.sampled_from([1, 2, 3])), max_size=8),
    slope=st.floats(0.0, 0.5), level=st.floats(0.0, 1.0), room=st.integers(0, 8),
)  # fmt: skip
def test_a_depth_is_worth_the_best_cut_of_what_it_would_have_left(nodes, slope: float, level: float, room: int) -> None:
    weights, depths, masks = (np.array([0, *column]) for column in (zip(*nodes, strict=True) if nodes else ((),) * 3))
    order = 1 + np.argsort(-weights[1:], kind="stable")
    step, draft = 1.0 + slope * np.arange(room + 1), level * np.arange(5)
    got = rates(weights.astype(float), order, masks, depths, ALONE, step, draft)
    for depth in range(5):
        left = [weights[i] for i in order if masks[i] != ALONE or depths[i] <= depth][:room]
        best = max((1 + sum(left[:n])) / (step[n] + draft[depth]) for n in range(len(left) + 1))
        assert got[depth] == pytest.approx(best)


def asked(choice: DraftDepth, steps: int, level: float, right: int, cheap: float = 0.0) -> list[int]:
    """Depths asked over some steps with a drafter that is right so deep and takes `level` seconds a depth; plain: 1."""
    out = []
    for _ in range(steps):
        depth = choice.depth(cheap, 6)
        out.append(depth)
        if depth:
            choice.time(depth, level * depth)
        if depth < choice.deepest:
            choice.pass_by(cheap)
        if depth:
            gains = 1.0 + np.minimum(np.arange(depth + 1), right)
            choice.learn(cheap, gains / (1.0 + choice.seconds(depth)))
    return out


def test_a_drafter_that_pays_is_asked_as_deep_as_it_is_right() -> None:
    assert asked(DraftDepth(6), 40, level=0.05, right=6)[10:] == [6] * 30
    shallow = asked(DraftDepth(6), 60, level=0.05, right=2)[10:]
    assert shallow.count(2) >= 45


def test_a_drafter_that_never_pays_is_asked_ever_more_seldom() -> None:
    depths = asked(DraftDepth(6), 1200, level=1.0, right=1)
    assert sum(map(bool, depths[:100])) <= 12 and sum(map(bool, depths[600:])) <= 4


def test_a_drafter_that_pays_again_is_found_again() -> None:
    choice = DraftDepth(6)
    assert asked(choice, 300, level=0.1, right=0)[-1] == 0
    assert asked(choice, 400, level=0.1, right=6)[-1] == 6


def test_a_deeper_try_is_not_held_back_by_what_was_seen_when_everything_was_worse() -> None:
    """Only shallow depths are asked for long; when all gains rise, the deeper ones must rise with them."""
    choice = DraftDepth(6)
    asked(choice, 12, level=0.3, right=2)
    before = choice._kinds[0].gains.copy()
    choice.learn(0.0, np.array([1.0, 3.0, 4.0]))
    moved = choice._kinds[0].gains - before
    assert moved[2] > 0 and moved[3:] == pytest.approx(np.full(4, moved[2]))


def test_steps_in_which_the_others_expect_much_are_judged_apart() -> None:
    choice = DraftDepth(6)
    asked(choice, 40, level=0.05, right=6, cheap=0.0)
    asked(choice, 40, level=1.0, right=0, cheap=5.0)
    assert choice.depth(0.0, 6) == 6 and choice.depth(5.0, 6) == 0


def test_what_did_not_pay_where_the_others_expect_less_is_not_tried_where_they_expect_more() -> None:
    choice = DraftDepth(6)
    asked(choice, 4, level=1.0, right=0, cheap=0.0)
    assert asked(choice, 10, level=1.0, right=0, cheap=1.0) == [0] * 10
    assert max(asked(choice, 20, level=0.05, right=6, cheap=1.0)) == 6  # but not left for good

    choice = DraftDepth(6)
    asked(choice, 4, level=1.0, right=0, cheap=1.0)
    assert asked(choice, 2, level=0.05, right=6, cheap=0.0) == [6, 6]  # the other way round nothing is known


def test_a_depth_that_was_never_tried_is_taken_as_its_share_of_a_deeper_one() -> None:
    choice = DraftDepth(6)
    choice.time(6, 0.7)
    assert choice.seconds(6) == pytest.approx([0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    choice.time(2, 0.1)
    assert choice.seconds(3) == pytest.approx([0, 0.1 * 2 / 3, 0.1, 0.4])
    choice.time(3, 9.0)  # once, and something else ran
    assert choice.seconds(6)[3] == pytest.approx(0.5)


def test_a_proposal_after_a_pause_does_not_make_a_depth_look_more_expensive() -> None:
    """It had text to catch up with."""
    choice = DraftDepth(6)
    choice.time(2, 9.0)
    assert choice.seconds(2)[2] == 9.0  # better than nothing
    choice.time(2, 1.0)
    for _ in range(5):
        choice.time(0, 0.0)
        choice.time(2, 9.0)
    assert choice.seconds(2)[2] == 1.0


def test_the_first_proposal_is_a_single_level_and_deeper_ones_are_judged_by_it() -> None:
    """A drafter of unknown cost may not spend a whole depth to be known."""
    choice = DraftDepth(6)
    assert choice.depth(0.0, 16) == 1
    choice.time(1, 2.0)
    assert choice.seconds(3).tolist() == [0.0, 2.0, 3.0, 4.0]
    assert choice.depth(0.0, 16) == 6


def test_one_fast_proposal_does_not_make_a_depth_look_cheap() -> None:
    choice = DraftDepth(6)
    for seconds in (1.0, 3.0, 3.0, 0.1, 3.0):
        choice.time(2, seconds)
    assert choice.seconds(2)[2] == 3.0


def test_where_plain_steps_are_fast_only_likely_paths_are_worth_another_level() -> None:
    choice = DraftDepth(6)
    assert choice.least(1.0) == 0.0  # nothing is known of its time
    choice.time(6, 0.7)
    assert choice.least(1.0) == pytest.approx(0.2) and choice.least(2.0) == pytest.approx(0.1)
    assert choice.least(0.001) <= 0.9
