"""What a target would like to get ready is done between steps, in the time of none, and while nobody asks."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.params import SamplingParams
from outrider.core.protocols import Recipe
from outrider.core.records import Budget
from outrider.core.schedule import StepReport
from outrider.runtime.slots import SlotTarget
from outrider.verify.invariant import Invariant
from tests.runtime.toy_backend import NGram, ToyBackend


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def made(clock: Any, asked: list[bool]) -> Engine:
    backend = ToyBackend(NGram(26, back=2))

    def spare(idle: bool) -> bool:
        asked.append(idle)
        if isinstance(clock, Clock):
            clock.now += 100.0
        return True

    backend.traits = replace(backend.traits, spare=spare)
    recipe = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))
    return Engine(SlotTarget(backend, max_slots=2), recipe, strict=True, clock=clock)


def test_between_steps_and_in_the_time_of_none() -> None:
    clock, asked, seen = Clock(), list[bool](), list[StepReport]()
    engine = made(clock, asked)
    engine.watch(seen.append)
    engine.submit([1, 2], SamplingParams(max_new_tokens=6))
    while engine.step():
        pass
    assert len(seen) == 6 and asked == [False] * 6
    assert sum(report.timing.total for report in seen) == 0.0


def test_while_nobody_asks() -> None:
    asked: list[bool] = []
    engine, stop = made(time.perf_counter, asked), threading.Event()
    thread = threading.Thread(target=engine.work, args=(stop,))
    thread.start()
    until = time.monotonic() + 20
    while not asked and time.monotonic() < until:
        time.sleep(0.01)
    stop.set()
    thread.join()
    assert asked and all(asked)
    engine.close()
