"""Keys, limits, unknown fields and ends: what the server refuses, and how it says so."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from outrider.models import LoadedModel
from outrider.serve.link.local import LocalLink
from outrider.serve.settings import Settings, read_keys
from outrider.serve.text import Text
from tests.serve.conftest import Make, Served, listening

ASK = {"model": "small", "prompt": "One, two,", "max_tokens": 3}


@pytest.fixture(scope="module")
def strict(make_engine: Make, small_model: LoadedModel) -> Iterator[Served]:
    """A server with keys, small limits, and no patience for unknown fields."""
    settings = Settings(
        keys=(("ann", "secret"), ("bob", "other")), unknown="refuse", max_body_bytes=2000, max_header_bytes=2000,
        max_waiting=2, body_s=0.5, cors=("https://a.example",),
    )  # fmt: skip
    with listening(LocalLink(make_engine, 2), Text(small_model.tokenizer, "small"), settings) as up:
        yield up


def error_of(answer: httpx.Response) -> dict[str, str]:
    body = answer.json()
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def test_a_key_is_asked_for_in_both_forms(strict: Served) -> None:
    with httpx.Client(base_url=strict.url) as http:
        assert http.get("/health").status_code == 200 and http.get("/ready").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "secre"}, {"Authorization": "secret"}):
            refused = http.post("/v1/completions", json=ASK, headers=headers)
            assert refused.status_code == 401 and error_of(refused)["code"] == "invalid_api_key"
        for headers in ({"Authorization": "Bearer secret"}, {"x-api-key": "other"}):
            assert http.post("/v1/completions", json=ASK, headers=headers).status_code == 200
        assert http.get("/v1/models").status_code == 401
        anthropic = http.post("/v1/messages", json={})
        assert anthropic.json()["type"] == "error" and anthropic.status_code == 401


def test_what_is_too_large_or_too_slow_is_refused(strict: Served) -> None:
    key = {"x-api-key": "secret"}
    with httpx.Client(base_url=strict.url) as http:
        large = http.post("/v1/completions", json={**ASK, "prompt": "x" * 3000}, headers=key)
        assert large.status_code == 413 and error_of(large)["type"] == "request_too_large"
        chunked = http.post(
            "/v1/completions", content=iter([b"x" * 1500] * 3), headers=key | {"content-type": "application/json"}
        )
        assert chunked.status_code == 413
        assert http.get("/v1/models", headers=key | {"x-long": "y" * 3000}).status_code == 431
    host, port = strict.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-api-key: secret\r\n"
                     b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{")  # fmt: skip
        assert half.recv(4096).startswith(b"HTTP/1.1 408")


def test_a_full_queue_says_when_to_come_back(strict: Served) -> None:
    long = {**ASK, "max_tokens": 400, "ignore_eos": True, "stream": True}
    key = {"x-api-key": "secret"}
    with httpx.Client(base_url=strict.url, timeout=60) as http:
        answers, streams = [], []
        for _ in range(12):
            stream = http.stream("POST", "/v1/completions", json=long, headers=key)
            answers.append(stream.__enter__())
            streams.append(stream)
        codes = [answer.status_code for answer in answers]
        for stream in streams:
            stream.__exit__(None, None, None)
        assert 429 in codes and codes[0] == 200
        assert answers[codes.index(429)].headers["retry-after"] == "1"
        for _ in range(100):  # those who left free their places
            if http.post("/v1/completions", json=ASK, headers=key).status_code == 200:
                break
            time.sleep(0.05)
        else:
            raise AssertionError("the queue never emptied")


def test_unknown_fields_are_refused_by_name_or_named_in_a_header(strict: Served, http: httpx.Client) -> None:
    with httpx.Client(base_url=strict.url) as other:
        refused = other.post("/v1/completions", json={**ASK, "tempratur": 1}, headers={"x-api-key": "secret"})
    assert refused.status_code == 400 and error_of(refused)["param"] == "tempratur"
    ignored = http.post("/v1/completions", json={**ASK, "tempratur": 1, "zzz": None})
    assert ignored.status_code == 200 and ignored.headers["x-outrider-ignored"] == "tempratur,zzz"


def test_pages_of_other_sites_are_not_answered_unless_allowed(strict: Served, http: httpx.Client) -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in http.options("/v1/completions", headers=asked).headers
    with httpx.Client(base_url=strict.url) as other:
        assert (
            other.options("/v1/completions", headers=asked).headers["access-control-allow-origin"]
            == "https://a.example"
        )
    as_text = http.post("/v1/completions", content=json.dumps(ASK), headers={"Content-Type": "text/plain"})
    assert as_text.status_code == 415


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"prompt": NaN}', b'{"a":' * 3000 + b"1" + b"}" * 3000, b"\xff\xfe",
             b'{"prompt": "\\ud800"}', b'{"prompt": ' + b"9" * 5000 + b"}", b'{"prompt": {"a": 1}}',
             b'{"prompt": "x", "seed": 1e400}', b'{"prompt": "x", "model": "\\ud800"}', b'{"prompt": []}'],
    ids=range(13),
)  # fmt: skip
def test_a_broken_request_is_a_400_and_nothing_worse(http: httpx.Client, body: bytes) -> None:
    answer = http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 404), answer.text
    assert error_of(answer)["message"]


def test_routes_that_are_not_there_and_wrong_methods_answer_in_the_same_form(http: httpx.Client) -> None:
    for answer, code in ((http.get("/nothing"), 404), (http.get("/v1/completions"), 405), (http.post("/health"), 405)):
        assert answer.status_code == code and error_of(answer)["message"]
    assert http.post("/v1/embeddings", json={}).status_code == 501


def test_a_file_of_keys_has_one_a_line() -> None:
    assert read_keys("# keys\nann: abc\n\ndef\n") == (("ann", "abc"), ("key 4", "def"))
    with pytest.raises(ValueError, match="holds none"):
        read_keys("# nothing\n")


def test_small_routes_say_what_the_server_is(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": "Hello there"}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "Hello there"
    talk = {"messages": [{"role": "user", "content": "Hi"}]}
    shown = http.post("/apply-template", json=talk).json()["prompt"]
    assert "Hi" in shown and http.post("/tokenize", json=talk).json()["count"] == len(
        http.post("/tokenize", json={"prompt": shown, "add_special_tokens": False}).json()["tokens"]
    )
    assert http.get("/version").json()["version"] and http.get("/props").json()["total_slots"] == 4
    assert len(http.get("/slots").json()) >= 4 and http.get("/metrics").status_code == 200
    assert http.get("/v1/outrider/corpora").json()["data"] == []
    assert http.get("/v1/outrider/trace/nothing").status_code == 404
    assert set(http.get("/openapi.json").json()["paths"]) >= {"/v1/chat/completions", "/v1/messages"}
