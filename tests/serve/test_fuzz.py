"""Ten thousand broken requests: the server says what is wrong with each, stays up, and others get their answers."""

from __future__ import annotations

import json
import random
import string
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from outrider.serve.openapi import FORMS
from tests.serve.conftest import Served

KINDS = (
    "application/json",
    "application/json; charset=latin-1",
    "text/plain",
    "",
    "application/xml",
    "multipart/form-data",
)
VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, -(2**70), 1e308, -0.5, 1e-300, "", "x", "\x00", "\U0001f600" * 50,
    "\ud800", [], [[]], [None], [1, "a"], {}, {"type": "x"}, [{"role": "user"}], [{"role": 1, "content": {}}],
    [{"role": "user", "content": [{"type": "image_url"}]}], {"a": {"b": [1, 2, {"c": None}]}}, "9" * 400, [10**9] * 9,
]  # fmt: skip


def fields() -> list[str]:
    return sorted({name for form, _, _ in FORMS.values() for name in form.model_fields})


def broken(chance: random.Random) -> tuple[str, bytes, str]:
    """A route, a body and its content type: mostly nearly right, for few tokens."""
    path = chance.choice(list(FORMS))
    body: Any = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "input": "Hi", "max_tokens": 2,
                 "max_output_tokens": 2, "max_completion_tokens": 2, "tokens": [1]}  # fmt: skip
    for _ in range(chance.randint(1, 4)):
        name = chance.choice(fields()) if chance.random() < 0.9 else "".join(chance.choices(string.printable, k=5))
        body[name] = chance.choice(VALUES)
    if body.get("method") or body.get("n") not in (None, 1):
        body.pop("method", None)
        body["n"] = chance.choice([0, -1, "2", 10**9])
    text = json.dumps(body)
    how = chance.random()
    if how < 0.1:
        text = text[: chance.randint(0, len(text))]
    elif how < 0.15:
        text = '{"messages":' * 500 + "1" + "}" * 500
    elif how < 0.2:
        text = text.replace("2", chance.choice(["NaN", "Infinity", "1e999", "9" * 5000]))
    raw = text.encode("utf-8", "surrogatepass")
    if how > 0.9:
        place = chance.randint(0, len(raw))
        raw = raw[:place] + bytes(chance.choices(range(256), k=3)) + raw[place:]
    return path, raw, KINDS[0] if chance.random() < 0.9 else chance.choice(KINDS)


def send(url: str, seed: int, count: int) -> Counter[int]:
    chance, codes = random.Random(seed), Counter[int]()
    with httpx.Client(base_url=url, timeout=60) as http:
        for _ in range(count):
            path, raw, kind = broken(chance)
            answer = http.post(path, content=raw, headers={"Content-Type": kind} if kind else {})
            codes[answer.status_code] += 1
            assert answer.status_code < 500, (path, raw, answer.text)
            if answer.status_code != 200:
                told = answer.json()["error"]
                assert told["message"] and told["type"], (path, raw, answer.text)
    return codes


def check(served: Served, count: int) -> None:
    with httpx.Client(base_url=served.url, timeout=60) as http:
        ask = {"prompt": "The quick brown", "temperature": 0.8, "seed": 3, "max_tokens": 24}
        before = http.post("/v1/completions", json=ask).json()["choices"][0]["text"]
        with ThreadPoolExecutor(4) as pool:
            found = sum(pool.map(lambda seed: send(served.url, seed, count // 4), range(4)), Counter())
            during = http.post("/v1/completions", json=ask).json()["choices"][0]["text"]
        assert sum(found.values()) == count and found[400] > count // 2, found
        after = http.post("/v1/completions", json=ask).json()["choices"][0]["text"]
        assert before == during == after
        busy = [slot for slot in http.get("/slots").json() if slot["is_processing"]]
        assert not busy


def test_broken_requests_are_refused_and_nothing_falls(served: Served) -> None:
    check(served, 200)


@pytest.mark.slow
def test_ten_thousand_broken_requests_are_refused_and_nothing_falls(served: Served) -> None:
    check(served, 10_000)
