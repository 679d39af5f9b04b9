"""Goodput: draft and verify as much as gives the most accepted tokens per second, and nothing while nothing pays.

After SmartSpec's goodput (arXiv 2406.14066), over the whole batch and down to single candidates. Before drafting it
plans what the drafters of a mixture may be asked: those that cost nothing always, those that read the target's rows in
stretches in which that pays, those that run a network as deep as has paid where the others know as much as they do now.
After drafting it keeps of the point masses those that are worth their rows: each is weighed by calibrated acceptance,
each row by the cost model. Where speculating has been slower than plain decoding all the same, it rests. Sampled draws
are never cut. Lossless: nothing here changes what is accepted. Cost: tens of microseconds a step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.compiled import compiled
from outrider.control.acceptance import Acceptance, ranked
from outrider.control.pace import Pace
from outrider.control.share import Shares
from outrider.control.stretch import Stretch
from outrider.control.worth import Worth, rates
from outrider.errors import InputError
from outrider.proposals import NO_CANDIDATES, Candidates, Proposals
from outrider.protocols import Budget, Load, Role, StepRecord, StepTiming
from outrider.tree import TokenTree

NOTHING = Budget(0, 0)
UNSAID = 1e-6  # the claim of a candidate that nobody makes: it takes no chance from its siblings


class Costs(Protocol):
    def seconds(self, batch: int, most: int) -> NDArray[np.float64]:
        """[most + 1]: steps of `batch` sequences with 0, 1, ... candidates in all, without drafting."""
        ...


@dataclass(slots=True)
class Offer:
    """The candidates of one sequence in this step, weighed."""

    candidates: Candidates
    weights: NDArray[np.float64]  # of each node
    order: NDArray[np.int64]  # likeliest first, parents before children

    @property
    def expected(self) -> float:
        """Candidates that will be accepted if all are verified; node 0 is text already."""
        return float(self.weights.sum()) - 1.0


@dataclass(slots=True)
class _Asked:
    """What was asked of a part that runs a network in this step, by sequence."""

    before: list[Offer]  # what the parts before it have found, weighed without its word
    depths: list[int]


@dataclass(slots=True)
class Goodput:
    limit: Budget
    roles: Sequence[Role]  # of the mixture's parts, by number; those that draw come last
    costs: Costs | None = None  # None: the whole budget is used
    names: tuple[str, ...] = ()  # of the parts
    deepest: int = 6  # levels that a network is asked for
    even: bool = False  # a plain step costs the same behind a wide one as behind another
    combine: Literal["merge", "route"] = "merge"  # route: the candidates of the surest part only
    margin: float = 1.02  # how much faster than plain the estimate must be
    name: str = "goodput"
    acceptance: Acceptance = field(init=False)
    drawn: Shares = field(init=False)
    worths: dict[int, Worth] = field(init=False)  # of parts that run a network
    stretches: dict[int, Stretch] = field(init=False)  # of parts that read rows
    _looking: dict[int, deque[float]] = field(default_factory=dict)  # recent seconds a row, by part
    _asked: dict[int, _Asked] = field(default_factory=dict)  # in this step, by part
    _offers: dict[int, Offer] = field(default_factory=dict)  # of this step before the cut, by slot
    _used: float = 8.0  # candidates that were verified in recent steps: the most, soon forgotten
    _rows: int = 1  # of the last step
    _resting: bool = False  # nothing is drafted in this step
    _paces: dict[int, Pace] = field(default_factory=dict)  # by batch size

    def __post_init__(self) -> None:
        self.acceptance = Acceptance(sum(role is not Role.DRAWS for role in self.roles))
        self.drawn = Shares(sum(role is Role.DRAWS for role in self.roles))
        self.worths = {i: Worth(self.deepest) for i, role in enumerate(self.roles) if role is Role.RUNS}
        self.stretches = {i: Stretch() for i, role in enumerate(self.roles) if role is Role.LOOKS}

    def begin(self, slot: int) -> None:
        """Changes state: a new text may be another matter, so a rest ends."""
        for pace in self._paces.values():
            pace.wake()

    def end(self, slot: int) -> None:
        self._offers.pop(slot, None)

    def plan(self, slots: Sequence[int], limits: Sequence[Budget], load: Load) -> list[Budget]:
        """Room for twice the candidates that have been in use: a larger tree takes longer to draft and to weigh."""
        if self.costs is None:
            return [self.limit & limit for limit in limits]
        self._resting = self._pace(load.batch).resting > 0
        if self._resting:
            return [NOTHING] * len(slots)
        enough = Budget(min(int(2 * self._used) + 2, self.limit.nodes), self.limit.depth)
        return [enough & limit for limit in limits]

    def awake(self, part: int) -> bool:
        if self.costs is None or part not in self.stretches:
            return True
        return self.stretches[part].awake and not self._resting

    def shares(self) -> Sequence[float]:
        return self.drawn.now()

    def ask(
        self, part: int, slots: Sequence[int], found: Sequence[Candidates], budgets: Sequence[Budget]
    ) -> Sequence[Budget]:
        """A network is asked as deep as has paid where the others expect what they expect now."""
        if not self.awake(part):
            return [NOTHING] * len(slots)
        if part not in self.worths or self.costs is None:
            return budgets
        worth = self.worths[part]
        before = [self._offer(own) for own in found]
        depths = [worth.depth(own.expected, budget.depth) for own, budget in zip(before, budgets, strict=True)]
        self._asked[part] = _Asked(before, depths)
        least = worth.least(float(self.costs.seconds(len(slots), 0)[0]))
        return [
            Budget(budget.nodes, depth, least) if depth else NOTHING
            for budget, depth in zip(budgets, depths, strict=True)
        ]

    def size(
        self, slots: Sequence[int], proposals: Proposals, budgets: Sequence[Budget], load: Load, seconds: float
    ) -> list[TokenTree]:
        offers = [self._offer(own) for own in proposals.candidates] or [_NO_OFFER] * len(slots)
        self._offers.update(zip(slots, offers, strict=True))
        taken = [tree.candidates for tree in proposals.trees]
        room = [max(budget.nodes - count, 0) for budget, count in zip(budgets, taken, strict=True)]
        most = [min(len(own.order), left) for own, left in zip(offers, room, strict=True)]
        if self.costs is None:
            sizes = most
        else:
            already = sum(taken) + load.others
            steps = self.costs.seconds(load.batch, already + sum(most))[already:]
            self._learn_costs(proposals, offers, most, load.batch, seconds)
            sizes = self._sizes(offers, most, load.batch, steps, seconds)
            self._used = max(0.9 * self._used, max(sizes))
        return [
            proposals.tree(i, own.order[:size], own.weights)
            for i, (own, size) in enumerate(zip(offers, sizes, strict=True))
        ]

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord], timing: StepTiming) -> None:
        drawing = self.names[self.acceptance.drafters :]
        for slot, record in zip(slots, records, strict=True):
            offer = self._offers.pop(slot, None)
            if offer is not None and len(offer.order):
                self.acceptance.learn(offer.candidates, record.emitted)
            if offer is not None and drawing:
                self.drawn.learn(record, drawing)
        if self.costs is None:
            return
        for stretch in self.stretches.values():
            stretch.sleep()
        self._rows = sum(len(record.tree) for record in records)
        self._keep_pace(len(slots), records, timing)

    def memory(self) -> dict[str, NDArray[Any]]:
        return {"acceptance": self.acceptance.counts, "parts": self._parts()}

    def remember(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        counts, parts = arrays.get("acceptance"), arrays.get("parts", self._parts())
        same = counts is not None and counts.shape == self.acceptance.counts.shape
        if counts is None or not same or not np.array_equal(parts, self._parts()):
            raise InputError("it belongs to another mixture of drafters; keep one file for each")
        self.acceptance.counts[:] = counts

    def forget(self) -> None:
        """Changes state: what texts have taught is gone; what was learnt of time stays."""
        self.acceptance = Acceptance(self.acceptance.drafters)
        self.drawn = Shares(self.drawn.count)

    def _parts(self) -> NDArray[np.uint8]:
        """Whose candidates are counted, in this order."""
        return np.frombuffer(",".join(self.names[: self.acceptance.drafters]).encode(), dtype=np.uint8)

    def _offer(self, own: Candidates) -> Offer:
        if not own.total:
            return _NO_OFFER
        if self.combine == "route":
            return self._surest(own)
        weights = self.acceptance.weights(own)
        return Offer(own, weights, ranked(weights))

    def _surest(self, own: Candidates) -> Offer:
        """The candidates of the part of which most are expected to be accepted, judged by what they are alone."""
        best = _NO_OFFER
        for part in range(self.acceptance.drafters):
            alone = own._replace(sources=np.full(len(own.sources), part))
            offer = self._of(alone, own.makers & (1 << part))
            best = max(best, offer, key=lambda one: one.expected)
        return best

    def _sizes(
        self, offers: Sequence[Offer], most: Sequence[int], batch: int, steps: NDArray[np.float64], spent: float
    ) -> list[int]:
        """How many of each slot's best candidates to keep: likeliest first over the whole batch, while it pays."""
        if len(offers) == 1:
            worth = offers[0].weights[offers[0].order[: most[0]]]
            return [_most_per_second(worth, steps, batch, spent, self.margin)]
        slot = np.repeat(np.arange(len(offers)), most)
        worth = np.concatenate([own.weights[own.order[:count]] for own, count in zip(offers, most, strict=True)])
        first = np.argsort(-worth, kind="stable")  # along a path weights never rise, so parents come first
        best = _most_per_second(worth[first], steps, batch, spent, self.margin)
        return np.bincount(slot[first[:best]], minlength=len(offers)).tolist()

    def _learn_costs(
        self, proposals: Proposals, offers: Sequence[Offer], most: Sequence[int], batch: int, spent: float
    ) -> None:
        """Changes state: what each part took, and what the step is worth with it and without it."""
        for run in proposals.runs:
            if run.part in self.worths:
                self.worths[run.part].time(run.levels, run.seconds)
                if (asked := self._asked.pop(run.part, None)) is not None:
                    self._learn_worth(run.part, run.levels, asked, offers, most, batch, spent)
            elif run.part in self.stretches and self.stretches[run.part].awake:
                self._looking.setdefault(run.part, deque(maxlen=9)).append(run.looking / self._rows)
                gain = sum(
                    self._gain(run.part, run.seconds, own, count, batch, spent)
                    for own, count in zip(offers, most, strict=True)
                )
                self.stretches[run.part].learn(gain / batch)

    def _learn_worth(
        self, part: int, levels: int, asked: _Asked, offers: Sequence[Offer], most: Sequence[int], batch: int,
        spent: float,
    ) -> None:  # fmt: skip
        worth = self.worths[part]
        worth.whole |= levels > max(asked.depths) > 0
        for own, before, depth, count in zip(offers, asked.before, asked.depths, most, strict=True):
            if depth < worth.deepest:
                worth.pass_by(before.expected)
            if depth == 0:
                continue
            drafting = worth.seconds(depth)
            drafting[levels:] = drafting[min(levels, depth)]  # it went no deeper
            drafting = (max(spent - drafting[-1], 0.0) + drafting) / batch
            step = self._each(batch, count)
            trie = own.candidates
            found = rates(own.weights, own.order, trie.makers, trie.depths, 1 << part, step, drafting)
            found[0] = _best_rate(before.weights, before.order, step + drafting[0])
            worth.learn(before.expected, found)

    def _gain(self, part: int, seconds: float, own: Offer, count: int, batch: int, spent: float) -> float:
        """Logarithm of the speed with this part over that without it, its reading of the step's rows included."""
        step = self._each(batch, count)
        look = median(self._looking[part]) * np.arange(1, len(step) + 1)
        together = _best_rate(own.weights, own.order, step + look + spent / batch)
        rest = self._without(own.candidates, part)
        alone = _best_rate(rest.weights, rest.order, step + max(spent - seconds, 0.0) / batch)
        return math.log(together / alone)

    def _without(self, own: Candidates, part: int) -> Offer:
        """What the others offer, judged without the word of this part: that it agrees with them says much."""
        return self._of(own, own.makers & ~(1 << part))

    def _of(self, own: Candidates, makers: NDArray[np.int64]) -> Offer:
        """The candidates that these drafters say, judged as if nobody else had said anything beside them."""
        said = makers > 0
        heard = own._replace(makers=makers, claims=np.where(said, own.claims, UNSAID))
        weights = np.where(said, self.acceptance.weights(heard), 0.0)
        weights[0] = 1.0
        return Offer(heard, weights, ranked(weights)[: int(said[1:].sum())])

    def _each(self, batch: int, count: int) -> NDArray[np.float64]:
        """One sequence's share of steps in which each has 0, 1, ... `count` candidates."""
        assert self.costs is not None
        return self.costs.seconds(batch, batch * count)[::batch] / batch

    def _keep_pace(self, members: int, records: Sequence[StepRecord], timing: StepTiming) -> None:
        assert self.costs is not None
        pace, total = self._pace(timing.batch), timing.total
        alone = total - timing.draft
        if timing.others:  # what the candidates of others took is not for these sequences to answer for
            candidates = timing.rows - timing.batch
            steps = self.costs.seconds(timing.batch, candidates)
            total -= float(steps[candidates] - steps[candidates - timing.others])
        wide = any(record.tree.candidates for record in records)
        if self.even and not wide and not timing.others and not pace.resting:
            pace.see(alone)
        pace.add(wide, not pace.resting, members, sum(len(record.emitted) for record in records), total)

    def _pace(self, batch: int) -> Pace:
        """Lenient: candidates are weighed by what they cost, and a text that starts to repeat itself pays many times
        what drafting in vain takes; so it rests where costs are misjudged, not after some steps without luck."""
        return self._paces.setdefault(batch, Pace(rest=16, margin=0.94))


_NO_OFFER = Offer(NO_CANDIDATES, np.ones(1), np.zeros(0, dtype=np.int64))


@compiled
def _most_per_second(worth, seconds, batch, spent, margin):  # type: ignore[no-untyped-def]
    """How many candidates to take, the likeliest first, in a step of so many seconds by candidates and `spent` more."""
    plain = batch / (seconds[0] + spent)
    best, rate, gain = 0, plain, float(batch)
    for i in range(len(worth)):
        gain += worth[i]
        own = gain / (seconds[i + 1] + spent)
        if own > rate:
            best, rate = i + 1, own
    return best if rate > margin * plain else 0


@compiled
def _best_rate(weights, order, seconds):  # type: ignore[no-untyped-def]
    """Most tokens per second with some of these candidates, in steps of so many seconds by candidates."""
    gain, best = 1.0, 1.0 / seconds[0]
    for i in range(min(len(order), len(seconds) - 1)):
        gain += weights[order[i]]
        best = max(best, gain / seconds[i + 1])
    return best
