"""An `EngineLink` around another one: times what its requests wait for, and tells Prometheus.

Times are taken where events are read, so they are what clients see but for the network. Cost: microseconds an event.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric

from outrider.core.errors import OutriderError
from outrider.serve.link.seam import Delta, EngineLink, Event, EventStream, Info, Request
from outrider.serve.metrics.exported import exported

FIRST_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
GAP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
WHOLE_BOUNDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
TOKEN_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
LABELS = ("model_name", "engine")


class Observed:
    """Changes state: histograms and counters of one server."""

    def __init__(self, link: EngineLink) -> None:
        self.link = link
        self._registry = CollectorRegistry()
        self._stats: Mapping[str, Any] = {}
        self._labels: tuple[str, str] | None = None

    async def start(self) -> None:
        await self.link.start()
        self.name(self.info.model)

    def name(self, model: str) -> None:
        """Once, before the first request: the label that all figures carry."""
        self._labels = (model, "0")
        self._first = self._histogram("vllm:time_to_first_token_seconds", "Until the first text.", FIRST_BOUNDS)
        self._gap = self._histogram("vllm:inter_token_latency_seconds", "Between two deliveries.", GAP_BOUNDS)
        self._token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Of a request, behind its first delivery.", GAP_BOUNDS
        )
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "Until a request's end.", WHOLE_BOUNDS)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Until a place was free.", FIRST_BOUNDS)
        self._prompt = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", TOKEN_BOUNDS)
        self._new = self._histogram("vllm:request_generation_tokens", "Tokens of an answer.", TOKEN_BOUNDS)
        self._ends = self._counter("vllm:request_success", "Texts that ended, and why.", "finished_reason")
        self._refused = self._counter("outrider:refused_requests", "Requests that were not taken, and why.", "reason")
        self._resumed = self._counter("outrider:resumed_texts", "Texts that went on in another engine, and how.", "how")
        self._registry.register(self)  # type: ignore[arg-type]

    def collect(self) -> Iterator[Metric]:
        """The engine's counts; asked by the registry."""
        assert self._labels is not None
        return exported(self._stats, self._labels[0])

    async def render(self) -> bytes:
        """All figures in Prometheus' text form."""
        self._stats = {**await self.link.stats(), "up": int(self.link.ready)}
        return generate_latest(self._registry)

    async def submit(self, request: Request) -> EventStream:
        begun = time.perf_counter()
        try:
            stream = await self.link.submit(request)
        except OutriderError as error:
            self._refused.labels(*self._label_values, type(error).__name__).inc()
            raise
        return _Timed(self, request, stream, begun)

    # what the other one does

    @property
    def info(self) -> Info:
        return self.link.info

    @property
    def ready(self) -> bool:
        return self.link.ready

    async def cancel(self, id: str) -> bool:
        return await self.link.cancel(id)

    async def stats(self) -> Mapping[str, Any]:
        return await self.link.stats()

    async def slots(self) -> list[Mapping[str, Any]]:
        return await self.link.slots()

    async def trace(self, id: str) -> Mapping[str, Any] | None:
        return await self.link.trace(id)

    async def close(self, seconds: float = 0.0) -> None:
        await self.link.close(seconds)

    @property
    def _label_values(self) -> tuple[str, str]:
        assert self._labels is not None, "start first"
        return self._labels

    def _histogram(self, name: str, help: str, bounds: tuple[float, ...]) -> Histogram:
        made = Histogram(name, help, LABELS, registry=self._registry, buckets=bounds)
        return made.labels(*self._label_values)

    def _counter(self, name: str, help: str, label: str) -> Counter:
        return Counter(name, help, [*LABELS, label], registry=self._registry)


class _Timed:
    """The events of one request; each is timed where it is read."""

    def __init__(self, observed: Observed, request: Request, stream: EventStream, begun: float) -> None:
        self._observed, self._stream, self._begun = observed, stream, begun
        self._last: dict[int, float] = {}  # time of each sample's last delivery
        self._first: dict[int, float] = {}
        self._tokens: dict[int, int] = {}
        observed._prompt.observe(len(request.prompt))

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        event = await self._stream.__anext__()
        now, observed = time.perf_counter(), self._observed
        if isinstance(event, Delta):
            before = self._last.get(event.sample)
            if before is None:
                observed._first.observe(now - self._begun)
                self._first[event.sample] = now
            else:
                observed._gap.observe(now - before)
            self._last[event.sample] = now
            self._tokens[event.sample] = self._tokens.get(event.sample, 0) + len(event.tokens)
        elif (sample := getattr(event, "sample", None)) is not None:
            self._end(event, sample, now)
        return event

    def _end(self, event: Any, sample: int, now: float) -> None:
        observed, tokens = self._observed, self._tokens.get(sample, 0)
        observed._whole.observe(now - self._begun)
        observed._new.observe(tokens)
        observed._queue.observe(float(event.stats.get("queue_ms", 0.0)) / 1e3)
        if tokens > 1:
            observed._token.observe((self._last[sample] - self._first[sample]) / (tokens - 1))
        observed._ends.labels(*observed._label_values, REASONS.get(str(event.finish), str(event.finish))).inc()
        if event.resumed:
            observed._resumed.labels(*observed._label_values, event.resumed).inc()

    async def aclose(self) -> None:
        await self._stream.aclose()


REASONS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length", "cancelled": "abort"}  # as vLLM says
