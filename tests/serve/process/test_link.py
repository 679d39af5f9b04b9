"""Engines die, streams go on: against a process that speaks the same frames and whose texts are known."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.core.errors import ClosedEngine, FullQueue, InputError
from outrider.core.generation import FinishReason
from outrider.core.params import SamplingParams
from outrider.serve.link.seam import Delta, End, EventStream, Request
from outrider.serve.process import engines, link
from outrider.serve.process.link import FRUITLESS, ProcessLink
from tests.serve.process.fake_engine import token_at

FAKE = (sys.executable, "-m", "tests.serve.process.fake_engine")
PROMPT = [1, 2, 3]


@pytest.fixture(autouse=True)
def fake_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "COMMAND", FAKE)
    monkeypatch.setattr(link, "PAUSE_S", 0.01)
    monkeypatch.setattr(link, "RELOAD_S", 0.01)
    root = str(Path(__file__).parents[3])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@asynccontextmanager
async def started(spare: bool = False, save_s: float = 60.0, **settings: Any) -> AsyncIterator[ProcessLink]:
    made = ProcessLink(settings, spare=spare, save_s=save_s)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


def ask(id: str, tokens: int, prompt: list[int] = PROMPT, seed: int = 1, n: int = 1, **more: Any) -> Request:
    return Request(id, tuple(prompt), SamplingParams(max_new_tokens=tokens, seed=seed, n=n), **more)


async def heard(stream: EventStream, pause: float = 0.0) -> tuple[dict[int, list[int]], dict[int, str], list[End]]:
    said: dict[int, list[int]] = {}
    texts: dict[int, str] = {}
    ends: list[End] = []
    async for event in stream:
        if isinstance(event, Delta):
            said.setdefault(event.sample, []).extend(event.tokens)
        if isinstance(event, Delta | End):
            texts[event.sample] = texts.get(event.sample, "") + event.text
        if isinstance(event, End):
            ends.append(event)
        await asyncio.sleep(pause)
    return said, texts, ends


def expected(tokens: int, prompt: list[int] = PROMPT, seed: int = 1, sample: int = 0) -> list[int]:
    return [token_at(prompt, seed, sample, place) for place in range(tokens)]


def run(test: Callable[[], Awaitable[None]], seconds: float = 60.0) -> None:
    asyncio.run(asyncio.wait_for(test(), seconds))  # type: ignore[arg-type]


@pytest.mark.parametrize("spare", [False, True])
def test_streams_go_on_with_the_same_text_however_often_the_engine_is_killed(spare: bool) -> None:
    chance = random.Random(1)

    async def test() -> None:
        async with started(spare) as one:
            asked = [(f"r{i}", 150 + 10 * i, [i + 1, 2], i) for i in range(6)]
            tasks = [
                asyncio.create_task(heard(await one.submit(ask(id, tokens, prompt, seed, n=1 + (seed == 2)))))
                for id, tokens, prompt, seed in asked
            ]
            for _ in range(6):
                while not one.ready:
                    await asyncio.sleep(0.005)
                await asyncio.sleep(chance.uniform(0.05, 0.2))
                os.kill(one.pid, signal.SIGKILL)
                await asyncio.sleep(0.01)
            for (_, tokens, prompt, seed), task in zip(asked, tasks, strict=True):
                said, texts, ends = await task
                assert len(ends) == len(said) == 1 + (seed == 2)
                for end in ends:
                    assert end.finish is FinishReason.LENGTH
                    assert said[end.sample] == expected(tokens, prompt, seed, end.sample)
                    assert texts[end.sample] == "".join(f"{token} " for token in said[end.sample])
                    assert end.resumed == "same text"
            assert one.restarts == 6 and (await one.stats())["restarts"] == 6

    run(test)


def test_a_request_that_comes_while_no_engine_is_there_is_served_by_the_next_one() -> None:
    async def test() -> None:
        async with started(load_s=0.3) as one:
            os.kill(one.pid, signal.SIGKILL)
            while one.ready:
                await asyncio.sleep(0.001)
            said, _, ends = await heard(await one.submit(ask("late", 10)))
            assert said[0] == expected(10) and ends[0].resumed == ""

    run(test)


def test_what_was_refused_is_refused_by_its_name_and_forgotten() -> None:
    async def test() -> None:
        async with started() as one:
            with pytest.raises(InputError, match="token 999"):
                await one.submit(ask("bad", 10, [999]))
            first = await one.submit(ask("bad", 10))  # the name is free again
            with pytest.raises(InputError, match="in use"):
                await one.submit(ask("bad", 10))
            assert (await heard(first))[0][0] == expected(10)

    run(test)


def test_a_reader_that_leaves_is_told_to_the_engine() -> None:
    async def test() -> None:
        async with started() as one:
            stream = await one.submit(ask("left", 100_000))
            await stream.__anext__()
            await stream.aclose()
            other = await one.submit(ask("cancelled", 100_000))
            assert await one.cancel("cancelled") and not await one.cancel("nobody")
            _, _, ends = await heard(other)
            assert ends[0].finish is FinishReason.CANCELLED
            while await one.slots():
                await asyncio.sleep(0.005)

    run(test)


def test_a_reader_that_leaves_while_no_engine_is_there_is_not_asked_for_again() -> None:
    async def test() -> None:
        async with started(load_s=0.3) as one:
            stream = await one.submit(ask("left", 100_000))
            await stream.__anext__()
            os.kill(one.pid, signal.SIGKILL)
            while one.ready:
                await asyncio.sleep(0.001)
            await stream.aclose()
            while not one.ready:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            assert await one.slots() == []

    run(test)


def test_a_slow_reader_holds_up_nobody_and_loses_nothing() -> None:
    async def test() -> None:
        async with started() as one:
            slow = asyncio.create_task(heard(await one.submit(ask("slow", 300)), pause=0.1))
            begun = asyncio.get_running_loop().time()
            said, _, _ = await heard(await one.submit(ask("quick", 300)))
            quick = asyncio.get_running_loop().time() - begun
            assert said[0] == expected(300) and not slow.done()
            assert (await slow)[0][0] == expected(300)
            assert asyncio.get_running_loop().time() - begun < quick + 5  # its steps came joined, not one by one

    run(test)


def test_a_request_that_kills_every_engine_ends_and_the_others_do_not() -> None:
    async def test() -> None:
        async with started() as one:
            good = asyncio.create_task(heard(await one.submit(ask("good", 400))))
            with pytest.raises(ClosedEngine, match=f"died {FRUITLESS} times"):
                await one.submit(ask("poison", 10, [666]))
            assert (await good)[0][0] == expected(400)

    run(test)


def test_a_request_that_says_nothing_before_many_kills_from_outside_is_not_blamed_for_them() -> None:
    async def test() -> None:
        async with started(step_s=0.3) as one:
            slow = await one.submit(ask("slow to begin", 5))
            for _ in range(2 * FRUITLESS):
                while not one.ready:
                    await asyncio.sleep(0.005)
                await asyncio.sleep(0.02)
                os.kill(one.pid, signal.SIGKILL)
                while one.ready:
                    await asyncio.sleep(0.005)
            assert (await heard(slow))[0][0] == expected(5)

    run(test)


def test_what_was_taken_once_is_not_refused_by_the_next_engine() -> None:
    async def test() -> None:
        async with started(places=4) as one:
            tasks = [asyncio.create_task(heard(await one.submit(ask(f"r{i}", 120 + i)))) for i in range(4)]
            with pytest.raises(FullQueue):
                await one.submit(ask("one too many", 10))
            one._settings["places"] = 2  # the next engine has room for half of them
            os.kill(one.pid, signal.SIGKILL)
            for i, task in enumerate(tasks):
                assert (await task)[0][0] == expected(120 + i)

    run(test)


def test_an_engine_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    flag = tmp_path / "broken"
    flag.touch()

    async def test() -> None:
        with pytest.raises(InputError, match="no such model"):
            await ProcessLink({"fail": str(flag)}).start()

    run(test)


def test_streams_end_with_the_reason_where_no_engine_can_be_started_again(tmp_path: Path) -> None:
    flag = tmp_path / "broken"

    async def test() -> None:
        async with started(fail=str(flag)) as one:
            stream = await one.submit(ask("r", 100_000))
            await stream.__anext__()
            flag.touch()
            os.kill(one.pid, signal.SIGKILL)
            _, _, ends = await heard(stream)
            assert ends[0].finish is FinishReason.ERROR and "no such model" in ends[0].error
            with pytest.raises(ClosedEngine, match="no such model"):
                await one.submit(ask("next", 1))

    run(test)


def test_a_spare_is_there_again_after_it_was_taken_or_died() -> None:
    async def test() -> None:
        async with started(spare=True) as one:

            async def spare() -> int:
                while one._spare is None or one._spare.info is None:
                    await asyncio.sleep(0.005)
                return one._spare.pid

            first = await spare()
            os.kill(one.pid, signal.SIGKILL)
            while one.restarts == 0 or not one.ready:
                await asyncio.sleep(0.001)
            assert one.pid == first
            second = await spare()
            os.kill(second, signal.SIGKILL)
            while one._spare is not None and one._spare.pid == second:
                await asyncio.sleep(0.001)
            assert await spare() not in (first, second) and one.pid == first

    run(test)


def test_what_drafters_learn_is_saved_now_and_then(tmp_path: Path) -> None:
    async def test() -> None:
        async with started(save_s=0.05, memory=str(tmp_path / "memory")) as one:
            await heard(await one.submit(ask("r", 20)))
            while not (tmp_path / "memory").exists():
                await asyncio.sleep(0.01)

    run(test)


def test_no_process_outlives_the_link() -> None:
    pids: list[int] = []

    async def test() -> None:
        async with started(spare=True) as one:
            while not one.spare_ready:
                await asyncio.sleep(0.005)
            assert one._spare is not None
            pids.extend((one.pid, one._spare.pid))

    run(test)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
