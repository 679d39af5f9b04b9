"""The process behind the socket is a real engine: its texts, its end, and what its drafters learnt."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from outrider.core.errors import InputError
from outrider.core.params import SamplingParams
from outrider.models import LoadedModel
from outrider.serve.link.seam import Request
from outrider.serve.process.link import ProcessLink
from outrider.store.memory import read_memory
from tests.serve.conftest import Make
from tests.serve.process.test_link import heard

PROMPT = (5, 6, 7, 8, 5, 6, 7)


@pytest.fixture(scope="module")
def folder(small_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("small")
    small_model.model.save_pretrained(place)
    small_model.tokenizer.save_pretrained(place)
    return place


def test_an_engine_apart_says_what_one_here_says_dies_and_goes_on_and_keeps_what_it_learnt(
    folder: Path, make_engine: Make, tmp_path: Path
) -> None:
    params = SamplingParams(max_new_tokens=24, temperature=0.8, seed=3, n=2, stop=("zz",))
    with make_engine() as engine:
        wanted = engine.generate([list(PROMPT)], params)
    memory = tmp_path / "memory"
    settings = {"model": str(folder), "method": "suffix", "runtime": "eager", "max_slots": 4, "max_context": 512,
                "memory": str(memory)}  # fmt: skip

    async def run() -> int:
        link = ProcessLink(settings, limits={"max_waiting": 3})
        await link.start()
        said, texts, ends = await heard(await link.submit(Request("a", PROMPT, params)))
        for one in wanted:
            assert said[one.sample] == one.token_ids and texts[one.sample] == one.text
        assert {end.finish for end in ends} == {one.finish_reason for one in wanted}
        with pytest.raises(InputError, match="context"):
            await link.submit(Request("b", PROMPT * 100, params))
        long = SamplingParams(max_new_tokens=400, ignore_eos=True, seed=1)
        stream = await link.submit(Request("c", PROMPT, long))
        await stream.__anext__()
        os.kill(link.pid, signal.SIGKILL)
        _, _, ends = await heard(stream)
        assert ends[0].stats["new_tokens"] == 400 and ends[0].resumed == "near ties"
        stats = await link.stats()
        assert stats["restarts"] == 1 and stats["new_tokens"] > 0 and stats["running"] == 0
        pid = link.pid
        await link.close()
        return pid

    pid = asyncio.run(run())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert len(read_memory(memory)["suffix/tokens"]) > 400
