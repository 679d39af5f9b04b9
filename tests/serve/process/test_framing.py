"""Frames arrive as they were sent, in whatever pieces; records cross as they are; what is no frame is not believed."""

from __future__ import annotations

import asyncio
import json
import math
import socket

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.errors import FullQueue, InputError, OutriderError
from outrider.core.generation import FinishReason, Origin, TokenLogprob
from outrider.core.params import SamplingParams
from outrider.serve.link.seam import Delta, End, Info, PromptReport, Request
from outrider.serve.process.counts import joined
from outrider.serve.process.framing import LENGTH, MAX_FRAME, BadFrame, Frames, Message, Wire, encode
from outrider.serve.process.records import (
    pack_error,
    pack_event,
    pack_info,
    pack_request,
    unpack_error,
    unpack_event,
    unpack_info,
    unpack_request,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
MESSAGES = st.lists(st.builds(lambda kind, rest: [kind, *rest], st.text(), st.lists(VALUES, max_size=4)), max_size=4)
TOKENS = st.lists(st.integers(0, 2**31), max_size=5).map(tuple)
NUMBERS = st.floats(allow_nan=False, width=32)
LOGPROBS = st.builds(
    TokenLogprob, st.integers(0, 9), NUMBERS, NUMBERS,
    st.lists(st.tuples(st.integers(0, 9), NUMBERS, NUMBERS), max_size=3).map(tuple),
)  # fmt: skip
DELTAS = st.builds(
    Delta, st.integers(0, 3), TOKENS, st.text(),
    st.lists(st.builds(Origin, st.text(max_size=9), st.integers(0, 9)), max_size=5).map(tuple),
    st.none() | st.lists(LOGPROBS, max_size=3).map(tuple), st.integers(1, 9),
)  # fmt: skip
ENDS = st.builds(
    End, st.integers(0, 3), st.sampled_from(FinishReason), st.text(), st.none() | st.text() | st.integers(0, 9),
    st.integers(0, 2**64 - 1), st.dictionaries(st.text(), NUMBERS, max_size=3), error=st.text(), resumed=st.text(),
)  # fmt: skip
REPORTS = st.builds(PromptReport, st.lists(st.none() | LOGPROBS, max_size=3).map(tuple))


def crossed(messages: list[Message], cuts: list[int] | None = None) -> list[Message]:
    """Through bytes that come in pieces."""
    data, reader = encode(messages), Frames()
    ends = sorted({cut % (len(data) + 1) for cut in cuts or ()} | {len(data)})
    return [m for start, end in zip([0, *ends], ends, strict=False) for m in reader.feed(data[start:end])]


@given(st.lists(MESSAGES, max_size=4), st.lists(st.integers(0, 4000), max_size=12))
def test_messages_arrive_as_they_were_sent_in_whatever_pieces(frames: list[list[Message]], cuts: list[int]) -> None:
    data, reader = b"".join(map(encode, frames)), Frames()
    ends = sorted({cut % (len(data) + 1) for cut in cuts} | {len(data)})
    got = [m for start, end in zip([0, *ends], ends, strict=False) for m in reader.feed(data[start:end])]
    assert got == [message for frame in frames for message in frame]


@given(MESSAGES, st.integers(1, 400))
def test_of_a_frame_that_was_cut_off_nothing_is_heard(messages: list[Message], missing: int) -> None:
    data = encode(messages)
    assert Frames().feed(data[: max(len(data) - missing, 0)]) == []


@pytest.mark.parametrize(
    "data",
    [LENGTH.pack(MAX_FRAME + 1), LENGTH.pack(3) + b"{}]", LENGTH.pack(2) + b"{}", LENGTH.pack(4) + b"[[]]",
     LENGTH.pack(3) + b"[1]", LENGTH.pack(2) + b"\xff\xff", LENGTH.pack(200000) + b"[" * 200000],
)  # fmt: skip
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(BadFrame):
        Frames().feed(data)


@given(st.one_of(DELTAS, ENDS, REPORTS))
def test_events_cross_as_they_are(event: Delta | End | PromptReport) -> None:
    ((_, packed),) = crossed([["event", pack_event(event)]])
    assert unpack_event(packed) == event


@given(
    TOKENS.filter(bool), TOKENS, st.dictionaries(st.integers(0, 9), NUMBERS.filter(lambda x: x < math.inf), max_size=3),
    st.lists(st.text(min_size=1), max_size=2), st.integers(0, 2**64 - 1), st.floats(0.1, 2),
)  # fmt: skip
def test_requests_cross_as_they_are(
    prompt: tuple[int, ...], resume: tuple[int, ...], bias: dict[int, float], stop: list[str], seed: int,
    temperature: float,
) -> None:  # fmt: skip
    params = SamplingParams(temperature, logit_bias=bias, stop=tuple(stop), seed=seed, prediction=prompt,
                            bad_words=(prompt,), n=2)  # fmt: skip
    request = Request("x", prompt, params, "plain", 3, resume, -1, "key", "salt", 2.5, True)
    ((_, packed),) = crossed([["submit", pack_request(request)]])
    assert unpack_request(packed) == request
    assert len(packed["params"]) <= 8  # what is left at its default does not travel


def test_numbers_of_numpy_and_minus_infinity_cross() -> None:
    request = Request("x", (1,), SamplingParams(logit_bias={4: -math.inf}))
    assert unpack_request(crossed([["s", pack_request(request)]])[0][1]) == request
    assert crossed([["s", np.int64(3), np.float32(0.5), np.arange(2)]]) == [["s", 3, 0.5, [0, 1]]]


def test_what_an_engine_is_crosses() -> None:
    info = Info("m", "mix", ("mix", "plain"), 64, 256, 8, (2, 3), corpora=({"name": "docs"},), same_bits=True)
    assert unpack_info(crossed([["i", pack_info(info)]])[0][1]) == info


def test_errors_keep_their_class_where_it_is_ours() -> None:
    for error in (InputError("bad"), FullQueue("full")):
        made = unpack_error(crossed([["r", pack_error(error)]])[0][1])
        assert type(made) is type(error) and str(made) == str(error)
    other = unpack_error(pack_error(ValueError("two\nlines")))
    assert type(other) is OutriderError and str(other) == "the engine failed: ValueError: two lines"
    assert type(unpack_error(["did_you_mean", "x"])) is OutriderError


def test_what_is_said_in_one_round_of_the_loop_is_one_frame() -> None:
    frames: list[list[Message]] = []

    async def talk() -> None:
        here, there = socket.socketpair()
        loop, lost = asyncio.get_running_loop(), asyncio.Event()
        speaker, hearer = Wire(lambda messages: None, lambda: None), Wire(frames.append, lost.set)
        await loop.create_connection(lambda: speaker, sock=here)
        await loop.create_connection(lambda: hearer, sock=there)
        for number in range(20):
            speaker.say("event", number)
        await asyncio.sleep(0.05)
        speaker.say("event", 20)
        speaker.flush()
        speaker.close()
        await asyncio.wait_for(lost.wait(), 5)

    asyncio.run(talk())
    assert frames == [[["event", number] for number in range(20)], [["event", 20]]]


def test_nobody_waits_for_a_reader_that_does_not_read() -> None:
    async def talk() -> tuple[bool, bool]:
        here, there = socket.socketpair()
        wire = Wire(lambda messages: None, lambda: None)
        await asyncio.get_running_loop().create_connection(lambda: wire, sock=here)
        await asyncio.wait_for(wire.room(), 1)
        wire.say("event", "x" * (4 << 20))
        wire.flush()
        waiting = asyncio.create_task(wire.room())
        await asyncio.sleep(0.05)
        stuck = not waiting.done()
        there.setblocking(False)
        while not waiting.done():  # it reads at last
            await asyncio.sleep(0.001)
            while True:
                try:
                    there.recv(1 << 20)
                except BlockingIOError:
                    break
        there.close()
        return stuck, waiting.done()

    assert asyncio.run(talk()) == (True, True)


def test_counts_of_engines_add_up_and_what_is_now_does_not() -> None:
    first = {"running": 3, "steps": 10, "depths": [1, 2], "by": {"suffix": {"1": [4, 2]}}, "runtime": "native"}
    then = {"running": 1, "steps": 5, "depths": [1, 1, 1], "by": {"suffix": {"1": [1, 1]}, "table": {"2": [7, 0]}}}
    kept = joined({}, first, gauges=False)
    assert "running" not in kept
    assert json.loads(json.dumps(joined(kept, then))) == {
        "running": 1, "steps": 15, "depths": [2, 3, 1], "by": {"suffix": {"1": [5, 3]}, "table": {"2": [7, 0]}},
        "runtime": "native",
    }  # fmt: skip
    assert kept["depths"] == [1, 2] and kept["by"] == {"suffix": {"1": [4, 2]}}
