"""Goodput: speculation rests where it has been slower than plain decoding, tries again, stays where it is faster."""

from __future__ import annotations

from collections.abc import Callable

from outrider.control.backoff import LOOK
from outrider.control.cost_model import CostModel
from outrider.control.goodput import Goodput
from outrider.core.proposals import united
from outrider.core.records import Budget, Load, Role, Scores, StepRecord, StepTiming, Verdict
from outrider.core.tree import from_paths, root

FULL = Budget(8, 4)


def drive(
    control: Goodput, steps: int, tokens: Callable[[int], int], draft: float, batch: int = 1, verify: float = 1.0
) -> list[bool]:
    """Whether each step speculated; a plain one takes a second, a speculative one the drafting on top."""
    speculated = []
    slots = list(range(batch))
    for i in range(steps):
        on = bool(control.plan(slots, [FULL] * batch, Load(batch))[0])
        count = tokens(i) if on else 1
        tree = from_paths(1, [tuple(range(2, 2 + max(count - 1, 1)))]) if on else root(1)
        path = tuple(range(1, count))
        record = StepRecord(tree, Verdict(path, 0), tuple(range(count)), Scores(None))
        timing = StepTiming(draft if on else 0.0, verify if on else 1.0, 0.0, len(tree) * batch, batch)
        control.observe(slots, [record] * batch, timing)
        speculated.append(on)
    return speculated


def opened(even: bool = False) -> Goodput:
    return Goodput(FULL, [Role.FREE], CostModel(lambda rows: 1.0), even=even)


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


def test_a_rest_of_a_batch_outlasts_a_single_newcomer_and_ends_once_all_may_be_others() -> None:
    control = opened()
    drive(control, 1000, lambda i: 1, draft=0.5, batch=4)
    for begun in range(4):
        assert not any(drive(control, 20, lambda i: 3, draft=0.5, batch=4)), begun
        control.begin(begun)
    assert sum(drive(control, 20, lambda i: 3, draft=0.5, batch=4)) >= 20 - LOOK


def test_a_network_is_spared_prompts_while_a_batch_rests_but_not_that_of_a_text_alone() -> None:
    for batch in (1, 4):
        control = Goodput(FULL, [Role.FREE, Role.RUNS], CostModel(lambda rows: 1.0))
        assert control.reads(0) and control.reads(1)
        drive(control, 1000, lambda i: 1, draft=0.5, batch=batch)
        assert control.reads(0) and not control.reads(1)
        control.begin(0)
        assert control.reads(1) == (batch == 1)
    drive(control, 1000, lambda i: 3, draft=0.1, batch=4)
    assert control.reads(1)


def test_a_batch_that_ran_beside_prompts_only_rests_where_the_nearest_one_does() -> None:
    control = opened()
    drive(control, 1000, lambda i: 1, draft=0.5, batch=4)
    beside = StepTiming(0.0, 1.0, 0.0, 3, 3, prompt_rows=8)
    drafted = []
    for _ in range(20):
        drafted.append(any(control.plan([0, 1, 2], [FULL] * 3, Load(3))))
        record = StepRecord(root(1), Verdict((), 0), (1,), Scores(None))
        control.observe([0, 1, 2], [record] * 3, beside)
    assert not any(drafted)
    control = opened()  # nothing is known of any size
    for _ in range(20):
        drafted.append(any(control.plan([0, 1, 2], [FULL] * 3, Load(3))))
        control.observe([0, 1, 2], [record] * 3, beside)
    assert sum(drafted) == 20 - LOOK


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


def between(control: Goodput, slow: float, steps: int) -> list[bool]:
    """Every other step is plain though drafts were asked for, the others bring a second token for a tenth more."""
    speculated = []
    for i in range(steps):
        on = bool(control.plan([0], [FULL], Load(1))[0])
        wide = on and i % 2 == 0
        tree = from_paths(1, [(2,)]) if wide else root(1)
        record = StepRecord(tree, Verdict((1,) if wide else (), 0), (2, 3) if wide else (2,), Scores(None))
        timing = StepTiming(0.1 * slow * on, (1.1 if wide else 1.0) * slow, 0.0, len(tree), 1)
        control.observe([0], [record], timing)
        speculated.append(on)
    return speculated


def test_where_steps_are_even_plain_ones_in_between_say_what_plain_decoding_takes() -> None:
    control = opened(even=True)
    between(control, 1.0, 100)
    assert all(between(control, 3.0, 200))  # the machine became slow, not the drafts


def test_where_steps_are_even_a_new_text_begins_without_a_look() -> None:
    for even in (True, False):
        control = opened(even=even)
        between(control, 1.0, 100)
        control.begin(0)
        assert all(between(control, 1.0, LOOK)) == even


def test_what_the_candidates_of_others_take_is_not_held_against_its_sequences() -> None:
    """A method with wide trees joins the batch and makes every step six times as long: by no fault of these."""
    control = Goodput(FULL, [Role.FREE], CostModel(lambda rows: 1.0 + 0.2 * (rows - 2)), even=True)
    on = []
    for i in range(300):
        others = 0 if i < 20 else 24
        on.append(bool(control.plan([0], [FULL], Load(2, others))[0]))
        tree = from_paths(1, [(2,)]) if on[-1] else root(1)
        right = on[-1] and i % 2 == 0
        record = StepRecord(tree, Verdict((1,) if right else (), 0), (2, 3) if right else (2,), Scores(None))
        rows = 2 + others + tree.candidates
        control.observe([0], [record], StepTiming(0.0, 1.0 + 0.2 * (rows - 2), 0.0, rows, 2, others))
    assert sum(on[LOOK:]) > 270  # but for a look at plain decoding now and then


def test_candidates_of_a_part_that_is_left_out_take_no_chance_from_those_of_others() -> None:
    control = Goodput(FULL, [Role.FREE, Role.LOOKS], CostModel(lambda rows: 1.0))
    said, table = [from_paths(1, paths) for paths in ([(2,)], [(3,), (4,), (5,)])]
    rest = control._without(united([(0, said), (1, table)]), 1)
    alone = control._offer(united([(0, said)]))
    assert len(rest.order) == 1 and abs(rest.expected - alone.expected) < 1e-4
