"""A server that is killed, abused and kept busy: every text is the text of a quiet life, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.bench.load.abuse import Mixed
from outrider.bench.load.kills import killed, questions
from outrider.bench.load.servers import Server, Setting, running
from outrider.models import LoadedModel
from outrider.store.prompts import built_in_prompts

pytest.importorskip("uvicorn", reason="the extra outrider[serve] is not installed")
pytestmark = pytest.mark.slow

KILLS = 20
ABORTS, IDLE = 1000, 200
MIXED_S = 420.0  # with what comes before and after, less than ten minutes
SAME_BITS = ("--runtime", "native")  # on a runtime without them a text may part from itself where two tokens nearly tie
MAX_GROWTH, DRAFTERS = 32 << 20, 160 << 20  # bytes; what the default method's drafters may learn comes on top


@pytest.fixture
def small_server(small_model: LoadedModel, tmp_path: Path) -> Iterator[Server]:
    """A random model that speaks the embedded model's tokens."""
    small_model.model.save_pretrained(tmp_path / "small")
    small_model.tokenizer.save_pretrained(tmp_path / "small")
    plain = ("--method", "plain")  # what drafters learn grows up to bounds that it has; here nothing may grow
    with running("outrider", Setting(str(tmp_path / "small"), threads=1, more=plain)) as server:
        yield server


def test_texts_are_the_same_however_often_the_engine_is_killed(smollm2: LoadedModel) -> None:
    bodies = questions([prompt.raw() for prompt in built_in_prompts()][:10], 32)
    with running("outrider", Setting("smollm2", more=SAME_BITS)) as server:
        made = asyncio.run(killed(server, bodies, KILLS, 16, random.Random(1), lambda line: None))
    assert made["kills"] == KILLS and made["streams"] >= len(bodies)
    assert made["different"] == 0 and made["unfinished"] == []


def test_abuse_leaves_nothing_behind_and_changes_nobodys_answer(small_server: Server) -> None:
    mixed = Mixed(small_server, questions(["One, two, three,", "Once upon a time", "The sky"], 24), random.Random(1))

    async def run() -> dict[str, object]:
        await mixed.learn()
        await mixed.run(10.0, 16, IDLE, least_aborts=ABORTS // 4)
        return await mixed.run(10.0, 16, IDLE, least_aborts=ABORTS + ABORTS // 4)

    check(asyncio.run(run()), aborts=ABORTS, growth=MAX_GROWTH)


def test_minutes_of_mixed_load_leave_the_server_as_it_was(smollm2: LoadedModel) -> None:
    with running("outrider", Setting("smollm2", more=SAME_BITS)) as server:
        mixed = Mixed(server, questions([prompt.raw() for prompt in built_in_prompts()][:4], 32), random.Random(2))

        async def run() -> dict[str, object]:
            await mixed.learn()
            await mixed.run(30.0, 8, 20)
            return await mixed.run(MIXED_S, 8, 20)

        check(asyncio.run(run()), aborts=1, growth=MAX_GROWTH + DRAFTERS)


def check(made: dict[str, object], aborts: int, growth: int) -> None:
    done, before, after = made["done"], made["bytes before"], made["bytes after"]
    assert made["wrong"] == [] and made["busy after"] == 0
    assert isinstance(done, dict) and done["aborts"] >= aborts and min(done.values()) > 0 and len(done) == 5
    assert isinstance(before, int) and isinstance(after, int) and after - before < growth
