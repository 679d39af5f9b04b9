"""One engine and many event loops: one after the other, in several threads, with many requests in each."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from outrider.api import Outrider
from outrider.core.errors import ClosedEngine, InputError

PROMPTS = [[1, 5, 9], [7, 7], [3, 4, 5, 6], [11]]


def letters(ids: Any) -> str:
    return "".join(chr(97 + i % 26) for i in ids)


@pytest.fixture
def engine(tiny_llama) -> Outrider:
    made = Outrider(tiny_llama, "prompt-lookup", limits={"max_context": 128}, strict=True, runtime="eager")
    made.engine.decode = letters  # the model has no tokenizer
    return made


def texts(engine: Outrider, **sampling: Any) -> list[str]:
    return [g.text for g in engine.generate(PROMPTS, **sampling)]


async def streamed(engine: Outrider, prompts: list[list[int]]) -> list[str]:
    async def read(prompt: list[int]) -> str:
        return "".join([piece async for piece in engine.astream(prompt, max_new_tokens=20)])

    return await asyncio.gather(*map(read, prompts))


async def generated(engine: Outrider, prompts: list[list[int]]) -> list[str]:
    many = await asyncio.gather(*(engine.agenerate([p], max_new_tokens=20) for p in prompts))
    return [g.text for one in many for g in one]


@pytest.mark.parametrize("run", [streamed, generated])
def test_one_engine_serves_one_event_loop_after_another(engine: Outrider, run: Callable[..., Any]) -> None:
    want = texts(engine, max_new_tokens=20)
    for _ in range(3):
        assert asyncio.run(run(engine, PROMPTS)) == want
    assert texts(engine, max_new_tokens=20) == want, "and callers without a loop in between"


@pytest.mark.parametrize("at_once", [False, True], ids=["in-turn", "at-once"])
def test_loops_in_several_threads_share_one_engine(engine: Outrider, at_once: bool) -> None:
    want, got = texts(engine, max_new_tokens=20), []
    work = [threading.Thread(target=lambda: got.append(asyncio.run(streamed(engine, PROMPTS)))) for _ in range(3)]
    for thread in work:
        thread.start()
        if not at_once:
            thread.join()
    for thread in work:
        thread.join()
    assert got == [want] * 3


def test_agenerate_is_generate(engine: Outrider) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.9, "seed": 3, "n": 2}
    want = engine.generate(PROMPTS, **settings)
    got = asyncio.run(engine.agenerate(PROMPTS, **settings))
    assert [(g.token_ids, g.sample) for g in got] == [(g.token_ids, g.sample) for g in want]


def test_concurrent_requests_share_steps(engine: Outrider) -> None:
    steps, step = [], engine.engine.step
    engine.engine.step = lambda: steps.append(1) or step()  # type: ignore[method-assign,func-returns-value]

    async def together() -> None:
        await asyncio.gather(*(engine.agenerate([p], max_new_tokens=20, method="plain") for p in PROMPTS))

    asyncio.run(together())
    assert len(steps) < 40, "four requests of twenty tokens, not one after the other"


def test_a_cancelled_task_cancels_its_requests_and_leaves_the_engine_free(engine: Outrider) -> None:
    async def leave() -> None:
        begun = asyncio.Event()
        step = engine.engine.step
        loop = asyncio.get_running_loop()
        engine.engine.step = lambda: loop.call_soon_threadsafe(begun.set) and step()  # type: ignore[method-assign]
        task = asyncio.create_task(engine.agenerate(PROMPTS, max_new_tokens=100, ignore_eos=True))
        await begun.wait()
        task.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        engine.engine.step = step  # type: ignore[method-assign]

    asyncio.run(leave())
    assert engine.generate([5, 6], max_new_tokens=3)[0].stats.new_tokens <= 3
    assert not engine.engine.queue and not engine.engine.running


@pytest.mark.parametrize("call", ["generate", "agenerate"])
def test_a_refused_prompt_takes_the_others_with_it_and_is_named(engine: Outrider, call: str) -> None:
    with pytest.raises(InputError, match="prompt 3 of 3: .*token ids outside"):
        made = getattr(engine, call)([[1, 2], [3], [1_000_000]], max_new_tokens=50)
        asyncio.run(made)
    assert engine.generate([5, 6], max_new_tokens=1)[0].stats.new_tokens == 1
    assert not engine.engine.queue and not engine.engine.running


def test_errors_come_through_and_a_closed_engine_says_so(engine: Outrider) -> None:
    async def first(prompt: Any) -> str:
        return await anext(engine.astream(prompt, max_new_tokens=4))  # type: ignore[arg-type]

    with pytest.raises(InputError, match="cannot use None"):
        asyncio.run(first(None))
    assert asyncio.run(first([1, 2]))
    engine.close()
    with pytest.raises(ClosedEngine):
        asyncio.run(first([1, 2]))
    with pytest.raises(ClosedEngine):
        asyncio.run(engine.agenerate([1, 2]))
