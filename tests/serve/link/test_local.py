"""An engine in a thread gives over the seam exactly what it gives when it is called."""

from __future__ import annotations

import asyncio

import pytest

from outrider.api import Outrider
from outrider.core.errors import ClosedEngine, InputError, UnknownName
from outrider.core.generation import FinishReason
from outrider.core.params import SamplingParams
from outrider.serve.link.local import LocalLink
from outrider.serve.link.prediction import agreed
from outrider.serve.link.seam import Delta, End, Event, Request
from outrider.serve.link.stream import JoinedEvents
from tests.serve.conftest import Make


async def collect(link: LocalLink, request: Request) -> list[Event]:
    stream = await link.submit(request)
    return [event async for event in stream]


def said(events: list[Event], sample: int = 0) -> tuple[list[int], str]:
    mine = [e for e in events if isinstance(e, Delta | End) and e.sample == sample]
    assert isinstance(mine[-1], End) and not any(isinstance(e, End) for e in mine[:-1])
    return [t for e in mine if isinstance(e, Delta) for t in e.tokens], "".join(e.text for e in mine)


def test_what_comes_over_the_seam_is_what_the_engine_says(engine: Outrider, make_engine: Make) -> None:
    prompts = [engine.encode(text) for text in ("The capital of France is", "One, two, three,", "Dear Sir or Madam,")]
    params = [SamplingParams(max_new_tokens=20), SamplingParams(max_new_tokens=20, temperature=0.8, seed=5, n=2),
              SamplingParams(max_new_tokens=20, stop=(".",), logprobs=1)]  # fmt: skip
    wanted = [engine.generate([p], q) for p, q in zip(prompts, params, strict=True)]

    async def all_at_once() -> list[list[Event]]:
        link = LocalLink(make_engine)
        await link.start()
        try:
            requests = [Request(str(i), tuple(p), q) for i, (p, q) in enumerate(zip(prompts, params, strict=True))]
            return await asyncio.gather(*(collect(link, one) for one in requests))
        finally:
            await link.close()

    for events, generations in zip(asyncio.run(all_at_once()), wanted, strict=True):
        for generation in generations:
            assert said(events, generation.sample) == (generation.token_ids, generation.text)
            deltas = [e for e in events if isinstance(e, Delta) and e.sample == generation.sample]
            assert [o for d in deltas for o in d.origins] == generation.origins or generation.origins
            assert sum(len(d.origins) for d in deltas) == len(generation.token_ids)
            if generation.logprobs is not None:
                assert [p.token for d in deltas for p in d.logprobs or ()] == generation.token_ids


def test_a_reader_who_leaves_frees_the_slot_and_others_go_on(engine: Outrider, make_engine: Make) -> None:
    async def run() -> None:
        link = LocalLink(make_engine)
        await link.start()
        long = SamplingParams(max_new_tokens=200, ignore_eos=True)
        leaving = await link.submit(Request("a", tuple(engine.encode("Once upon a time")), long))
        async for _ in leaving:
            break
        await leaving.aclose()
        other = await collect(link, Request("b", (1, 2, 3), SamplingParams(max_new_tokens=3, ignore_eos=True)))
        assert len(said(other)[0]) == 3
        stats = await link.stats()
        assert (stats["running"], stats["waiting"]) == (0, 0) and not await link.slots()
        cancelled = await link.submit(Request("c", (1, 2, 3), long))
        assert await link.cancel("c") and not await link.cancel("nothing")
        assert [e.finish for e in [e async for e in cancelled] if isinstance(e, End)] == [FinishReason.CANCELLED]
        await link.close()
        with pytest.raises(ClosedEngine):
            await link.submit(Request("d", (1,), long))

    asyncio.run(run())


def test_what_cannot_run_is_refused_before_anything_is_sent(engine: Outrider, make_engine: Make) -> None:
    async def run() -> None:
        link = LocalLink(make_engine)
        await link.start()
        with pytest.raises(InputError, match="context"):
            await link.submit(Request("a", tuple(range(600)), SamplingParams()))
        with pytest.raises(UnknownName, match="did you mean suffix"):
            await link.submit(Request("a", (1,), SamplingParams(), method="sufix"))
        await link.close()

    asyncio.run(run())


def test_a_slow_reader_finds_steps_joined_and_nothing_lost() -> None:
    async def run() -> None:
        left = []
        stream = JoinedEvents(1, lambda: left.append(1))
        for token in range(100):
            stream.put([Delta(0, (token,), chr(65 + token % 26))])
        stream.put([End(0, FinishReason.EOS)])
        events = [event async for event in stream]
        assert len(events) == 2 and isinstance(events[0], Delta)
        assert events[0].tokens == tuple(range(100)) and events[0].steps == 100 and len(events[0].text) == 100
        await stream.aclose()
        assert not left

    asyncio.run(run())


def test_predicted_tokens_are_counted_through_an_insertion() -> None:
    expected = list(range(100, 140))
    assert agreed(expected, expected) == 40
    assert agreed(expected, [*expected[:20], 7, 8, 9, *expected[20:]]) >= 34
    assert agreed(expected, [1, 2, 3]) == 0 and agreed([], [1]) == 0
