"""Pace: what a plain step costs is timed in a row of them, and afresh where the belief may be wrong."""

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


def test_a_slow_plain_step_counts_only_after_others_in_a_row() -> None:
    pace = Pace()
    pace.add(False, False, 1, 1, 1.0)
    assert pace.plain  # nothing wide was before it
    pace.add(True, True, 1, 1, 1.0)
    seen = []
    for _ in range(SETTLED + 1):
        pace.add(False, False, 1, 1, 9.0)
        seen.append(pace.plain)
    assert seen == [False] * SETTLED + [True]


def test_a_plain_step_that_was_faster_than_believed_counts_at_once() -> None:
    """A process whose first steps were slow would otherwise go on to believe that plain decoding is."""
    pace = Pace()
    for _ in range(LOOK):
        pace.add(False, False, 1, 1, 5.0)
    feed(pace, 40, tokens=2, seconds=1.5)
    pace.wake()
    assert feed(pace, 10, tokens=2, seconds=2.5)[: LOOK + 1] == [True] * LOOK + [False]
    assert typical(pace._plain) == 1.0
    assert any(feed(pace, 60, tokens=2, seconds=2.5))  # and speculation that looked fast is seen to be slow


def test_texts_begin_with_a_look_only_now_and_then() -> None:
    pace, looks = Pace(), 0
    for _ in range(100):
        pace.wake()
        looks += sum(feed(pace, 30, tokens=2))
    assert looks <= LOOK * (3 + 3000 / 128) + 2 * (SETTLED + LOOK)


def test_a_step_for_which_drafts_were_asked_is_not_plain_decoding() -> None:
    pace = Pace(trial=8)
    feed(pace, LOOK)
    for _ in range(8):
        pace.add(False, True, 1, 1, 3.0)  # nothing was found, and the search took its time
    assert pace.resting


def test_plain_decoding_is_timed_afresh_where_speculation_hardly_pays_and_seldom_elsewhere() -> None:
    assert sum(feed(Pace(), 1000, tokens=2)) == LOOK
    assert LOOK < sum(feed(Pace(), 2000, tokens=2)) <= LOOK + SETTLED + LOOK
    looks = sum(feed(Pace(), 2000, tokens=1, seconds=0.9)) - LOOK
    assert 0 < looks <= 2000 / 256 * (SETTLED + LOOK)


def test_a_pace_that_loses_rests_longer_each_time_up_to_a_bound() -> None:
    plain = feed(Pace(trial=4, rest=8, longest=32), 300, seconds=2.0)
    rests = [len(run) for run in "".join("p" if p else " " for p in plain).split() if run][1:-1]
    assert rests[:4] == [8, 16, 32, 32]


def test_of_few_steps_the_fastest_is_typical_and_of_many_the_median() -> None:
    assert typical([3.0, 1.0]) == 1.0 and typical([9.0, 2.0, 1.0]) == 2.0
