"""Pace: what a plain step costs is timed in a row of them, afresh only where speculation hardly pays."""

from __future__ import annotations

from outrider.control.pace import LOOK, SETTLED, Pace, typical


def feed(pace: Pace, steps: int, tokens: int = 1, seconds: float = 1.0) -> list[bool]:
    """Whether each step was plain; a speculative one gives `tokens` in `seconds`, a plain one takes a second."""
    plain = []
    for _ in range(steps):
        plain.append(pace.resting > 0)
        pace.add(not plain[-1], not plain[-1], 1, *((1, 1.0) if plain[-1] else (tokens, seconds)))
    return plain


def test_the_first_steps_are_plain_and_few() -> None:
    assert feed(Pace(), 10, tokens=2) == [True] * LOOK + [False] * (10 - LOOK)


def test_a_plain_step_counts_only_after_others_in_a_row() -> None:
    pace = Pace()
    pace.add(False, False, 1, 1, 1.0)
    assert pace.settled  # nothing wide was before it
    pace.add(True, True, 1, 1, 1.0)
    seen = []
    for _ in range(SETTLED + 1):
        pace.add(False, False, 1, 1, 9.0)
        seen.append(pace.settled)
    assert seen == [False] * SETTLED + [True]


def test_a_step_for_which_drafts_were_asked_is_not_plain_decoding() -> None:
    pace = Pace(trial=8)
    feed(pace, LOOK)
    for _ in range(8):
        pace.add(False, True, 1, 1, 3.0)  # nothing was found, and the search took its time
    assert pace.resting


def test_plain_decoding_is_timed_afresh_only_where_speculation_hardly_pays() -> None:
    assert sum(feed(Pace(), 2000, tokens=2)) == LOOK
    looks = sum(feed(Pace(), 2000, tokens=1, seconds=0.9)) - LOOK
    assert 0 < looks <= 2000 / 256 * (SETTLED + LOOK)


def test_a_pace_that_loses_rests_longer_each_time_up_to_a_bound() -> None:
    plain = feed(Pace(trial=4, rest=8, longest=32), 300, seconds=2.0)
    rests = [len(run) for run in "".join("p" if p else " " for p in plain).split() if run][1:-1]
    assert rests[:4] == [8, 16, 32, 32]


def test_of_few_steps_the_fastest_is_typical_and_of_many_the_median() -> None:
    assert typical([3.0, 1.0]) == 1.0 and typical([9.0, 2.0, 1.0]) == 2.0
