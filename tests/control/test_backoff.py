"""Backoff: plain decoding is timed by several plain steps in a row, and again where the figure may be wrong."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.control.backoff import LOOK, SETTLED, Backoff, typical
from outrider.control.goodput import Goodput
from outrider.core.records import Budget, Load, Role, Scores, StepRecord, StepTiming, Verdict
from outrider.core.tree import root


class Flat:
    """Rows cost nothing."""

    def seconds(self, batch: int, candidates: int, context: int) -> NDArray[np.float64]:
        return np.ones(candidates + 1)


def feed(backoff: Backoff, steps: int, tokens: int = 1, seconds: float = 1.0) -> list[bool]:
    """Whether each step was plain; a speculative one gives `tokens` in `seconds`, a plain one takes a second."""
    plain = []
    for _ in range(steps):
        plain.append(backoff.resting > 0)
        backoff.add(not plain[-1], not plain[-1], 1, *((1, 1.0) if plain[-1] else (tokens, seconds)))
    return plain


def test_the_first_steps_are_plain_and_few() -> None:
    assert feed(Backoff(), 10, tokens=2) == [True] * LOOK + [False] * (10 - LOOK)


def test_a_slow_plain_step_counts_only_after_others_in_a_row() -> None:
    backoff = Backoff()
    backoff.add(False, False, 1, 1, 1.0)
    assert backoff.plain  # nothing wide was before it
    backoff.add(True, True, 1, 1, 1.0)
    seen = []
    for _ in range(SETTLED + 1):
        backoff.add(False, False, 1, 1, 9.0)
        seen.append(backoff.plain)
    assert seen == [False] * SETTLED + [True]


def test_a_plain_step_that_was_faster_than_believed_counts_at_once() -> None:
    """A process whose first steps were slow would otherwise go on to believe that plain decoding is."""
    backoff = Backoff()
    for _ in range(LOOK):
        backoff.add(False, False, 1, 1, 5.0)
    feed(backoff, 40, tokens=2, seconds=1.5)
    backoff.wake()
    assert feed(backoff, 10, tokens=2, seconds=2.5)[: LOOK + 1] == [True] * LOOK + [False]
    assert typical(backoff._plain) == 1.0
    assert any(feed(backoff, 60, tokens=2, seconds=2.5))  # and speculation that looked fast is seen to be slow


def test_texts_begin_with_a_look_only_now_and_then() -> None:
    backoff, looks = Backoff(), 0
    for _ in range(100):
        backoff.wake()
        looks += sum(feed(backoff, 30, tokens=2))
    assert looks <= LOOK * (3 + 3000 / 128) + 2 * (SETTLED + LOOK)


def test_a_step_for_which_drafts_were_asked_is_not_plain_decoding() -> None:
    backoff = Backoff(trial=8)
    feed(backoff, LOOK)
    for _ in range(8):
        backoff.add(False, True, 1, 1, 3.0)  # nothing was found, and the search took its time
    assert backoff.resting


def test_plain_decoding_is_timed_afresh_where_speculation_hardly_pays_and_seldom_elsewhere() -> None:
    assert sum(feed(Backoff(), 1000, tokens=2)) == LOOK
    assert LOOK < sum(feed(Backoff(), 2000, tokens=2)) <= LOOK + SETTLED + LOOK
    looks = sum(feed(Backoff(), 2000, tokens=1, seconds=0.9)) - LOOK
    assert 0 < looks <= 2000 / 256 * (SETTLED + LOOK)


def test_speculation_that_loses_rests_longer_each_time_up_to_a_bound() -> None:
    plain = feed(Backoff(trial=4, rest=8, longest=32), 300, seconds=2.0)
    rests = [len(run) for run in "".join("p" if p else " " for p in plain).split() if run][1:-1]
    assert rests[:4] == [8, 16, 32, 32]


def test_of_few_steps_the_fastest_is_typical_and_of_many_the_median() -> None:
    assert typical([3.0, 1.0]) == 1.0 and typical([9.0, 2.0, 1.0]) == 2.0


def test_speculation_begins_also_where_prompts_run_beside_every_step() -> None:
    control = Goodput(Budget(4, 4), [Role.FREE], costs=Flat())
    record = StepRecord(root(1), Verdict((), 2), (2,), Scores(None))
    timing = StepTiming(draft=0.0, verify=1.0, rest=0.0, rows=1, batch=1, prompt_rows=64)
    for _ in range(LOOK):
        assert not control.plan([0], [Budget(4, 4)], Load(1))[0]
        control.observe([0], [record], timing)
    assert control.plan([0], [Budget(4, 4)], Load(1))[0]
