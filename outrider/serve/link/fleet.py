"""What the fleet view shows besides the counts: gaps between tokens, and what speculation saved today.

Told of every step by the engine, in its thread. Cost: about a microsecond a step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from outrider.core.protocols import StepCosts
from outrider.core.schedule import StepReport

GAPS = 512  # of the last steps


@dataclass(slots=True)
class Today:
    """Since midnight, or since the start."""

    day: date
    tokens: int = 0
    passes: int = 0  # counted for each sequence in them
    saved_s: float = 0.0  # against steps without candidates, as the cost model has them


@dataclass(slots=True)
class Fleet:
    """Changes state in `watch`."""

    costs: StepCosts | None  # what a step would take without candidates
    clock: Callable[[], float] = time.perf_counter
    today: Callable[[], date] = date.today
    _gaps: deque[float] = field(default_factory=lambda: deque(maxlen=GAPS))
    _ended: float | None = None  # when the last step did, if somebody waits for the next one
    _today: Today = field(init=False)

    def __post_init__(self) -> None:
        self._today = Today(self.today())

    def watch(self, report: StepReport) -> None:
        now = self.clock()
        if report.sequences:
            if self._ended is not None:
                self._gaps.append(now - self._ended)
            self._count(report)
        self._ended = now if report.running else None

    def as_dict(self) -> dict[str, Any]:
        gaps, sums = sorted(self._gaps), self._today
        return {
            "gap_p50_s": _share(gaps, 0.5),
            "gap_p99_s": _share(gaps, 0.99),
            "today": {"tokens": sums.tokens, "passes": sums.passes, "saved_s": round(sums.saved_s, 4)},
        }

    def _count(self, report: StepReport) -> None:
        if (day := self.today()) != self._today.day:
            self._today = Today(day)
        sums, timing = self._today, report.timing
        sums.tokens += report.emitted
        sums.passes += report.sequences
        if self.costs is not None:
            floor = float(self.costs.seconds(report.sequences, 0, timing.context)[0])
            sums.saved_s += floor * report.emitted / report.sequences - timing.total


def _share(ordered: list[float], share: float) -> float | None:
    return round(ordered[int(share * (len(ordered) - 1))], 6) if ordered else None
