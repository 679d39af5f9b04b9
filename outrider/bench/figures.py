"""From timed runs to figures: pooled rates, paired speed-ups with bootstrap intervals, shares, and the JSON of it all.

Speed-up is of decode time only, against plain decoding by the same runtime; `speedup_total` has the prefill in it. Of
several rounds the median one counts, answer by answer. Intervals resample prompts (all turns of one together), 95%.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.bench.compare import Comparison
from outrider.bench.contenders import OURS, Contender, Run
from outrider.bench.floor import floor_seconds
from outrider.bench.journal import Unit
from outrider.bench.ties import Difference
from outrider.core.generation import Stats

RESAMPLES = 2000
LEVEL = 0.95

Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def result(comparison: Comparison) -> dict[str, Any]:
    """Everything a report shows, as plain values."""
    units = comparison.units
    groups = list(dict.fromkeys(unit.group for unit in units))
    by_group = {group: [unit for unit in units if unit.group == group] for group in groups}
    best = best_peer(comparison.contenders, units)
    best_in = {group: best_peer(comparison.contenders, members) for group, members in by_group.items()}
    methods = []
    for contender in comparison.contenders:
        label, rate = contender.label, comparison.bandwidth
        departures = [d for d in comparison.differences if d.label == label]
        methods.append({
            "method": label,
            "recipe": contender.method,
            "options": dict(contender.options),
            "lossless": contender.lossless,
            "runtime": contender.runtime,
            "baseline": contender.baseline,
            "facts": dict(contender.facts),
            **figures(units, label, contender.baseline, contender.facts, rate, best, comparison.baseline),
            "near_ties": sum(d.near_tie is True for d in departures),
            "beyond_ties": sum(d.near_tie is False for d in departures),
            "first_differences": [_difference(units[d.unit], d) for d in departures],
            "groups": {
                group: figures(
                    by_group[group], label, contender.baseline, contender.facts, rate, best_in[group],
                    comparison.baseline,
                )
                for group in groups
            },
        })  # fmt: skip
    return {
        "methods": methods,
        "baseline": comparison.baseline,
        "best_peer": best,
        "settings": comparison.settings,
        "machine": comparison.machine,
        "bandwidth": comparison.bandwidth,
        "complete": comparison.complete,
        "skipped": comparison.skipped,
        "failures": [asdict(failure) for failure in comparison.failures],
        "units": [_unit(unit) for unit in units],
    }


def figures(
    units: Sequence[Unit], label: str, baseline: str, facts: Mapping[str, Any] | None = None,
    bandwidth: float | None = None, best: str | None = None, reference: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One contender over the units it answered; None where there is nothing to divide by.

    `baseline` is what its speed is held against, `reference` (else the baseline) what its text is.
    """
    units = [unit for unit in units if label in unit.runs]
    mine = [u.runs[label] for u in units]
    both = [u for u in units if baseline in u.runs]
    stats = Stats()
    for run in mine:
        stats.add(run.stats)
    steps = sum(run.steps for run in mine)
    counted = bool(mine) and all(run.steps for run in mine)
    split = bool(mine) and all(run.split for run in mine)
    accepted = ratio(stats.new_tokens, stats.steps) if counted else None
    sums = paired(both, label, baseline)
    alone = paired(units, label, label)
    over = paired([u for u in units if best in u.runs], label, best) if best else np.zeros((4, 0))
    speedup = float(pooled_ratio(sums)) if sums.size else None
    peaks = [run.peak_bytes for run in mine if run.peak_bytes is not None]
    floors = [_floor(unit, unit.runs[label], facts or {}, bandwidth) for unit in units] if counted else []
    same = [_same(u.runs[label], u.runs[reference or baseline]) for u in (units if reference else both)]
    different = sum(s.count(False) for s in same if s is not None)
    return {
        "tokens_per_s": float(pooled_rate(alone)) if alone.size else None,
        "tokens_per_s_interval": interval(pooled_rate, alone),
        "speedup": speedup,
        "speedup_interval": interval(pooled_ratio, sums),
        "speedup_median": float(median_ratio(sums)) if sums.size else None,
        "speedup_median_interval": interval(median_ratio, sums),
        "speedup_total": ratio(_rate(u.runs[label] for u in both), _rate(u.runs[baseline] for u in both)),
        "speedup_over_best_peer": float(pooled_ratio(over)) if over.size else None,
        "speedup_over_best_peer_interval": interval(pooled_ratio, over),
        "best_peer": best,
        "mean_accepted": accepted,
        "efficiency": ratio(speedup, accepted),
        "acceptance_by_depth": stats.acceptance_by_depth,
        "host_ms_per_step": ratio(1e3 * stats.rest_s, steps) if split else None,
        "ttft_ms": statistics.median(1e3 * run.stats.first_token_s for run in mine) if mine else None,
        "draft_share": ratio(stats.draft_s, stats.decode_s) if split else None,
        "verify_share": ratio(stats.verify_s, stats.decode_s) if split else None,
        "rest_share": ratio(stats.rest_s, stats.decode_s) if split else None,
        "peak_memory_mb": max(peaks) / 2**20 if peaks else None,
        "floor_share": None if None in floors else ratio(sum(f for f in floors if f), stats.decode_s),
        "identical": None if None in same or not same else different == 0,
        "different": None if None in same else different,
        "answers": sum(len(run.outputs) for run in mine),
        "new_tokens": stats.new_tokens,
        "prompt_tokens": statistics.mean(len(p) for u in units for p in u.prompts) if units else None,
        "steps": steps,
        "nodes_per_step": ratio(stats.drafted, stats.steps) if split else None,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "wasted": stats.wasted,
        "drafter_failures": stats.drafter_failures,
        "decode_s": stats.decode_s,
        "total_s": sum(run.total_s for run in mine),
    }


def best_peer(contenders: Sequence[Contender], units: Sequence[Unit]) -> str | None:
    """The fastest system of another runtime."""
    speeds = {}
    for contender in contenders:
        answered = [unit for unit in units if contender.label in unit.runs]
        if contender.runtime != OURS and (sums := paired(answered, contender.label, contender.label)).size:
            speeds[contender.label] = float(pooled_rate(sums))
    return max(speeds, key=lambda label: speeds[label]) if speeds else None


def paired(units: Sequence[Unit], label: str, baseline: str) -> NDArray[np.float64]:
    """[4, cases]: tokens and seconds of this contender, tokens and seconds of the baseline, of the median round."""
    cases = {case: i for i, case in enumerate(dict.fromkeys(unit.case for unit in units))}
    sums = np.zeros((4, len(cases)))
    rounds: dict[tuple[int, int], list[Unit]] = {}
    for unit in units:
        rounds.setdefault((unit.case, unit.turn), []).append(unit)
    for (case, _), repeats in rounds.items():
        mine, base = ([unit.runs[name] for unit in repeats] for name in (label, baseline))
        sums[:, cases[case]] += (*median_round(mine), *median_round(base))
    return sums[:, (sums > 0).all(axis=0)]  # an answer of one token may have no decode time at all


def median_round(runs: Sequence[Run]) -> tuple[float, float]:
    """Tokens and seconds of the run in the middle by seconds a token; the mean of the two in the middle."""
    by_pace = sorted(((r.decoded, r.stats.decode_s) for r in runs), key=lambda r: r[1] / r[0] if r[0] else 0.0)
    middle = by_pace[(len(runs) - 1) // 2 : len(runs) // 2 + 1]
    return sum(r[0] for r in middle) / len(middle), sum(r[1] for r in middle) / len(middle)


def pooled_ratio(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """[4, ..., cases] -> [...]: all tokens over all seconds."""
    return case_ratios(sums.sum(axis=-1))


def pooled_rate(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """[4, ..., cases] -> [...]: tokens a second of the contender itself."""
    total = sums.sum(axis=-1)
    return np.asarray(total[0] / total[1])


def median_ratio(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """[4, ..., cases] -> [...]: of the cases' own speed-ups."""
    return np.asarray(np.median(case_ratios(sums), axis=-1))


def case_ratios(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    tokens, seconds, base_tokens, base_seconds = sums
    return np.asarray((tokens / seconds) / (base_tokens / base_seconds))


def interval(statistic: Statistic, sums: NDArray[np.float64]) -> list[float] | None:
    """Bootstrap over cases; None with fewer than two, which say nothing about a third."""
    count = sums.shape[1]
    if count < 2:
        return None
    picks = np.random.default_rng(0).integers(0, count, (RESAMPLES, count))
    tail = 100 * (1 - LEVEL) / 2
    return [float(q) for q in np.percentile(statistic(sums[:, picks]), [tail, 100 - tail])]


def ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def _floor(unit: Unit, run: Run, facts: Mapping[str, Any], bandwidth: float | None) -> float | None:
    """The cache is half as long on average as at the end; a runtime whose prefill brings a token has a step less."""
    context = sum(len(p) + len(out) / 2 for p, out in zip(unit.prompts, run.outputs, strict=True))
    first = run.decoded < run.stats.new_tokens
    return floor_seconds(facts, bandwidth, run.steps - first, context)


def _rate(runs: Iterable[Run]) -> float | None:
    runs = list(runs)
    return ratio(sum(run.stats.new_tokens for run in runs), sum(run.total_s for run in runs))


def _same(mine: Run, base: Run) -> list[bool] | None:
    """Answer by answer; None where equal seeds do not promise equal tokens."""
    return [a == b for a, b in zip(mine.outputs, base.outputs, strict=True)] if mine.comparable else None


def _difference(unit: Unit, d: Difference) -> dict[str, Any]:
    return {
        "id": unit.ids[d.member], "turn": unit.turn, "round": unit.round, "position": d.position, "gap": d.gap,
        "near_tie": d.near_tie,
    }  # fmt: skip


def _unit(unit: Unit) -> dict[str, Any]:
    return {
        "ids": list(unit.ids),
        "group": unit.group,
        "turn": unit.turn,
        "round": unit.round,
        "prompt_tokens": [len(ids) for ids in unit.prompts],
        "runs": [
            {"method": label, "new_tokens": run.stats.new_tokens, "decoded": run.decoded, "steps": run.steps,
             "decode_s": run.stats.decode_s, "draft_s": run.stats.draft_s, "verify_s": run.stats.verify_s,
             "total_s": run.total_s, "ttft_ms": 1e3 * run.stats.first_token_s}
            for label, run in unit.runs.items()
        ],
    }  # fmt: skip
