"""What an engine has done since it started, counted step by step: numbers that dashboards add up.

Written by the engine's thread, read by any: each number is whole by itself.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from outrider.core.generation import Generation
from outrider.core.protocols import StepCosts
from outrider.core.schedule import StepReport

STEP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)  # seconds of a step, of a histogram


class Counts:
    """Changes state with every step and every end."""

    def __init__(self, costs: StepCosts | None = None) -> None:
        self._costs = costs  # what a step would take without candidates
        self._sums: Counter[str] = Counter()
        self._steps_by_length = [0] * (len(STEP_BOUNDS) + 1)
        self._tokens: dict[str, list[int]] = {}  # that became text, by drafter ("": the target) and depth in its tree
        self._offered: dict[str, list[int]] = {}  # steps that offered so deep a candidate, by method
        self._accepted: dict[str, list[int]] = {}  # and accepted one
        self._acceptance: dict[str, dict[str, list[int]]] = {}  # of each drafter, by depth: offered and accepted

    def add(self, **more: float) -> None:
        for name, value in more.items():
            self._sums[name] += value  # type: ignore[assignment]

    def step(self, report: StepReport) -> None:
        """Of the engine, over all its sequences."""
        timing = report.timing
        self.add(
            steps=1, draft_s=timing.draft, verify_s=timing.verify, rest_s=timing.rest, rows=timing.rows,
            prompt_rows=report.prompt_rows, drafted=report.candidates, accepted=report.accepted,
            new_tokens=report.emitted, saved_tokens=report.emitted - report.sequences, preempted=report.preempted,
        )  # fmt: skip
        if self._costs is not None:
            self.add(floor_s=float(self._costs.seconds(timing.batch, 0, timing.context)[0]))
        seconds = timing.draft + timing.verify + timing.rest
        self._steps_by_length[sum(seconds > bound for bound in STEP_BOUNDS)] += 1

    def ended(self, made: Generation) -> None:
        stats = made.stats
        self.add(cached_tokens=stats.cached_tokens, drafter_failures=stats.drafter_failures)
        for origin in made.origins[stats.resumed_tokens :]:
            row = self._tokens.setdefault(origin.drafter, [])
            row.extend([0] * (origin.depth + 1 - len(row)))
            row[origin.depth] += 1
        for sums, more in ((self._offered, stats.offered_at), (self._accepted, stats.accepted_at)):
            row = sums.setdefault(stats.method, [])
            row.extend([0] * (len(more) - len(row)))
            for depth, count in enumerate(more):
                row[depth] += count

        for name, pairs in stats.by_drafter.items():
            of_drafter = self._acceptance.setdefault(name, {})
            for depth, (offered, accepted) in enumerate(pairs, 1):
                known = of_drafter.setdefault(str(depth), [0, 0])
                known[0], known[1] = known[0] + offered, known[1] + accepted

    def told(self) -> dict[str, Any]:
        return {
            **self._sums,
            "step_seconds": list(self._steps_by_length),
            "tokens_by_drafter": {name: list(row) for name, row in self._tokens.items()},
            "offered_by_method": {name: list(row) for name, row in self._offered.items()},
            "accepted_by_method": {name: list(row) for name, row in self._accepted.items()},
            "acceptance": {
                name: {depth: list(pair) for depth, pair in rows.items()} for name, rows in self._acceptance.items()
            },
        }
