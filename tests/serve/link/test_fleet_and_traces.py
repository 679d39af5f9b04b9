"""What is kept of requests for the page: within bounds, by the day, and with the texts of the answers."""

from __future__ import annotations

from datetime import date

import numpy as np
import pytest

from outrider.core.params import SamplingParams
from outrider.core.records import StepTiming
from outrider.core.schedule import StepReport
from outrider.serve.link.fleet import Fleet
from outrider.serve.link.traces import Traces
from tests.explain.made import decode, made


class Costs:
    """20 ms a sequence."""

    def add(self, rows: int, batch: int, seconds: float, context: int) -> None: ...

    def seconds(self, batch: int, candidates: int, context: int) -> np.ndarray:
        return np.full(candidates + 1, 0.02 * batch)


def report(emitted: int = 3, sequences: int = 1, running: int = 1, seconds: float = 0.03) -> StepReport:
    timing = StepTiming(0.0, seconds, 0.0, sequences, sequences, context=100)
    return StepReport(1, timing, sequences, 0, 4, emitted - sequences, emitted, running, 0)


def test_what_was_saved_is_what_plain_steps_would_have_taken_less_what_was_taken() -> None:
    fleet = Fleet(Costs())
    fleet.watch(report(emitted=3, seconds=0.03))  # three tokens of 20 ms each, in 30 ms
    fleet.watch(report(emitted=4, sequences=2, seconds=0.05))  # two passes of 40 ms, in 50 ms
    today = fleet.as_dict()["today"]
    assert today["saved_s"] == pytest.approx(0.03 + 0.03) and (today["tokens"], today["passes"]) == (7, 3)


def test_without_a_cost_model_nothing_is_claimed() -> None:
    fleet = Fleet(None)
    fleet.watch(report())
    assert fleet.as_dict()["today"] == {"tokens": 3, "passes": 1, "saved_s": 0.0}


def test_a_new_day_begins_at_nothing() -> None:
    days = iter([date(2026, 1, 1), date(2026, 1, 1), date(2026, 1, 2)])
    fleet = Fleet(Costs(), today=lambda: next(days))
    fleet.watch(report())
    fleet.watch(report(emitted=2))
    assert fleet.as_dict()["today"]["tokens"] == 2


def test_a_gap_is_the_time_between_steps_for_which_somebody_waited() -> None:
    times = iter([1.0, 1.25, 9.0, 9.5])
    fleet = Fleet(None, clock=lambda: next(times))
    fleet.watch(report())
    fleet.watch(report(running=0))  # nobody is left to wait
    fleet.watch(report())
    fleet.watch(report())
    found = fleet.as_dict()
    assert (found["gap_p50_s"], found["gap_p99_s"]) == (0.25, 0.25) and sorted(fleet._gaps) == [0.25, 0.5]


def test_traces_stay_within_their_number_and_their_bytes() -> None:
    one = made()
    assert one.trace is not None
    one.trace.bytes = 1000
    traces = Traces(decode, requests=3, limit=10_000)
    for i in range(5):
        traces.keep(str(i), one, SamplingParams())
    assert [traces.find(str(i)) is not None for i in range(5)] == [False, False, True, True, True]
    traces = Traces(decode, requests=99, limit=2500)
    for i in range(5):
        traces.keep(str(i), one, SamplingParams())
    assert [i for i in range(5) if traces.find(str(i))] == [3, 4]
    one.trace.bytes = 9000
    traces.keep("large", one, SamplingParams())
    assert traces.find("large") is None


def test_a_trace_is_found_with_the_text_of_every_sample() -> None:
    traces, one, other = Traces(decode, "toy"), made(seed=1), made(seed=2)
    object.__setattr__(other, "sample", 1)
    for generation in (other, one):  # as they end
        traces.keep("a", generation, SamplingParams())
    found = traces.find("a")
    assert found is not None and (found["id"], found["model"], found["text"]) == ("a", "toy", one.text)
    assert [doc["text"] for doc in found["others"]] == [other.text] and traces.find("b") is None


def test_a_request_without_a_trace_is_not_kept() -> None:
    traces, one = Traces(decode), made()
    object.__setattr__(one, "trace", None)
    traces.keep("a", one, SamplingParams())
    assert traces.find("a") is None
