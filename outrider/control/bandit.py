"""Bandit: of several sizes of trees the one that has been fastest, and none before only few sequences run.

TLT's engine for rollouts (arXiv 2511.16665): the long tail of a rollout leaves a GPU idle, so speculation begins when
the batch has been small for some steps and stays on until the rollout ends. The smaller the batch the larger the trees;
among trees of one size the depth with the best median reward is taken, tokens per second of the whole batch with the
mean accepted length of that depth, and another one now and then. Lossless: decided before drafting, by a generator that
nothing else draws from. Cost: microseconds a step.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from outrider.core.errors import InputError
from outrider.core.proposals import Proposals, everything
from outrider.core.records import Budget, Load, StepRecord, StepTiming
from outrider.core.tree import TokenTree

PARTS, DEPTHS = (1.0, 2 / 3, 1 / 3, 1 / 6), (1.0, 0.5)  # of the budget's nodes and depth, that are tried
GROUPS = (*range(1, 32), *range(32, 121, 8), *range(128, 257, 32))  # batches that share a record: up to the next


def arms_of(budget: Budget) -> tuple[Budget, ...]:
    """Sizes and depths of trees within a budget."""
    nodes = dict.fromkeys(max(round(part * budget.nodes), 1) for part in PARTS)
    depths = dict.fromkeys(max(round(part * budget.depth), 1) for part in DEPTHS)
    return tuple(Budget(n, min(depth, n)) for n in nodes for depth in dict.fromkeys(min(d, n) for d in depths))


@dataclass(slots=True)
class Bandit:
    arms: Sequence[Budget]
    bounds: Sequence[int] = (1, 2, 5, 21)  # batches from which on trees are smaller, one for each size of tree
    explore: float = 0.1  # share of the steps that try any arm
    window: int = 300  # steps of an arm that count
    few: int = 32  # sequences at which speculation begins
    patience: int = 10  # steps in a row with so few
    seed: int = 0
    name: str = "bandit"
    _lengths: dict[Budget, deque[int]] = field(default_factory=dict)  # accepted lengths of each arm, any batch
    _rewards: dict[tuple[int, Budget], deque[float]] = field(default_factory=dict)  # by group of batches
    _random: random.Random = field(init=False)
    _running: set[int] = field(default_factory=set)
    _small: int = 0  # steps in a row with few sequences
    _on: bool = False
    _arm: Budget | None = None  # of this step

    def __post_init__(self) -> None:
        sizes = len({arm.nodes for arm in self.arms})
        if len(self.bounds) < sizes:
            raise InputError(f"{sizes} sizes of trees need as many bounds of batches, not {len(self.bounds)}")
        self._random = random.Random(self.seed)

    def begin(self, slot: int) -> None:
        self._running.add(slot)

    def end(self, slot: int) -> None:
        self._running.discard(slot)
        if not self._running:  # the rollout is over
            self._on, self._small = False, 0

    def plan(self, slots: Sequence[int], limits: Sequence[Budget], load: Load) -> list[Budget]:
        batch = max(load.batch, len(slots))
        self._small = self._small + 1 if batch <= self.few else 0
        self._on = self._on or self._small >= self.patience
        self._arm = self.select(batch) if self._on else None
        wanted = self._arm or Budget(0, 0)
        return [wanted & limit for limit in limits]

    def select(self, batch: int) -> Budget:
        """Changes state: the arm for a batch of this size."""
        arms = self.of_bucket(batch)
        if len(arms) == 1:
            return arms[0]
        if untried := [arm for arm in arms if not self._rewards.get((_group(batch), arm))]:
            return untried[0]
        if self._random.random() < self.explore:
            return self._random.choice(arms)
        return max(arms, key=lambda arm: median(self._rewards[_group(batch), arm]))

    def of_bucket(self, batch: int) -> list[Budget]:
        """Those of the trees that so many sequences are given: the largest for the fewest."""
        sizes = sorted({arm.nodes for arm in self.arms}, reverse=True)
        place = min(max(bisect_right(self.bounds, batch) - 1, 0), len(sizes) - 1)
        return [arm for arm in self.arms if arm.nodes == sizes[place]]

    def size(
        self, slots: Sequence[int], proposals: Proposals, budgets: Sequence[Budget], load: Load, seconds: float
    ) -> list[TokenTree]:
        return everything(proposals, [budget.nodes for budget in budgets])

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord], timing: StepTiming) -> None:
        if self._arm is not None and records and timing.total > 0:
            self.reward(self._arm, timing.batch, [record.gain for record in records], timing.total)

    def reward(self, arm: Budget, batch: int, lengths: Sequence[int], seconds: float) -> None:
        """Changes state: a step of so many sequences accepted these lengths in so many seconds."""
        known = self._lengths.setdefault(arm, deque(maxlen=self.window))
        known.extend(lengths)
        # the mean: medians of small whole numbers tie arms that differ; a slow step is the reward's median to mend
        mean = sum(known) / len(known)
        record = self._rewards.setdefault((_group(batch), arm), deque(maxlen=self.window))
        record.append(mean * batch / seconds)


def _group(batch: int) -> int:
    return GROUPS[max(bisect_right(GROUPS, batch) - 1, 0)]
