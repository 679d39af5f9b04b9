"""Open: speculation rests where it has been slower than plain decoding, tries again, and stays where it is faster."""

from __future__ import annotations

from collections.abc import Callable

from outrider.control.open import Open
from outrider.control.pace import LOOK, SETTLED, Pace
from outrider.protocols import Budget, Scores, StepRecord, StepTiming, Verdict
from outrider.tree import from_paths, root

FULL = Budget(8, 4)
Told = list[tuple[int, int, float]]


def drive(
    control: Open, steps: int, tokens: Callable[[int], int], draft: float, batch: int = 1, verify: float = 1.0
) -> list[bool]:
    """Whether each step speculated; a plain one takes a second, a speculative one the drafting on top."""
    speculated = []
    slots = list(range(batch))
    for i in range(steps):
        on = control.budgets(slots, [FULL] * batch)[0].nodes > 0
        count = tokens(i) if on else 1
        tree = from_paths(1, [tuple(range(2, 2 + max(count - 1, 1)))]) if on else root(1)
        path = tuple(range(1, count))
        record = StepRecord(tree, Verdict(path, 0), tuple(range(count)), Scores(None))
        timing = StepTiming(draft if on else 0.0, verify if on else 1.0, 0.0, len(tree) * batch, batch)
        control.observe(slots, [record] * batch, timing)
        speculated.append(on)
    return speculated


def opened(told: Told | None = None, even: bool = False) -> Open:
    return Open(FULL, lambda *step: told.append(step) if told is not None else None, even)


def test_speculation_that_costs_more_than_it_brings_comes_to_rest() -> None:
    on = drive(opened(), 2000, lambda i: 1, draft=0.5)
    assert sum(on[1000:]) / 1000 < 0.05


def test_speculation_that_pays_runs_but_for_rare_plain_steps() -> None:
    on = drive(opened(), 1000, lambda i: 2, draft=0.5)
    assert 0.97 < sum(on) / 1000 < 1.0


def test_a_rest_ends_when_drafts_become_right() -> None:
    control = opened()
    drive(control, 1000, lambda i: 1, draft=0.5)
    assert sum(drive(control, 1500, lambda i: 3, draft=0.5)[-500:]) > 450


def test_a_rest_ends_where_another_text_begins() -> None:
    control = opened()
    drive(control, 1000, lambda i: 1, draft=0.5)
    control.begin(0)
    assert sum(drive(control, 100, lambda i: 3, draft=0.5)) >= 100 - LOOK


def test_texts_on_which_nothing_is_right_cost_little_however_many_begin() -> None:
    control, on = opened(), []
    for _ in range(50):
        control.begin(0)
        on += drive(control, 100, lambda i: 1, draft=0.5)
    assert sum(on) / len(on) < 0.2


def test_a_loss_that_hides_in_drafting_is_seen_although_the_step_looks_cheap() -> None:
    """Verification costs nothing more here; only the drafter's own time makes speculation slower."""
    assert sum(drive(opened(), 1000, lambda i: 2, draft=1.3)[500:]) < 50


def test_one_slow_step_does_not_end_speculation() -> None:
    control = opened()
    drive(control, 200, lambda i: 2, draft=0.2)
    drive(control, 1, lambda i: 2, draft=50.0)
    assert sum(drive(control, 50, lambda i: 2, draft=0.2)) >= 48


def test_a_first_trial_in_which_things_are_compiled_does_not_end_speculation() -> None:
    control = opened()
    for i in range(12):
        drive(control, 1, lambda i: 2, draft=30.0 if i % 3 == 0 else 0.2)
    assert sum(drive(control, 50, lambda i: 2, draft=0.2)) >= 48


def test_batch_sizes_are_judged_apart() -> None:
    control = opened()
    drive(control, 600, lambda i: 1, draft=0.5, batch=4)
    assert sum(drive(control, 100, lambda i: 3, draft=0.1, batch=1)) >= 100 - LOOK


def test_the_drafter_is_told_what_steps_cost_without_drafting() -> None:
    told: Told = []
    drive(opened(told), LOOK + 3, lambda i: 2, draft=0.7, verify=1.25)
    assert told == [(1, 1, 1.0)] * LOOK + [(2, 1, 1.25)] * 3


def test_plain_steps_that_a_wide_one_has_slowed_down_are_not_told() -> None:
    told: Told = []
    control = opened(told)
    drive(control, LOOK + Pace().trial, lambda i: 1, draft=0.5)
    told.clear()
    rest = control._pace(1).rest
    on = drive(control, rest, lambda i: 1, draft=0.5)
    assert not any(on) and len(told) == rest - SETTLED


def between(control: Open, slow: float, steps: int) -> list[bool]:
    """Every other step is plain though drafts were asked for, the others bring a second token for a tenth more."""
    speculated = []
    for i in range(steps):
        on = control.budgets([0], [FULL])[0].nodes > 0
        wide = on and i % 2 == 0
        tree = from_paths(1, [(2,)]) if wide else root(1)
        record = StepRecord(tree, Verdict((1,) if wide else (), 0), (2, 3) if wide else (2,), Scores(None))
        timing = StepTiming(0.1 * slow * on, (1.1 if wide else 1.0) * slow, 0.0, len(tree), 1)
        control.observe([0], [record], timing)
        speculated.append(on)
    return speculated


def test_where_steps_are_even_plain_ones_in_between_say_what_plain_decoding_takes() -> None:
    told: Told = []
    control = opened(told, even=True)
    between(control, 1.0, 100)
    assert len(told) == 100 and (1, 1, 1.0) in told[-2:]
    assert all(between(control, 3.0, 200))  # the machine became slow, not the drafts


def test_where_steps_are_even_a_new_text_begins_without_a_look() -> None:
    for even in (True, False):
        control = opened(even=even)
        between(control, 1.0, 100)
        control.begin(0)
        assert all(between(control, 1.0, LOOK)) == even
