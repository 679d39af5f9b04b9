"""What Prometheus is told is what happened, under the names that dashboards ask for."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="the extra outrider[serve] is not installed")
from prometheus_client.parser import text_string_to_metric_families

from outrider.core.errors import FullQueue
from outrider.core.generation import FinishReason, Generation, Origin, Stats
from outrider.core.params import SamplingParams
from outrider.core.records import StepTiming
from outrider.core.schedule import StepReport
from outrider.serve import metrics
from outrider.serve.link.counts import Counts
from outrider.serve.link.seam import Delta, End, Event, Info, Request
from outrider.serve.metrics.observed import Observed

DASHBOARD = Path(metrics.__file__).parent / "grafana.json"
GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "monitoring.md"
TIMING = StepTiming(draft=0.002, verify=0.02, rest=0.001, rows=12, batch=2, context=100)


def counted() -> Counts:
    """Two steps of two sequences: ten candidates, three of them accepted; one text ends."""
    counts = Counts(SimpleNamespace(seconds=lambda batch, candidates, context: [0.015]))
    counts.add(requests=2, prompt_tokens=30)
    for number in (1, 2):
        counts.step(StepReport(number, TIMING, 2, 7, 10, 3, 5, 2, 1, 0))
    stats = Stats("mix", steps=3, drafted=20, accepted=6, offered_at=[3, 2], accepted_at=[2, 1], cached_tokens=16)
    origins = [Origin("", 0), Origin("suffix", 1), Origin("suffix", 2), Origin("table", 1)]
    counts.ended(Generation("", [1, 2, 3, 4], FinishReason.EOS, 0, 0, stats, origins))
    return counts


class Scripted:
    """A link whose streams bring what they are told to."""

    info = Info("small", "mix", ("mix",), 64, 256, 8, ())
    ready = True

    def __init__(self, events: Sequence[Event] = (), error: Exception | None = None) -> None:
        self.events, self.error, self.counts = events, error, counted()
        self.more: dict[str, Any] = {}

    async def start(self) -> None: ...

    async def submit(self, request: Request) -> Any:
        if self.error is not None:
            raise self.error

        async def stream() -> AsyncIterator[Event]:
            for event in self.events:
                await asyncio.sleep(0.002)
                yield event

        return stream()

    async def stats(self) -> Mapping[str, Any]:
        return {
            **self.counts.told(),
            "running": 2,
            "waiting": 1,
            "cache_blocks": 8,
            "cache_blocks_used": 2,
            **self.more,
        }


def figures(link: Scripted, asked: int = 1) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample that is told, by name and labels besides those that all have."""

    async def run() -> bytes:
        observed = Observed(link)  # type: ignore[arg-type]
        await observed.start()
        for _ in range(asked):
            try:
                stream = await observed.submit(Request("r", (1, 2, 3), SamplingParams()))
                assert [event async for event in stream] == list(link.events)
            except FullQueue:
                pass
        return await observed.render()

    found = {}
    for family in text_string_to_metric_families(asyncio.run(run()).decode()):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine")}
            assert sample.labels.get("model_name") == "small" and sample.labels.get("engine") == "0"
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


EVENTS = [
    Delta(0, (5,), "a"), Delta(0, (6, 7, 8), "b"), Delta(0, (9,), "c"),
    End(0, FinishReason.EOS, stats={"queue_ms": 30.0}, resumed="same text"),
]  # fmt: skip


def test_an_engines_counts_leave_as_they_are() -> None:
    told = figures(Scripted(EVENTS))
    plain = {name: value for (name, labels), value in told.items() if not labels}
    expected = {
        "vllm:num_requests_running": 2, "vllm:num_requests_waiting": 1, "vllm:prompt_tokens_total": 30,
        "vllm:generation_tokens_total": 10, "vllm:prefix_cache_hits_total": 16, "vllm:kv_cache_usage_perc": 0.25,
        "vllm:spec_decode_num_drafts_total": 3, "vllm:spec_decode_num_draft_tokens_total": 20,
        "vllm:spec_decode_num_accepted_tokens_total": 6, "outrider:steps_total": 2, "outrider:rows_total": 24,
        "outrider:prompt_rows_total": 14, "outrider:saved_tokens_total": 6, "outrider:draft_seconds_total": 0.004,
        "outrider:verify_seconds_total": 0.04, "outrider:host_seconds_total": 0.002, "outrider:engine_up": 1,
        "outrider:floor_seconds_total": 0.03, "outrider:step_seconds_count": 2, "outrider:step_seconds_sum": 0.046,
    }  # fmt: skip
    assert {name: plain[name] for name in expected} == pytest.approx(expected)
    assert told["outrider:step_seconds_bucket", (("le", "0.01"),)] == 0
    assert told["outrider:step_seconds_bucket", (("le", "0.025"),)] == 2
    suffix = (("depth", "2"), ("drafter", "suffix"))
    assert told["outrider:tokens_total", suffix] == 1
    assert told["outrider:tokens_total", (("depth", "0"), ("drafter", "target"))] == 1
    assert told["outrider:candidates_offered_total", (("depth", "2"), ("method", "mix"))] == 2
    assert told["outrider:candidates_accepted_total", (("depth", "2"), ("method", "mix"))] == 1
    assert told["vllm:spec_decode_num_accepted_tokens_per_pos_total", (("position", "0"),)] == 2


def test_what_a_drafter_learns_from_requests_is_told() -> None:
    scripted = Scripted(EVENTS)
    scripted.more = {"learnt_rows": 512, "learning_acceptance": 0.5, "learning_updates": {"taken": 2, "rolled_back": 1}}
    told = figures(scripted)
    assert told["outrider:learnt_rows_total", ()] == 512 and told["outrider:learning_acceptance", ()] == 0.5
    assert told["outrider:learning_updates_total", (("outcome", "taken"),)] == 2
    assert told["outrider:learning_updates_total", (("outcome", "rolled_back"),)] == 1


def test_what_a_resumed_text_had_before_is_not_counted_again() -> None:
    counts = Counts()
    stats = Stats("mix", resumed_tokens=2)
    counts.ended(Generation("", [1, 2, 3], FinishReason.EOS, 0, 0, stats, [Origin("", 0)] * 2 + [Origin("table", 1)]))
    assert counts.told()["tokens_by_drafter"] == {"table": [0, 1]}


def test_requests_are_timed_where_they_are_read() -> None:
    told = figures(Scripted(EVENTS), asked=2)
    plain = {name: value for (name, labels), value in told.items() if not labels}
    assert plain["vllm:time_to_first_token_seconds_count"] == 2 and plain["vllm:inter_token_latency_seconds_count"] == 4
    assert plain["vllm:e2e_request_latency_seconds_sum"] > plain["vllm:time_to_first_token_seconds_sum"] > 0.003
    assert plain["vllm:request_time_per_output_token_seconds_sum"] < plain["vllm:inter_token_latency_seconds_sum"]
    assert plain["vllm:request_prompt_tokens_sum"] == 6 and plain["vllm:request_generation_tokens_sum"] == 10
    assert plain["vllm:request_queue_time_seconds_sum"] == pytest.approx(0.06)
    assert told["vllm:request_success_total", (("finished_reason", "stop"),)] == 2
    assert told["outrider:resumed_texts_total", (("how", "same text"),)] == 2


def test_a_refused_request_is_counted_by_its_reason() -> None:
    told = figures(Scripted(error=FullQueue("full")), asked=3)
    assert told["outrider:refused_requests_total", (("reason", "FullQueue"),)] == 3


def test_the_dashboard_asks_for_nothing_that_is_not_told() -> None:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    names = {name for one in asked for name in re.findall(r"\b(?:vllm|outrider):\w+", one)}
    told = {name for name, _ in figures(Scripted(EVENTS))} | {
        name for name, _ in figures(Scripted(error=FullQueue("full")))
    }
    assert len(board["panels"]) >= 12 and len(names) >= 20
    assert sorted(names - told) == []
    assert board["title"] and all(panel["title"] and panel["gridPos"] for panel in board["panels"])
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    variables = {variable["name"] for variable in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(board["panels"])))
    assert used - {"__rate_interval", "__range"} <= variables


def test_the_dashboard_covers_what_nobody_else_tells() -> None:
    text = DASHBOARD.read_text(encoding="utf-8")
    for name in ("draft_seconds", "verify_seconds", "host_seconds", "floor_seconds", "rows", "saved_tokens",
                 "candidates_accepted", "tokens_total", "engine_restarts"):  # fmt: skip
        assert f"outrider:{name}" in text


def test_the_guide_names_all_that_is_told_and_nothing_else() -> None:
    named = set(re.findall(r"`((?:vllm|outrider):\w+)", GUIDE.read_text(encoding="utf-8")))
    found = {name for name, _ in figures(Scripted(EVENTS))} | {
        name for name, _ in figures(Scripted(error=FullQueue("full")))
    }
    told = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in found}
    told = {name for name in told if name + "_total" not in told}  # when a counter was made
    assert sorted(named - told) == [] and sorted(told - named) == []
