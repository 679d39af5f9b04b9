"""Over HTTP the text is the engine's: at any temperature, with any method, alone or in company, whole or streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.api import Outrider
from outrider.core.params import SamplingParams
from outrider.models import LoadedModel
from outrider.serve.link.local import LocalLink
from outrider.serve.settings import Settings
from outrider.serve.text import Text
from outrider.store.prompts import built_in_prompts
from tests.serve.conftest import Served, listening

TEXTS = (
    "Say something.",
    "What is a cat?",
    "Count: 1, 2, 3,",
    "def f(x):\n    return",
    "Ünïcödé \U0001f600?",
    "A a A a A a",
)


def streamed(http: httpx.Client, body: dict[str, Any]) -> str:
    pieces = []
    with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                pieces += [choice["delta"].get("content") or "" for choice in event["choices"]]
    return "".join(pieces)


def asked(text: str, place: int, temperature: float, method: str | None, most: int) -> dict[str, Any]:
    more = {} if method is None else {"method": method}
    return {"messages": [{"role": "user", "content": text}], "temperature": temperature, "seed": place,
            "max_tokens": most, **more}  # fmt: skip


def check(url: str, engine: Outrider, texts: Sequence[str], most: int, together: int, temperature: float,
          method: str | None) -> None:  # fmt: skip
    params = [SamplingParams(temperature, seed=place, max_new_tokens=most) for place in range(len(texts))]
    wanted = [one.text for one in engine.generate([engine.encode_chat(text) for text in texts], params)]
    bodies = [asked(text, place, temperature, method, most) for place, text in enumerate(texts)]
    with httpx.Client(base_url=url, timeout=600) as http, ThreadPoolExecutor(together) as pool:
        found = list(pool.map(lambda body: streamed(http, body), bodies))
    assert found == wanted


@pytest.mark.parametrize("together", [1, 4, 16])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", [None, "plain"])
def test_the_text_is_the_engines(
    served: Served, engine: Outrider, together: int, temperature: float, method: str | None
) -> None:
    check(served.url, engine, TEXTS, 24, together, temperature, method)


@settings(max_examples=15)
@given(
    text=st.text(min_size=1, max_size=20), interval=st.integers(1, 9), stop=st.text(min_size=1, max_size=2),
    seed=st.integers(0, 2**64 - 1), include=st.booleans(),
)  # fmt: skip
def test_streamed_text_joins_to_the_whole_one(
    served: Served, text: str, interval: int, stop: str, seed: int, include: bool
) -> None:
    body = asked(text, seed, 1.0, None, 16)
    body |= {"stop": [stop], "stream_interval": interval, "include_stop_str_in_output": include}
    with httpx.Client(base_url=served.url, timeout=60) as http:
        whole = http.post("/v1/chat/completions", json=body)
        assert whole.status_code == 200, whole.text
        message = whole.json()["choices"][0]["message"]
        assert streamed(http, body) == (message["content"] or "")


@pytest.fixture(scope="module")
def real(smollm2: LoadedModel) -> Iterator[tuple[Served, Outrider]]:
    """The embedded model in a runtime that keeps the same bits, and a plain engine beside it."""
    limits = {"max_slots": 16, "max_context": 1024}
    with (
        Outrider(smollm2, "plain", limits=limits, runtime="native") as engine,
        listening(
            LocalLink(lambda: Outrider(smollm2, limits=limits, runtime="native")),
            Text(smollm2.tokenizer, "smollm2"), Settings(),
        ) as up,
    ):  # fmt: skip
        yield up, engine


@pytest.mark.slow
@pytest.mark.parametrize("together", [1, 4, 16])
def test_forty_prompts_of_the_embedded_model_have_the_engines_text(
    real: tuple[Served, Outrider], together: int
) -> None:
    served, engine = real
    texts = [turn for prompt in built_in_prompts() for turn in prompt.turns]
    texts = (texts * 40)[:40]
    for temperature in (0.0, 0.8):
        check(served.url, engine, texts, 16, together, temperature, None)
    check(served.url, engine, texts[:8], 16, together, 0.8, "plain")
