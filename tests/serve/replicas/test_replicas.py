"""Replicas behind Ray Serve: the text of one engine, through kills and failures, and nothing heard from outside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest

import outrider
from outrider.core.errors import InputError
from outrider.core.generation import FinishReason
from outrider.core.params import SamplingParams
from outrider.serve.link.seam import Delta, End, Request
from outrider.serve.replicas.link import ReplicasLink

pytest.importorskip("ray", reason="needs ray: pip install 'outrider[ray]'")
psutil = pytest.importorskip("psutil")
pytestmark = pytest.mark.slow

LOAD = {"model": "smollm2", "runtime": "native", "precision": "int8", "max_slots": 4, "max_context": 512}
KILLS = 20


def request(number: int, prompt: tuple[int, ...], temperature: float, tokens: int = 40, **more: Any) -> Request:
    params = SamplingParams(max_new_tokens=tokens, temperature=temperature, seed=100 + number, ignore_eos=True, **more)
    return Request(f"r{number}", prompt, params, method="plain" if number % 2 else None)


async def text_of(link: ReplicasLink, asked: Request) -> tuple[dict[int, list[int]], list[End]]:
    said: dict[int, list[int]] = {}
    ends: list[End] = []
    async for event in await link.submit(asked):
        if isinstance(event, Delta):
            said.setdefault(event.sample, []).extend(event.tokens)
        elif isinstance(event, End):
            ends.append(event)
    return said, ends


def children() -> list[Any]:
    return psutil.Process().children(recursive=True)


def replica_pids() -> list[int]:
    found = []
    for one in children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if any("ServeReplica" in part for part in one.cmdline()):
                found.append(one.pid)
    return found


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture(scope="module")
def link(loop: asyncio.AbstractEventLoop) -> Iterator[ReplicasLink]:
    made = ReplicasLink(LOAD, 4)
    loop.run_until_complete(made.start())
    yield made
    loop.run_until_complete(made.close())


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    with outrider.load(**LOAD) as engine:
        texts = ["Count to twenty: one, two,", "def fib(n):\n", "The capital of France is", "Dear Sir or Madam,"]
        return [tuple(engine.encode(text)) for text in texts]


@pytest.fixture(scope="module")
def expected(prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """What one engine says to 40 requests."""
    with outrider.load(**LOAD) as engine:
        asked = [request(i, prompts[i % 4], 0.8 * (i // 4 % 2)) for i in range(40)]
        made = engine.generate([list(one.prompt) for one in asked], [one.params for one in asked])
        return [tuple(one.token_ids) for one in made]


def test_nothing_listens_beyond_loopback(link: ReplicasLink) -> None:
    processes = [psutil.Process(), *children()]
    heard = [
        (one.pid, connection.laddr)
        for one in processes
        for connection in one.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert heard and all(address.ip in ("127.0.0.1", "::1", "::ffff:127.0.0.1") for _, address in heard), heard


def test_twenty_kills_change_no_text_and_fail_no_request(
    loop: asyncio.AbstractEventLoop, link: ReplicasLink, prompts: list[tuple[int, ...]],
    expected: list[tuple[int, ...]],
) -> None:  # fmt: skip
    rng = random.Random(5)

    async def load() -> int:
        rounds, kills = 0, 0
        while kills < KILLS:
            asked = [request(i, prompts[i % 4], 0.8 * (i // 4 % 2)) for i in range(40)]
            answers = [asyncio.create_task(text_of(link, one)) for one in asked]
            for _ in range(5):
                await asyncio.sleep(rng.uniform(0.2, 1.0))
                if not all(answer.done() for answer in answers) and (pids := replica_pids()) and kills < KILLS:
                    os.kill(rng.choice(pids), signal.SIGKILL)
                    kills += 1
            for number, (said, ends) in enumerate(await asyncio.gather(*answers)):
                assert tuple(said[0]) == expected[number], number
                assert [end.finish for end in ends] == [FinishReason.LENGTH] and not ends[0].error
                assert ends[0].resumed in ("", "same text")
            rounds += 1
        return rounds

    assert loop.run_until_complete(asyncio.wait_for(load(), 600)) >= 1
    assert link.resumed > 0  # some were hit


def test_samples_of_a_request_survive_a_kill(
    loop: asyncio.AbstractEventLoop, link: ReplicasLink, prompts: list[tuple[int, ...]]
) -> None:
    async def both() -> tuple[Any, Any]:
        whole = await text_of(link, request(900, prompts[0], 0.9, n=3))
        task = asyncio.create_task(text_of(link, request(900, prompts[0], 0.9, n=3)))
        await asyncio.sleep(0.1)
        for pid in replica_pids():
            os.kill(pid, signal.SIGKILL)
        return whole, await asyncio.wait_for(task, 180)

    whole, broken = loop.run_until_complete(both())
    assert whole[0] == broken[0] and len(broken[1]) == 3


def test_what_a_replica_refuses_is_refused_by_its_name(loop: asyncio.AbstractEventLoop, link: ReplicasLink) -> None:
    with pytest.raises(InputError, match="context"):
        loop.run_until_complete(text_of(link, request(901, tuple([5] * 600), 0.0)))


def test_a_reader_that_leaves_frees_its_place(
    loop: asyncio.AbstractEventLoop, link: ReplicasLink, prompts: list[tuple[int, ...]]
) -> None:
    async def leave() -> None:
        for number in range(910, 940):
            stream = await link.submit(request(number, prompts[0], 0.0, tokens=400))
            await stream.__anext__()
            await stream.aclose()
        assert (await link.stats())["running"] == 0
        said, _ = await asyncio.wait_for(text_of(link, request(950, prompts[0], 0.0)), 60)
        assert len(said[0]) == 40

    loop.run_until_complete(leave())
