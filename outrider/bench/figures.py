"""From timed runs to figures: pooled rates, paired speed-ups with bootstrap intervals, shares, and the JSON of it all.

Speed-up is of decode time only; `speedup_total` has the prefill in it. Intervals resample prompts (all turns and rounds
of a prompt together), 95%.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.bench.compare import Comparison, Difference, Unit
from outrider.bench.contenders import Run
from outrider.generation import Stats

RESAMPLES = 2000
LEVEL = 0.95

Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def result(comparison: Comparison) -> dict[str, Any]:
    """Everything a report shows, as plain values."""
    groups = list(dict.fromkeys(unit.group for unit in comparison.units))
    methods = []
    for contender in comparison.contenders:
        own = [d for d in comparison.differences if d.label == contender.label]
        methods.append({
            "method": contender.label,
            "recipe": contender.method,
            "options": dict(contender.options),
            "lossless": contender.lossless,
            **figures(comparison.units, contender.label, comparison.baseline),
            "first_differences": [_difference(comparison.units[d.unit], d) for d in own],
            "groups": {
                group: figures([u for u in comparison.units if u.group == group], contender.label, comparison.baseline)
                for group in groups
            },
        })  # fmt: skip
    return {
        "methods": methods,
        "baseline": comparison.baseline,
        "settings": comparison.settings,
        "machine": comparison.machine,
        "complete": comparison.complete,
        "skipped": comparison.skipped,
        "units": [_unit(unit) for unit in comparison.units],
    }


def figures(units: Sequence[Unit], label: str, baseline: str) -> dict[str, Any]:
    """One contender over these units; None where there is nothing to divide by."""
    mine, base = [u.runs[label] for u in units], [u.runs[baseline] for u in units]
    stats = Stats()
    for run in mine:
        stats.add(run.stats)
    steps = sum(run.steps for run in mine)
    accepted = ratio(stats.new_tokens, stats.steps)
    sums = paired(units, label, baseline)
    speedup = float(pooled_ratio(sums)) if sums.size else None
    same = [_same(a, b) for a, b in zip(mine, base, strict=True)]
    different = sum(s.count(False) for s in same if s is not None)
    return {
        "tokens_per_s": ratio(sum(run.decoded for run in mine), stats.decode_s),
        "speedup": speedup,
        "speedup_interval": interval(pooled_ratio, sums),
        "speedup_median": float(median_ratio(sums)) if sums.size else None,
        "speedup_median_interval": interval(median_ratio, sums),
        "speedup_total": ratio(_rate(mine), _rate(base)),
        "mean_accepted": accepted,
        "efficiency": ratio(speedup, accepted),
        "acceptance_by_depth": stats.acceptance_by_depth,
        "host_ms_per_step": ratio(1e3 * stats.rest_s, steps),
        "ttft_ms": statistics.median(1e3 * run.stats.first_token_s for run in mine) if mine else None,
        "draft_share": ratio(stats.draft_s, stats.decode_s),
        "verify_share": ratio(stats.verify_s, stats.decode_s),
        "rest_share": ratio(stats.rest_s, stats.decode_s),
        "identical": None if None in same or not same else different == 0,
        "different": None if None in same else different,
        "answers": sum(len(run.outputs) for run in mine),
        "new_tokens": stats.new_tokens,
        "steps": steps,
        "nodes_per_step": ratio(stats.drafted, stats.steps),
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "wasted": stats.wasted,
        "drafter_failures": stats.drafter_failures,
        "decode_s": stats.decode_s,
        "total_s": sum(run.total_s for run in mine),
    }


def paired(units: Sequence[Unit], label: str, baseline: str) -> NDArray[np.float64]:
    """[4, cases]: tokens and seconds of this contender, tokens and seconds of the baseline."""
    cases = {case: i for i, case in enumerate(dict.fromkeys(unit.case for unit in units))}
    sums = np.zeros((4, len(cases)))
    for unit in units:
        mine, base = unit.runs[label], unit.runs[baseline]
        sums[:, cases[unit.case]] += (mine.decoded, mine.stats.decode_s, base.decoded, base.stats.decode_s)
    return sums[:, (sums > 0).all(axis=0)]  # an answer of one token may have no decode time at all


def pooled_ratio(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """[4, ..., cases] -> [...]: all tokens over all seconds."""
    return case_ratios(sums.sum(axis=-1))


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


def _rate(runs: Iterable[Run]) -> float | None:
    runs = list(runs)
    return ratio(sum(run.stats.new_tokens for run in runs), sum(run.total_s for run in runs))


def _same(mine: Run, base: Run) -> list[bool] | None:
    """Answer by answer; None where equal seeds do not promise equal tokens."""
    return [a == b for a, b in zip(mine.outputs, base.outputs, strict=True)] if mine.comparable else None


def _difference(unit: Unit, d: Difference) -> dict[str, Any]:
    return {"id": unit.ids[d.member], "turn": unit.turn, "round": unit.round, "position": d.position, "gap": d.gap}


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
