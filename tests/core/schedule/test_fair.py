"""Who is next: a flood harms nobody else, a low priority waits no longer than was said, and the youngest gives way."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.check.toy import ToyTarget
from outrider.core.engine import Engine
from outrider.core.schedule import Handle, StepReport, Terms
from outrider.core.schedule.pace import Pace
from tests.core.schedule.toys import LM, PROMPTS, SAMPLED, Pool, engine, lookup, said


class Known(Pace):
    """Learns nothing more."""

    def learn(self, prompt_rows: int, decoding: bool, verify: float, step: float) -> None:
        pass


def steps_to_first_token(made: Engine, handle: Handle) -> int:
    before = made.steps
    while not handle.partial()[0].token_ids:
        made.step()
    return made.steps - before


def test_a_flood_of_one_caller_leaves_anothers_first_token_within_twice_the_idle_one() -> None:
    def ask(flood: int) -> int:
        made = engine(ToyTarget(LM, slots=4, prompt_rows=24), clock=lambda: 0.0)
        handles = [made.submit(PROMPTS[2], SAMPLED, lookup(), terms=Terms(caller="a")) for _ in range(flood)]
        for _ in range(3 if flood else 0):
            made.step()
        first = made.submit(PROMPTS[2], SAMPLED, terms=Terms(caller="b"))
        steps = steps_to_first_token(made, first)
        assert first.result().token_ids == said(PROMPTS[2])
        assert {tuple(h.result().token_ids) for h in handles} <= {tuple(said(PROMPTS[2]))}
        return steps

    idle = ask(0)
    assert ask(100) <= 2 * idle


def test_callers_get_equal_shares_of_the_tokens() -> None:
    made = engine(ToyTarget(LM, slots=4, prompt_rows=64))
    for caller, count in (("a", 60), ("b", 6), ("c", 6)):
        for _ in range(count):
            made.submit(PROMPTS[1], SAMPLED, terms=Terms(caller=caller))
    served = {"a": 0, "b": 0, "c": 0}
    while any(s.terms.caller != "a" for s in [*made.running, *made.queue]) or not made.steps:
        before = {id(s): (s, len(s.history.output)) for s in made.running}
        made.step()
        for s, tokens in before.values():
            served[s.terms.caller] += len(s.history.output) - tokens
    assert served["a"] <= 1.5 * min(served["b"], served["c"])  # four slots for three: not exactly equal
    made.close()


def clock_of(made: Engine) -> Callable[[], float]:
    """A second a step."""
    made.queue.clock = lambda: float(made.steps)
    return made.queue.clock


@pytest.mark.parametrize("levels", [1, 3])
def test_a_low_priority_is_served_within_the_stated_bound_under_a_stream_of_higher_ones(levels: int) -> None:
    made = engine(ToyTarget(LM, slots=2, prompt_rows=64))
    clock_of(made)
    length = SAMPLED.max_new_tokens
    low = made.submit(PROMPTS[1], SAMPLED, terms=Terms(priority=levels))
    while not low.done and made.steps < 1000:
        while len(made.queue) + len(made._inbox) < 4:
            made.submit(PROMPTS[0], SAMPLED, terms=Terms(priority=0))
        made.step()
        if low.sequences[0].started:
            break
    assert made.steps > length  # the others do go first
    assert made.steps <= levels * made.queue.ageing + 2 * length  # each level's waiting, a tie with older ones, a slot
    made.close()


def test_without_ageing_a_low_priority_would_never_be_served() -> None:
    made = engine(ToyTarget(LM, slots=2, prompt_rows=64))
    clock_of(made)
    made.queue.ageing = 1e9
    low = made.submit(PROMPTS[1], SAMPLED, terms=Terms(priority=1))
    while made.steps < 200:
        while len(made.queue) + len(made._inbox) < 4:
            made.submit(PROMPTS[0], SAMPLED, terms=Terms(priority=0))
        made.step()
    assert not low.sequences[0].started
    made.close()


def test_a_long_prompt_runs_in_pieces_while_answers_go_on() -> None:
    made = engine(Pool(slots=4, prompt_rows=50))
    answers = [made.submit(PROMPTS[1], SAMPLED.with_(max_new_tokens=60)) for _ in range(3)]
    made.step()
    made.pace = Known(step_s=1.0, verify_s=1.0, row_s=0.1, max_gap_s=2.0)  # room for ten rows a step
    long = made.submit([1, 2, 3] * 34, SAMPLED)  # 101 rows
    reports: list[StepReport] = []
    made.watch(reports.append)
    while not long.partial()[0].token_ids:
        before = [len(h.partial()[0].token_ids) for h in answers]
        made.step()
        assert all(len(h.partial()[0].token_ids) > n for h, n in zip(answers, before, strict=True))
    assert [report.prompt_rows for report in reports] == [*[10] * 10, 1, 0]
    assert long.result().token_ids == said([1, 2, 3] * 34)


def test_rows_of_prompts_follow_what_steps_took() -> None:
    pace = Pace()
    assert pace.rows(512, decoding=False) == 512 and pace.rows(512, decoding=True) == 32
    for _ in range(40):
        pace.learn(0, True, verify=0.010, step=0.012)
        pace.learn(512, False, verify=0.512, step=0.512)
    assert pace.rows(512, decoding=True) == int((2.5 - 1) * 0.012 / 0.001)  # half as much again as a usual step
    pace.max_gap_s = 0.1
    assert pace.rows(512, decoding=True) == 88 and pace.rows(64, decoding=True) == 64
    pace.max_gap_s = 0.001
    assert pace.rows(512, decoding=True) == 8  # a prompt arrives some day
    for _ in range(40):  # prompts beside answers turn out to be twice as expensive
        pace.learn(50, True, verify=0.110, step=0.110)
    assert pace.row_s == pytest.approx(0.002, rel=0.05)
    assert pace.of_prompts(50, 0.110) == pytest.approx(0.099)  # never all of a pass in which answers went on
