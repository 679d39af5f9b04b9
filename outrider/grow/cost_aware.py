"""Cost-aware tree: the shape of most expected tokens per second, from learnt acceptance and measured step costs.

The shape is chosen before anything is drawn: for every depth limit, nodes are added where they are likeliest to be
accepted (by depth and rank, learnt from past steps), and the size and depth with the best ratio of expected tokens to
seconds win. Where plain decoding is faster there is no tree, but for a probe now and then. The target's cost comes from
a measured curve, the source's from a curve or from timing its calls. No paper; like Sequoia, but for tokens per second.
Lossless: siblings are drawn without replacement. Cost: one source call a level; choosing takes about a millisecond,
once in `refresh` steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from outrider.core.protocols import Noise, Source
from outrider.core.records import Budget, StepRecord
from outrider.core.tree import QRow, TokenTree
from outrider.grow.acceptance import RankAcceptance
from outrider.grow.drawing import without_replacement
from outrider.grow.products import Path, likeliest_paths
from outrider.grow.shape import Shape, fill

TargetCost = Callable[[int, int, int], float]  # seconds of a step by rows in all, sequences, and longest context
SourceCost = Callable[[int], float]  # seconds of one source call by rows in all
_CONTEXT_STEP = 256  # contexts this close share a choice


@dataclass(slots=True)
class CostAware:
    target_cost: TargetCost
    source_cost: SourceCost | None = None  # None: its calls are timed
    length: Callable[[int], int] | None = None  # a slot's context, as `Target.length`; None: short
    acceptance: RankAcceptance = field(default_factory=lambda: RankAcceptance(keep=0.995))
    depth: int = 8
    refresh: int = 16
    probe_after: int = 16  # steps without a tree before one is tried again
    _timer: CallTimer = field(default_factory=lambda: CallTimer())
    _chosen: dict[tuple[Budget, int, int], Shape] = field(default_factory=dict)
    _steps: int = 0
    _quiet: int = 0

    def grow(
        self, source: Source, slots: Sequence[int], pending: Sequence[int], budgets: Sequence[Budget],
        noise: Sequence[Noise | None],
    ) -> list[TokenTree]:  # fmt: skip
        shape = self._shape(slots, budgets)
        counted = source if self.source_cost else timed(source, self._timer)
        return fill([shape] * len(slots), without_replacement, counted, slots, pending, budgets, noise)

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        for record in records:
            self.acceptance.observe(record)

    def _shape(self, slots: Sequence[int], budgets: Sequence[Budget]) -> Shape:
        if self._steps % self.refresh == 0:
            self._chosen.clear()
        self._steps += 1
        limit = Budget(max(b.nodes for b in budgets), min(self.depth, max(b.depth for b in budgets)))
        context = max(map(self.length, slots)) // _CONTEXT_STEP * _CONTEXT_STEP if self.length else 0
        key = (limit, len(slots), context)
        if key not in self._chosen:
            self._chosen[key] = self._choose(*key)
        shape = self._chosen[key]
        self._quiet = 0 if shape else self._quiet + 1
        if self._quiet >= self.probe_after:
            self._quiet = 0
            return self._choose(*key, least=1)
        return shape

    def _choose(self, limit: Budget, batch: int, context: int, least: int = 0) -> Shape:
        def step(rows: int) -> float:
            return self.target_cost(rows * batch, batch, context)

        call = self.source_cost or self._timer.seconds
        table = self.acceptance.by_depth_and_rank()
        return fastest_shape(table, limit, step, lambda rows: call(rows * batch), least)[0]


def fastest_shape(
    acceptance: NDArray[np.float64], limit: Budget, step: SourceCost, call: SourceCost, least: int = 0
) -> tuple[Shape, float]:
    """The shape with at least `least` candidates of most expected tokens per second, and those.

    `acceptance` [depths, ranks] falls with the rank (it is made to) and never exceeds 1, so for a given size and depth
    limit the likeliest nodes form a tree, and no other of that size yields more. `step` is the seconds of the target by
    rows a sequence, `call` those of one source call by nodes expanded.
    """
    table = np.minimum.accumulate(np.clip(acceptance, 0.0, 1.0), axis=1).tolist()
    steps = [step(rows) for rows in range(1, limit.nodes + 2)]
    calls = [call(rows) for rows in range(1, limit.nodes + 2)]
    best, rate = Shape(), 1.0 / steps[0] if least == 0 else 0.0
    for depth in range(1, limit.depth + 1):
        nodes = likeliest_paths(table, limit.nodes, depth)
        if not nodes or max(level for _, level, _, _ in nodes) < depth:
            break  # nodes this deep are never among the likeliest
        expanded, drafting, tokens = [0] * depth, 0.0, 1.0  # nodes expanded at each level
        top = 0
        for size, (_, level, rank, value) in enumerate(nodes, 1):
            tokens += value
            if rank == 0:
                count = expanded[level - 1] = expanded[level - 1] + 1
                drafting += calls[count - 1] - (calls[count - 2] if count > 1 else 0.0)
            if size >= least and tokens / (steps[size] + drafting) > rate:
                top, rate = size, tokens / (steps[size] + drafting)
        if top:
            best = _in_levels(nodes[:top])
    return best, rate


def _in_levels(nodes: Sequence[Path]) -> Shape:
    place = {0: 0}
    parents: list[int] = []
    order = sorted(range(len(nodes)), key=lambda i: (nodes[i][1], nodes[i][2]))
    for level in range(1, max((node[1] for node in nodes), default=0) + 1):
        mine = [i for i in order if nodes[i][1] == level]
        for i in sorted(mine, key=lambda i: (place[nodes[i][0]], nodes[i][2])):
            parents.append(place[nodes[i][0]])
            place[i + 1] = len(parents)
    return Shape(tuple(parents))


@dataclass(slots=True)
class CallTimer:
    """Seconds of a source call, a + b rows fitted to past calls, old ones forgotten."""

    keep: float = 0.98
    _sums: NDArray[np.float64] = field(default_factory=lambda: np.zeros(5))  # of 1, rows, rows^2, s, s rows

    def add(self, rows: int, seconds: float) -> None:
        self._sums = self._sums * self.keep + np.array([1.0, rows, rows * rows, seconds, seconds * rows])

    def seconds(self, rows: int) -> float:
        """0 before the first call: drafting is tried."""
        n, r, rr, s, sr = self._sums.tolist()
        if n == 0.0:
            return 0.0
        spread = rr - r * r / n
        slope = max((sr - s * r / n) / spread, 0.0) if spread > 1e-9 * rr else 0.0
        return max(s / n + slope * (rows - r / n), 0.0)


def timed(source: Source, timer: CallTimer) -> Source:
    """The source, whose calls the timer sees."""
    return cast(Source, _Timed(source, timer))


@dataclass(slots=True)
class _Timed:
    """A source whose calls are timed."""

    source: Source
    timer: CallTimer

    @property
    def name(self) -> str:
        return self.source.name

    def start(self, slots: Sequence[int]) -> list[QRow]:
        begun = time.perf_counter()
        found = self.source.start(slots)
        self.timer.add(len(slots), time.perf_counter() - begun)
        return found

    def extend(self, slots: Sequence[int], trees: Sequence[TokenTree], done: Sequence[int]) -> list[list[QRow]]:
        begun = time.perf_counter()
        found = self.source.extend(slots, trees, done)
        self.timer.add(sum(map(len, found)), time.perf_counter() - begun)
        return found
