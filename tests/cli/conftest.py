"""A pretended engine: the command line is tested for what it asks and shows, not for what a model says."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from outrider.core.errors import InputError
from outrider.core.generation import FinishReason, Generation, Origin, Stats
from outrider.core.records import Traits

WORDS = ["The", " rain", " fälls", ".", " The", " rain", " falls", " again", ".", "\n", "🙂"]
TEXT = "".join(WORDS)
DEPTHS = [0, 0, 1, 0, 1, 2, 3, 0, 1, 0, 0]


class FakeTokenizer:
    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "".join(WORDS[t] for t in tokens)

    def convert_tokens_to_ids(self, names: list[str]) -> list[None]:
        return [None] * len(names)


class FakeHandle:
    def __init__(self, method: str, params: Any, pause: float) -> None:
        self.method, self.params, self.pause = method, params, pause
        self.taken, self.cancelled = 0, False

    def cancel(self) -> None:
        self.cancelled = True

    def pieces(self) -> Iterator[str]:
        while self.taken < self.length and not self.cancelled:
            time.sleep(self.pause)
            self.taken += 1
            yield WORDS[self.taken - 1]

    @property
    def length(self) -> int:
        return min(len(WORDS), self.params.max_new_tokens)

    def results(self) -> list[Generation]:
        if not self.cancelled:
            self.taken = self.length
        return self.partial()

    def result(self) -> Generation:
        return self.results()[0]

    def partial(self) -> list[Generation]:
        stats = Stats(self.method, 5, self.taken, max(1, self.taken // 2), 8, 5, [4, 2], [3, 1], verify_s=0.5)
        reason = FinishReason.CANCELLED if self.cancelled else FinishReason.EOS
        origins = [Origin("lookup" if d else "", d) for d in DEPTHS[: self.taken]]
        seed = 7 if self.params.seed is None else self.params.seed
        text = "".join(WORDS[: self.taken])
        return [
            Generation(text, list(range(self.taken)), reason, seed, sample, stats, origins)
            for sample in range(self.params.n)
        ]


class FakeEngine:
    """Remembers what it was asked. `pause` seconds a token, so that there is time to interrupt."""

    def __init__(self, pause: float = 0.0) -> None:
        self.tokenizer = FakeTokenizer()
        self.pause = pause
        self.loaded: dict[str, Any] = {}
        self.requests: list[tuple[Any, Any, dict[str, Any]]] = []
        self.fails: Exception | None = None
        self.cancel_at: int | None = None
        self.closed = False

    def load(self, model: str, method: str = "prompt-lookup", **options: Any) -> FakeEngine:
        self.loaded = {"model": model, "method": method, **options}
        return self

    def submit(self, prompt: Any, params: Any, *, method: str | None = None, **extra: Any) -> FakeHandle:
        if self.fails is not None:
            raise self.fails
        if isinstance(prompt, list) and len(prompt) > 7:
            raise InputError("the prompt has too many tokens; shorten it")
        self.requests.append((prompt, params, extra))
        handle = FakeHandle(method or self.loaded["method"], params, self.pause)
        if self.cancel_at is not None and len(self.requests) == self.cancel_at:
            handle.cancel()
        return handle

    target = SimpleNamespace(traits=Traits("native", "int8", weight_bytes=135_000_000))
    phases: ClassVar[dict[str, float]] = {"read": 0.25, "map": 0.001}

    def footprint(self) -> dict[str, int]:
        return {"weights": 135_000_000, "cache at most": 0}

    def prepare(self) -> None:
        self.prepared = True

    def recipe(self, method: str | None = None) -> Any:
        costs = SimpleNamespace(seconds=lambda batch, candidates, context: [0.2])
        return SimpleNamespace(costs=costs if method is None else None)

    def encode_chat(self, messages: Any, continue_final_message: bool = False) -> Any:
        return ("goes on", messages) if continue_final_message else messages

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()
    monkeypatch.setattr("outrider.load", fake.load, raising=False)
    return fake


@pytest.fixture
def text() -> str:
    return TEXT


@pytest.fixture
def run() -> Any:
    """Runs `outrider ARGS`; the result has stdout, stderr and exit_code."""
    from outrider.cli import app

    def call(*args: str, input: str | bytes | None = None) -> Any:
        return CliRunner().invoke(app, list(args), input=input, prog_name="outrider")

    return call
