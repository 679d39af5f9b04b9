"""What a step brought is counted and delivered while the next pass runs, and nobody can tell but by the clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.generation import Delivery, FinishReason
from outrider.core.params import SamplingParams
from outrider.core.protocols import Recipe
from outrider.core.records import Budget, Needs, Scores
from outrider.draft.lookup.prompt_lookup import PromptLookup
from outrider.runtime.flight import Block
from outrider.runtime.slots import SlotTarget
from outrider.verify.invariant import Invariant
from tests.runtime.toy_backend import NGram, ToyBackend

VOCAB, TOKENS = 26, 30
PROMPTS = [[1, 2, 3, 1, 2], [4], [5, 6, 5], [7, 7]]


class Overlapping(ToyBackend):
    """Its passes keep the host waiting: work that it was handed is done in the middle of them."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.work: list[Callable[[], None]] = []
        self.inside = False
        self.traits = replace(self.traits, meanwhile=self.work.append)

    def run(self, blocks: Sequence[Block], needs: Needs) -> list[Scores]:
        self.inside = True
        while self.work:
            self.work.pop()()
        self.inside = False
        return super().run(blocks, needs)


def letters(tokens: Sequence[int]) -> str:
    return "".join(chr(97 + token) for token in tokens)


def made(kind: type[ToyBackend], slots: int = 4, drafter: PromptLookup | None = None) -> tuple[Engine, Any]:
    backend = kind(NGram(VOCAB, back=2))
    recipe = Recipe("copies", drafter or PromptLookup(), Invariant(), Fixed(Budget(4, 4)))
    return Engine(SlotTarget(backend, max_slots=slots), recipe, eos_ids=(0,), decode=letters, strict=True), backend


def asked(**given: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=TOKENS, temperature=1.0, seed=5, **given)


ASKED: list[dict[str, Any]] = [{}, {"stop": ("q",)}, {"trace": True}, {"stop_token_ids": (3, 9)}]


def everything(kind: type[ToyBackend], slots: int) -> list[Any]:
    """Results and deliveries, without times."""
    engine, _ = made(kind, slots)
    told: list[Delivery] = []
    given = zip(PROMPTS, ASKED, strict=True)
    handles = [engine.submit(prompt, asked(**one), listener=told.append) for prompt, one in given]
    found: list[Any] = []
    for handle in handles:
        one = handle.result()
        stats = {name: value for name, value in one.stats.as_dict().items() if not name.endswith(("_s", "_ms", "step"))}
        found.append((one.text, one.token_ids, one.finish_reason, one.origins, stats))
        mine = [each for each in told if each.request == handle.id]
        found.append([(each.token_ids, each.text, each.origins, each.last) for each in mine])
        if one.trace is not None:
            found.append([(step.first, step.path, step.emitted, step.wanted, step.context) for step in one.trace.steps])
    return found


@pytest.mark.parametrize("slots", [4, 2])
def test_results_and_deliveries_are_the_same(slots: int) -> None:
    assert everything(Overlapping, slots) == everything(ToyBackend, slots)


def test_deliveries_come_while_the_next_pass_runs() -> None:
    engine, backend = made(Overlapping)
    inside: list[bool] = []
    handle = engine.submit([1, 2, 3], asked(), listener=lambda one: inside.append(backend.inside or one.last))
    handle.result()
    assert len(inside) > 3 and all(inside)


def test_who_steps_by_himself_finds_everything_delivered() -> None:
    engine, _ = made(Overlapping)
    told: list[int] = []
    handle = engine.submit([1, 2, 3], asked(), listener=lambda one: told.extend(one.token_ids))
    while engine.step():
        (part,) = handle.partial()
        assert told == part.token_ids and part.stats.new_tokens == len(told)


def test_a_thread_that_stops_working_leaves_nothing_undelivered() -> None:
    engine, _ = made(Overlapping)
    told: list[int] = []
    stop = threading.Event()

    def listen(one: Delivery) -> None:
        told.extend(one.token_ids)
        if len(told) > 5:
            stop.set()

    handle = engine.submit([1, 2, 3], asked(ignore_eos=True), listener=listen)
    engine.work(stop)
    assert told == handle.partial()[0].token_ids and len(told) > 5


@pytest.mark.parametrize("kind", [Overlapping, ToyBackend])
def test_a_pass_that_ran_of_somebody_cancelled_meanwhile_is_discarded(kind: type[ToyBackend]) -> None:
    learnt: list[int] = []

    class Watched(PromptLookup):
        def observe(self, slots: Sequence[int], records: Sequence[Any]) -> None:
            learnt.extend(token for record in records for token in record.emitted)
            super().observe(slots, records)

    engine, _ = made(kind, drafter=Watched(name="watched"))
    told: list[int] = []
    had: list[int] = []  # tokens when it was cancelled

    def listen(one: Delivery) -> None:
        told.extend(one.token_ids)
        if len(told) >= 5:
            had.append(len(told))
            handle.cancel()

    handle = engine.submit([1, 2, 3], asked(ignore_eos=True), listener=listen)
    cut = handle.result()
    assert cut.finish_reason is FinishReason.CANCELLED and cut.token_ids == told == learnt and len(told) == had[0]
    assert cut.stats.new_tokens == len(told) and cut.text == letters(told)
    assert engine.target.free_slots == 4 and not engine.running
    (whole,) = engine.submit([1, 2, 3], asked(ignore_eos=True)).results()
    assert whole.token_ids[: len(told)] == told


def test_who_leaves_before_the_next_pass_is_told_his_end_once() -> None:
    engine, _ = made(Overlapping)
    told: list[Delivery] = []
    handle = engine.submit([1, 2, 3], asked(ignore_eos=True), listener=told.append)
    engine.submit([4], asked(ignore_eos=True))
    engine.drive(lambda: engine.steps == 3)
    handle.cancel()
    engine.drive(lambda: engine.steps == 6)
    assert [one.last for one in told] == [False] * (len(told) - 1) + [True]
    assert [token for one in told for token in one.token_ids] == handle.result().token_ids


def test_a_listener_that_fails_ends_its_request_there() -> None:
    engine, _ = made(Overlapping)
    calls: list[Delivery] = []

    def listen(one: Delivery) -> None:
        calls.append(one)
        raise RuntimeError("nobody listens")

    bad, good = engine.submit([1, 2, 3], asked(), listener=listen), engine.submit([4], asked())
    assert good.result().token_ids == made(ToyBackend)[0].submit([4], asked()).result().token_ids
    with pytest.raises(RuntimeError, match="nobody listens"):
        bad.result()
    assert len(calls) == 1 and bad.partial()[0].token_ids == list(calls[0].token_ids)
