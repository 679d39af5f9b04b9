"""What came over the wire is read as it was sent, in whatever pieces it came; what broke off does not count."""

from __future__ import annotations

import asyncio
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.bench.load.client import Exchange, post, read_chat
from outrider.bench.load.figures import figures, percentile, table

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PIECES = ["One", " two", "\n\n", "ü", " four"]


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def streamed(pieces: list[str], finish: str | None = "stop") -> bytes:
    events = [event({"choices": [{"delta": {"content": piece}, "finish_reason": None}]}) for piece in pieces]
    if finish:
        events.append(event({"choices": [{"delta": {}, "finish_reason": finish}]}))
        events.append(event({"choices": [], "usage": {"completion_tokens": len(pieces)}}))
        events.append(b"data: [DONE]\n\n")
    return HEAD + b"".join(map(chunk, events)) + (chunk(b"") if finish else b"")


def received(raw: bytes, cuts: list[int]) -> Exchange:
    """As if the bytes had come in reads that end at the cuts, one a second."""
    ends = sorted({*(cut for cut in cuts if 0 < cut < len(raw)), len(raw)})
    return Exchange(sent=0.0, ended=float(len(ends)), raw=bytearray(raw),
                    marks=[(end, float(i)) for i, end in enumerate(ends, 1)])  # fmt: skip


@given(st.lists(st.integers(1, 700), max_size=12))
def test_an_answer_is_the_same_whatever_reads_it_came_in(cuts: list[int]) -> None:
    read = read_chat(received(streamed(PIECES), cuts))
    assert read.complete and read.text == "".join(PIECES) and read.tokens == 5 and read.finish == "stop"
    assert list(read.deliveries) == sorted(set(read.deliveries))
    assert read.deliveries[-1] <= read.ended


def test_a_delivery_has_the_time_of_the_read_that_completed_it() -> None:
    raw = streamed(["a", "b"])
    inside = len(HEAD) + len(chunk(event({"choices": [{"delta": {"content": "a"}, "finish_reason": None}]})))
    assert read_chat(received(raw, [len(HEAD), inside])).deliveries == (2.0, 3.0)
    assert read_chat(received(raw, [len(HEAD), inside + 5])).deliveries == (2.0, 3.0)


@pytest.mark.parametrize(
    "raw", [streamed(PIECES, None), streamed(PIECES)[:-200], HEAD, b"", b"HTTP/1.1 500 No\r\n\r\n"]
)
def test_an_answer_that_broke_off_is_not_complete(raw: bytes) -> None:
    assert not read_chat(received(raw, [])).complete


def test_an_answer_ends_with_its_last_chunk_or_its_length() -> None:
    whole = streamed(PIECES)
    assert received(whole, []).finished() and not received(whole[:-1], []).finished()
    fixed = b"HTTP/1.1 429 Too Many\r\nContent-Length: 2\r\n\r\n{}"
    assert received(fixed, []).finished() and not received(fixed[:-1], []).finished()
    assert received(fixed, []).status == 429 and received(fixed, []).body == b"{}"


async def _served(answer: bytes) -> Exchange:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for i in range(0, len(answer), 50):
            writer.write(answer[i : i + 50])
            await writer.drain()
        if not answer:
            writer.close()  # and otherwise stays open, as some servers do

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        return await post("127.0.0.1", port, "/v1/chat/completions", {"messages": []}, timeout_s=5)


def test_a_server_that_does_not_close_is_not_waited_for() -> None:
    made = asyncio.run(_served(streamed(PIECES)))
    assert read_chat(made).complete and made.error == "" and made.ended - made.sent < 4


def test_nobody_listening_is_an_error_and_no_exception() -> None:
    made = asyncio.run(post("127.0.0.1", 1, "/", {}, timeout_s=5))
    assert "Connect" in made.error and made.status == 0


def test_figures_count_what_is_whole_and_tell_the_rest() -> None:
    good = read_chat(received(streamed(PIECES), [200, 400, 600]))
    broken = read_chat(received(streamed(PIECES, None), []))
    made = figures([good, good, broken], len)
    assert made["requests"] == 3 and made["complete"] == 2 and made["tokens"] == 10
    span = good.deliveries[-1] - good.deliveries[0]
    assert made["token_p50"] == pytest.approx(1e3 * span / 4) and made["first_p99"] == pytest.approx(
        1e3 * good.deliveries[0]
    )
    assert len(table([{"load": "1 at once", "system": "x", **made}])) == 3


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_percentiles_lie_between_the_extremes_and_rise(values: list[float]) -> None:
    found = [percentile(values, share) for share in (0, 50, 99, 100)]
    assert found == sorted(found) and found[0] == min(values) and found[-1] == max(values)
    assert math.isnan(percentile([], 50))
