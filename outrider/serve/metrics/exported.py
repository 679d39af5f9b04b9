"""The names under which figures leave, and where in an engine's counts each one comes from.

`vllm:` where vLLM's dashboards mean the same thing; `outrider:` is what nobody else exports. Changes no state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from outrider.serve.link.counts import STEP_BOUNDS


@dataclass(frozen=True, slots=True)
class Single:
    """One number of the counts."""

    name: str
    key: str
    help: str


GAUGES = (
    Single("vllm:num_requests_running", "running", "Sequences that hold a place in the engine."),
    Single("vllm:num_requests_waiting", "waiting", "Sequences that wait for one."),
    Single("outrider:engine_up", "up", "1 while an engine takes requests; 0 while one is loaded."),
    Single("outrider:spare_engines", "spare", "Engine processes that stand by, loaded."),
    Single("outrider:learning_failed", "learning_failed", "1 once learning from requests has ended with an error."),
    Single("outrider:learning_bytes", "learning_bytes", "Bytes of verified text that are kept to learn from."),
    Single("outrider:learning_acceptance", "learning_acceptance", "Acceptance on unseen text after the last update."),
    Single("outrider:learning_acceptance_before", "learning_acceptance_before", "The same without that update."),
)
COUNTERS = (  # without the ending _total, which the format adds
    Single("vllm:prompt_tokens", "prompt_tokens", "Tokens of prompts."),
    Single("vllm:generation_tokens", "new_tokens", "Tokens that became text."),
    Single("vllm:prefix_cache_queries", "prompt_tokens", "Tokens of prompts that were looked for in the cache."),
    Single("vllm:prefix_cache_hits", "cached_tokens", "Tokens of prompts that were found there."),
    Single("vllm:num_preemptions", "preempted", "Sequences that were put back to wait."),
    Single("vllm:spec_decode_num_draft_tokens", "drafted", "Candidates that were verified."),
    Single("vllm:spec_decode_num_accepted_tokens", "accepted", "Candidates that became text."),
    Single("outrider:requests", "requests", "Requests that were taken."),
    Single("outrider:steps", "steps", "Steps of the engine."),
    Single("outrider:draft_seconds", "draft_s", "Seconds of steps spent drafting."),
    Single("outrider:verify_seconds", "verify_s", "Seconds of steps spent in the target's passes."),
    Single("outrider:host_seconds", "rest_s", "Seconds of steps spent on the host besides."),
    Single("outrider:floor_seconds", "floor_s", "Seconds that the same steps are expected to take without candidates."),
    Single("outrider:rows", "rows", "Rows that ran in passes with trees."),
    Single("outrider:prompt_rows", "prompt_rows", "Rows of prompts that ran."),
    Single("outrider:saved_tokens", "saved_tokens", "Tokens that became text without a step for them alone."),
    Single("outrider:drafter_failures", "drafter_failures", "Drafters that failed; their sequences went on."),
    Single("outrider:learnt_rows", "learnt_rows", "Verified tokens that the drafter was shown."),
    Single("outrider:engine_restarts", "restarts", "Engine processes that died and were started again."),
)
TOKENS = "outrider:tokens"
UPDATES, OUTCOMES = "outrider:learning_updates", ("taken", "refused", "rolled_back")
OFFERED, ACCEPTED = "outrider:candidates_offered", "outrider:candidates_accepted"
POSITIONS, DRAFTS = "vllm:spec_decode_num_accepted_tokens_per_pos", "vllm:spec_decode_num_drafts"
CACHE, STEP_SECONDS = "vllm:kv_cache_usage_perc", "outrider:step_seconds"


def exported(stats: Mapping[str, Any], model: str) -> Iterator[Metric]:
    """An engine's counts as metrics. What the engine does not tell counts as 0."""
    names, values = ["model_name", "engine"], [model, "0"]

    def family(kind: type[Metric], name: str, help: str, rows: list[tuple[list[str], float]], *more: str) -> Metric:
        made = kind(name, help, labels=[*names, *more])  # type: ignore[call-arg]
        for labels, value in rows:
            made.add_metric([*values, *labels], value)  # type: ignore[attr-defined]
        return made

    for single in GAUGES:
        yield family(GaugeMetricFamily, single.name, single.help, [([], float(stats.get(single.key, 0)))])
    for single in COUNTERS:
        yield family(CounterMetricFamily, single.name, single.help, [([], float(stats.get(single.key, 0)))])
    blocks = stats.get("cache_blocks") or 0
    used = stats.get("cache_blocks_used", 0) / blocks if blocks else 0.0
    yield family(GaugeMetricFamily, CACHE, "Share of the cache's blocks in use, from 0 to 1.", [([], used)])

    offered, accepted = stats.get("offered_by_method") or {}, stats.get("accepted_by_method") or {}
    yield family(
        CounterMetricFamily, DRAFTS, "Steps of a sequence that had candidates.",
        [([], float(sum(row[0] for row in offered.values() if row)))],
    )  # fmt: skip
    depths = max((len(row) for row in accepted.values()), default=0)
    by_place = [sum(row[place] for row in accepted.values() if place < len(row)) for place in range(depths)]
    yield family(
        CounterMetricFamily, POSITIONS, "Candidates accepted, by their place in a draft.",
        [([str(place)], float(count)) for place, count in enumerate(by_place)], "position",
    )  # fmt: skip
    for name, help, rows in (
        (OFFERED, "Steps of a sequence that offered a candidate so deep, having accepted the one above.", offered),
        (ACCEPTED, "Steps of a sequence that accepted a candidate so deep.", accepted),
    ):
        yield family(
            CounterMetricFamily, name, help,
            [([method, str(depth)], float(n)) for method, row in rows.items() for depth, n in enumerate(row, 1)],
            "method", "depth",
        )  # fmt: skip
    yield family(
        CounterMetricFamily, TOKENS, "Tokens that became text, by who brought them; depth 0 is the target.",
        [
            ([drafter or "target", str(depth)], float(count))
            for drafter, row in (stats.get("tokens_by_drafter") or {}).items()
            for depth, count in enumerate(row) if count
        ],
        "drafter", "depth",
    )  # fmt: skip
    yield family(
        CounterMetricFamily, UPDATES, "Updates of a drafter that learns from requests, by what became of them.",
        [([outcome], float((stats.get("learning_updates") or {}).get(outcome, 0))) for outcome in OUTCOMES], "outcome",
    )  # fmt: skip
    yield _histogram(stats, names, values)


def _histogram(stats: Mapping[str, Any], names: list[str], values: list[str]) -> Metric:
    counts = list(stats.get("step_seconds") or [0] * (len(STEP_BOUNDS) + 1))
    buckets, total = [], 0
    for bound, count in zip([*map(str, STEP_BOUNDS), "+Inf"], counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    made = HistogramMetricFamily(STEP_SECONDS, "Seconds of the engine's steps.", labels=names)
    made.add_metric(values, buckets, sum(float(stats.get(key, 0)) for key in ("draft_s", "verify_s", "rest_s")))
    return made
