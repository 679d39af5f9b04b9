"""Payoff: speculates as deep as has paid so far, and not at all while that does not pay.

From past steps it keeps what a step costs at each number of rows (medians, so that one slow step does not count) and
how often each depth was accepted, for each sequence and overall; it then gives out candidates where they are likeliest
to be accepted, until one more would lower tokens per second. A sequence for which nothing pays decodes plainly, with a
small probe at growing intervals. Lossless: everything is decided before drafting. Cost: tens of microseconds a step.

A tree counts as `breadth` candidates at each depth: a depth is reached with the product of the acceptances down to it,
and it costs that many rows. A chain has breadth 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.control.backoff import Backoff, typical
from outrider.core.proposals import Proposals, everything
from outrider.core.records import Budget, Load, StepRecord, StepTiming
from outrider.core.tree import TokenTree


@dataclass(slots=True)
class DepthAcceptance:
    """How often each depth was accepted among the steps that offered it, forgetting old steps."""

    keep: float
    offered: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def add(self, offered: int, accepted: int) -> None:
        """One step: `offered` depths proposed on the way, the first `accepted` of them kept."""
        for depth in range(min(offered, accepted + 1)):
            if depth == len(self.offered):
                self.offered.append(0.0)
                self.accepted.append(0.0)
            self.offered[depth] = self.offered[depth] * self.keep + 1
            self.accepted[depth] = self.accepted[depth] * self.keep + (depth < accepted)

    def chance(self, depth: int, prior: float, weight: float) -> float:
        """Acceptance at this 0-based depth, leaning on `prior` as if it had been seen `weight` times."""
        if depth >= len(self.offered):
            return prior
        return (self.accepted[depth] + weight * prior) / (self.offered[depth] + weight)


@dataclass(slots=True)
class RowCosts:
    """Seconds of a step by its number of rows."""

    window: int = 9
    seen: dict[int, deque[float]] = field(default_factory=dict)
    _sizes: list[int] = field(default_factory=list)
    _times: list[float] = field(default_factory=list)

    def add(self, rows: int, seconds: float) -> None:
        self.seen.setdefault(rows, deque(maxlen=self.window)).append(seconds)
        self._sizes = sorted(self.seen)
        self._times = [typical(self.seen[rows]) for rows in self._sizes]

    def curve(self, rows: np.ndarray) -> np.ndarray:
        """Linear between measured sizes, flat beyond: a larger size that was never tried is taken to cost no more than
        the largest that was, so it is tried if that would pay, and is measured then."""
        return np.interp(rows, self._sizes, self._times) if self._sizes else np.ones(len(rows))


@dataclass(slots=True)
class _Watch:
    """One sequence's record."""

    odds: DepthAcceptance
    patience: int  # plain steps before the next probe
    quiet: int = 0  # plain steps since anything was offered


@dataclass(slots=True)
class Payoff:
    nodes: int = 16  # candidates a sequence, at most
    breadth: int = 1  # candidates at each depth of the drafter's trees
    margin: float = 1.03  # how much faster than plain the estimate must be
    prior: float = 0.5  # acceptance assumed before anything was seen
    trust: float = 4.0  # weight of the overall acceptance against a sequence's own
    probe_depth: int = 3  # a wide step may slow down those that follow, so little is risked until something is accepted
    probe_after: int = 8
    probe_at_most: int = 128
    vary_every: int = 24  # speculative steps between tries of another width
    name: str = "payoff"
    _all: DepthAcceptance = field(default_factory=lambda: DepthAcceptance(keep=0.99))
    _costs: dict[int, RowCosts] = field(default_factory=dict)  # by batch size
    _watched: dict[int, _Watch] = field(default_factory=dict)
    _backoffs: dict[int, Backoff] = field(default_factory=dict)  # by batch size
    _asked: bool = False  # whether this step drafts
    _speculated: int = 1  # steps with candidates, one ahead
    _longest: int = 0  # longest accepted path so far: how far it is worth reaching

    def begin(self, slot: int) -> None:
        hopeless = bool(self._all.offered) and self._all.chance(0, self.prior, 1.0) < 0.1
        self._watched[slot] = _Watch(DepthAcceptance(keep=0.95), self.probe_after * (4 if hopeless else 1))
        for members, backoff in self._backoffs.items():
            backoff.wake(members)

    def end(self, slot: int) -> None:
        self._watched.pop(slot, None)

    def plan(self, slots: Sequence[int], limits: Sequence[Budget], load: Load) -> list[Budget]:
        costs = self._costs.setdefault(len(slots), RowCosts())
        self._asked = False
        if self._backoff(len(slots)).resting:
            return [Budget(0, 0)] * len(slots)
        reach = min(self.nodes // self.breadth, self.probe_depth + 2 * self._longest)
        room = [min(reach, limit.nodes // self.breadth, limit.depth) for limit in limits]
        depths = self._allot(slots, room, costs)
        for i, slot in enumerate(slots):
            watch = self._watched[slot]
            if depths[i] == 0 and watch.quiet >= watch.patience:
                depths[i] = min(self.probe_depth, room[i])
        self._asked = any(depths)
        return [Budget(self.breadth * d, d) & limit for d, limit in zip(depths, limits, strict=True)]

    def size(
        self, slots: Sequence[int], proposals: Proposals, budgets: Sequence[Budget], load: Load, seconds: float
    ) -> list[TokenTree]:
        return everything(proposals, [budget.nodes for budget in budgets])

    def _allot(self, slots: Sequence[int], room: Sequence[int], costs: RowCosts) -> list[int]:
        """Likeliest depths first over the whole batch, as many as give the most tokens per second."""
        candidates: list[tuple[float, int]] = []
        for i, slot in enumerate(slots):
            odds, survival, overall = self._watched[slot].odds, 1.0, self.prior
            for depth in range(room[i]):
                overall = self._all.chance(depth, overall, 2.0)  # a depth never reached is judged by the one above
                survival *= odds.chance(depth, overall, self.trust)
                candidates.append((survival, i))
        candidates.sort(key=lambda c: -c[0])  # stable: along a chain survival never rises, so depth order is kept
        batch = len(slots)
        gains = batch + np.concatenate([[0.0], np.cumsum([c[0] for c in candidates])])
        rates = gains / costs.curve(batch + self.breadth * np.arange(len(candidates) + 1))
        best = int(rates.argmax())
        depths = [0] * batch
        if rates[best] > self.margin * rates[0]:
            for _, i in candidates[: self._vary(best, len(candidates))]:
                depths[i] += 1
        return depths

    def _vary(self, best: int, available: int) -> int:
        """Now and then half as much or half as much again, so that one unlucky measurement cannot stand for ever."""
        if self._speculated % self.vary_every:
            return best
        return max(best // 2, 1) if self._speculated % (2 * self.vary_every) else min(best + (best + 1) // 2, available)

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord], timing: StepTiming) -> None:
        rows = sum(len(record.tree) for record in records)
        wide = rows > len(slots)
        backoff = self._backoff(len(slots))
        backoff.add(wide, self._asked, len(slots), sum(1 + len(r.verdict.path) for r in records), timing.total)
        if wide or backoff.plain:
            self._costs.setdefault(len(slots), RowCosts()).add(rows, timing.total)
        self._speculated += wide
        for slot, record in zip(slots, records, strict=True):
            watch, accepted = self._watched[slot], len(record.verdict.path)
            if record.tree.candidates == 0:
                watch.quiet += 1
                continue
            for odds in (watch.odds, self._all):
                odds.add(record.tree.depth, accepted)
            self._longest = max(self._longest, accepted)
            probing = watch.quiet >= watch.patience
            watch.quiet = 0
            if accepted:
                watch.patience = self.probe_after
            elif probing:
                watch.patience = min(2 * watch.patience, self.probe_at_most)

    def _backoff(self, batch: int) -> Backoff:
        """Rests only where the odds are far from the truth, since they notice sooner that copying begins or ends."""
        return self._backoffs.setdefault(batch, Backoff(trial=48, rest=16, longest=self.probe_at_most, margin=0.85))
