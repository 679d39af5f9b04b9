"""Goodput: drafts and verifies as much as gives the most accepted tokens per second, and nothing while nothing pays.

After SmartSpec's goodput (arXiv 2406.14066), over the whole batch and down to single candidates. Before drafting it
decides which drafters of a mixture are asked: those that cost next to nothing always (`Role.FREE`), those that read the
target's rows after each step unless they sleep (`sleep.py`), those that run a network as deep as that has paid
(`draft_depth.py`), and for those that sample their share of the budget (`budget_shares.py`). After drafting it keeps
the point masses that are worth their rows: each candidate is weighed by calibrated acceptance, each row by the cost
model. Where speculation was slower than plain decoding all the same, it rests (`backoff.py`). Sampled draws are never
cut. Lossless: nothing here changes what is accepted. Cost: tens of microseconds a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.control.acceptance import Acceptance, ranked
from outrider.control.backoff import LOOK, Backoff
from outrider.control.budget_shares import BudgetShares
from outrider.control.draft_depth import DraftDepth, all_drafting, rates
from outrider.control.read_cost import ReadCost
from outrider.control.sleep import SleepSchedule
from outrider.core.errors import InputError
from outrider.core.numeric.compiled import compiled
from outrider.core.proposals import NO_CANDIDATES, Candidates, Proposals
from outrider.core.records import Budget, Load, Role, StepRecord, StepTiming
from outrider.core.tree import TokenTree

NOTHING = Budget(0, 0)
UNSAID = 1e-6  # the claim of a candidate that no drafter is heard for: it takes no chance from its siblings


class Costs(Protocol):
    def seconds(self, batch: int, candidates: int, context: int) -> NDArray[np.float64]:
        """[candidates + 1]: steps of `batch` sequences with 0, 1, ... candidates in all, without drafting.

        `context`: tokens of their texts, together.
        """
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

    before: list[Offer]  # what the parts before it have found, weighed without it
    depths: list[int]


@dataclass(slots=True)
class _Step:
    """What belongs to one step: `plan` begins it, drafting and `size` fill it, `observe` ends it."""

    context: int = 0  # tokens of text that it works on
    batch: int = 1  # sequences
    resting: bool = False  # nothing is drafted in it
    rows: int = 1  # of the step before, until `observe` tells its own
    asked: dict[int, _Asked] = field(default_factory=dict)  # by part
    offers: dict[int, Offer] = field(default_factory=dict)  # before the cut, by slot


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
    budget_shares: BudgetShares = field(init=False)  # of parts that sample
    draft_depths: dict[int, DraftDepth] = field(init=False)  # of parts that run a network
    sleeps: dict[int, SleepSchedule] = field(init=False)  # of parts that read rows
    _read_costs: dict[int, ReadCost] = field(default_factory=dict)  # by part
    _used: float = 8.0  # the most candidates that a recent step verified; falls by a tenth a step
    _backoffs: dict[int, Backoff] = field(default_factory=dict)  # by batch size
    _step: _Step = field(default_factory=_Step)

    def __post_init__(self) -> None:
        self.acceptance = Acceptance(sum(role is not Role.DRAWS for role in self.roles))
        self.budget_shares = BudgetShares(sum(role is Role.DRAWS for role in self.roles))
        self.draft_depths = {i: DraftDepth(self.deepest) for i, role in enumerate(self.roles) if role is Role.RUNS}
        self.sleeps = {i: SleepSchedule() for i, role in enumerate(self.roles) if role is Role.LOOKS}

    def begin(self, slot: int) -> None:
        """Changes state: speculation may pay for new texts, so a rest ends once a batch may have nothing but them."""
        for members, backoff in self._backoffs.items():
            backoff.wake(members)

    def end(self, slot: int) -> None:
        self._step.offers.pop(slot, None)

    def plan(self, slots: Sequence[int], limits: Sequence[Budget], load: Load) -> list[Budget]:
        """Room for twice the candidates that have been in use: a larger tree takes longer to draft and to weigh."""
        if self.costs is None:
            return [self.limit & limit for limit in limits]
        self._step = _Step(load.context, load.batch, self._rest(load.batch) > 0, self._step.rows)
        if self._step.resting:
            return [NOTHING] * len(slots)
        enough = Budget(min(int(2 * self._used) + 2, self.limit.nodes), self.limit.depth)
        return [enough & limit for limit in limits]

    def awake(self, part: int) -> bool:
        if self.costs is None or part not in self.sleeps:
            return True
        return self.sleeps[part].awake and not self._step.resting

    def reads(self, part: int) -> bool:
        """A part that runs a network runs it over prompts, too: not where nothing is drafted for some time to come."""
        resting = part in self.draft_depths and self.costs is not None and self._rest(self._step.batch) > LOOK
        return self.awake(part) and not resting

    def shares(self) -> Sequence[float]:
        return self.budget_shares.now()

    def ask(
        self, part: int, slots: Sequence[int], found: Sequence[Candidates], budgets: Sequence[Budget]
    ) -> Sequence[Budget]:
        """A network is asked as deep as has paid in steps in which the others expected as much as they do now."""
        if not self.awake(part):
            return [NOTHING] * len(slots)
        if part not in self.draft_depths or self.costs is None:
            return budgets
        choice = self.draft_depths[part]
        before = [self._offer(candidates) for candidates in found]
        depths = [choice.depth(offer.expected, budget.depth) for offer, budget in zip(before, budgets, strict=True)]
        self._step.asked[part] = _Asked(before, depths)
        least = choice.least(float(self.costs.seconds(len(slots), 0, self._step.context)[0]))
        return [
            Budget(budget.nodes, depth, least) if depth else NOTHING
            for budget, depth in zip(budgets, depths, strict=True)
        ]

    def size(
        self, slots: Sequence[int], proposals: Proposals, budgets: Sequence[Budget], load: Load, seconds: float
    ) -> list[TokenTree]:
        offers = [self._offer(candidates) for candidates in proposals.candidates] or [_NO_OFFER] * len(slots)
        self._step.offers.update(zip(slots, offers, strict=True))
        taken = [tree.candidates for tree in proposals.trees]
        room = [max(budget.nodes - count, 0) for budget, count in zip(budgets, taken, strict=True)]
        fitting = [min(len(offer.order), left) for offer, left in zip(offers, room, strict=True)]
        if self.costs is None:
            sizes = fitting
        else:
            already = sum(taken) + load.others + load.prompt_rows
            steps = self.costs.seconds(load.batch, already + sum(fitting), load.context)[already:]
            self._learn_costs(proposals, offers, fitting, load.batch, seconds)
            sizes = self._sizes(offers, fitting, load.batch, steps, seconds)
            self._used = max(0.9 * self._used, max(sizes))
        return [
            proposals.tree(i, offer.order[:size], offer.weights)
            for i, (offer, size) in enumerate(zip(offers, sizes, strict=True))
        ]

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord], timing: StepTiming) -> None:
        drawing = self.names[self.acceptance.drafters :]
        for slot, record in zip(slots, records, strict=True):
            offer = self._step.offers.pop(slot, None)
            if offer is not None and len(offer.order):
                self.acceptance.learn(offer.candidates, record.emitted)
            if offer is not None and drawing:
                self.budget_shares.learn(record, drawing)
        if self.costs is None:
            return
        for schedule in self.sleeps.values():
            schedule.sleep()
        self._step.rows = sum(len(record.tree) for record in records)
        self._compare(len(slots), records, timing)

    def memory(self) -> dict[str, NDArray[Any]]:
        return {"acceptance": self.acceptance.counts, "parts": self._parts()}

    def remember(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        counts, parts = arrays.get("acceptance"), arrays.get("parts", self._parts())
        same = counts is not None and counts.shape == self.acceptance.counts.shape
        if counts is None or not same or not np.array_equal(parts, self._parts()):
            raise InputError("it belongs to another mixture of drafters; keep one file for each")
        self.acceptance.counts[:] = counts

    def forget(self) -> None:
        """Changes state: what was learnt from texts is gone; what was learnt of costs stays."""
        self.acceptance = Acceptance(self.acceptance.drafters)
        self.budget_shares = BudgetShares(self.budget_shares.count)

    def _parts(self) -> NDArray[np.uint8]:
        """The names of the parts whose candidates are counted, in their order, as bytes."""
        return np.frombuffer(",".join(self.names[: self.acceptance.drafters]).encode(), dtype=np.uint8)

    def _offer(self, candidates: Candidates) -> Offer:
        if not candidates.total:
            return _NO_OFFER
        if self.combine == "route":
            return self._surest(candidates)
        return Offer(candidates, *self.acceptance.weighed(candidates))

    def _surest(self, candidates: Candidates) -> Offer:
        """The candidates of the part of which most are expected to be accepted, each part judged alone."""
        best = _NO_OFFER
        for part in range(self.acceptance.drafters):
            alone = candidates._replace(sources=np.full(len(candidates.sources), part))
            offer = self._of(alone, candidates.makers & (1 << part))
            best = max(best, offer, key=lambda one: one.expected)
        return best

    def _sizes(
        self, offers: Sequence[Offer], fitting: Sequence[int], batch: int, steps: NDArray[np.float64], spent: float
    ) -> list[int]:
        """How many of each slot's best candidates to keep: likeliest first over the whole batch, while it pays."""
        if len(offers) == 1:
            weights = offers[0].weights[offers[0].order[: fitting[0]]]
            return [_most_per_second(weights, steps, batch, spent, self.margin)]
        slot = np.repeat(np.arange(len(offers)), fitting)
        weights = np.concatenate([o.weights[o.order[:count]] for o, count in zip(offers, fitting, strict=True)])
        first = np.argsort(-weights, kind="stable")  # along a path weights never rise, so parents come first
        best = _most_per_second(weights[first], steps, batch, spent, self.margin)
        return np.bincount(slot[first[:best]], minlength=len(offers)).tolist()

    def _learn_costs(
        self, proposals: Proposals, offers: Sequence[Offer], fitting: Sequence[int], batch: int, spent: float
    ) -> None:
        """Changes state: what each part took, and how fast the step is expected to be with it and without it."""
        for run in proposals.runs:
            if run.part in self.draft_depths:
                self.draft_depths[run.part].time(run.levels, run.seconds)
                if (asked := self._step.asked.pop(run.part, None)) is not None:
                    self._learn_depth(run.part, run.levels, asked, offers, fitting, batch, spent)
            elif run.part in self.sleeps and self.sleeps[run.part].awake:
                self._read_costs.setdefault(run.part, ReadCost()).add(self._step.rows, run.looking)
                gain = sum(
                    self._gain(run.part, run.seconds, offer, count, batch, spent)
                    for offer, count in zip(offers, fitting, strict=True)
                )
                self.sleeps[run.part].learn(gain / batch)

    def _learn_depth(
        self, part: int, levels: int, asked: _Asked, offers: Sequence[Offer], fitting: Sequence[int], batch: int,
        spent: float,
    ) -> None:  # fmt: skip
        choice, step = self.draft_depths[part], self._each(batch, max(fitting))
        choice.ran(levels, max(asked.depths))
        for offer, before, depth, count in zip(offers, asked.before, asked.depths, fitting, strict=True):
            if depth < choice.deepest:
                choice.pass_by(before.expected)
            if depth == 0:
                continue
            drafting = all_drafting(choice.seconds(depth), levels, spent, batch)
            each, trie = step[: count + 1], offer.candidates
            found = rates(offer.weights, offer.order, trie.makers, trie.depths, 1 << part, each, drafting)
            found[0] = _best_rate(before.weights, before.order, each, drafting[0])
            choice.learn(before.expected, found)

    def _gain(self, part: int, seconds: float, offer: Offer, count: int, batch: int, spent: float) -> float:
        """Logarithm of the speed with this part over that without it, its reading of the step's rows included."""
        step = self._each(batch, count)
        reading = self._read_costs[part].seconds(len(step))
        together = _best_rate(offer.weights, offer.order, step + reading, spent / batch)
        rest = self._without(offer.candidates, part)
        alone = _best_rate(rest.weights, rest.order, step, max(spent - seconds, 0.0) / batch)
        return math.log(together / alone)

    def _without(self, candidates: Candidates, part: int) -> Offer:
        """What the others offer, judged as if this part had proposed nothing: a second proposer raises the odds."""
        return self._of(candidates, candidates.makers & ~(1 << part))

    def _of(self, candidates: Candidates, makers: NDArray[np.int64]) -> Offer:
        """The candidates of these drafters, judged as if no other had proposed anything."""
        said = makers > 0
        heard = candidates._replace(makers=makers, claims=np.where(said, candidates.claims, UNSAID))
        weights = np.where(said, self.acceptance.weights(heard), 0.0)
        weights[0] = 1.0
        return Offer(heard, weights, ranked(weights)[: int(said[1:].sum())])

    def _each(self, batch: int, count: int) -> NDArray[np.float64]:
        """One sequence's share of steps in which each has 0, 1, ... `count` candidates."""
        assert self.costs is not None
        return self.costs.seconds(batch, batch * count, self._step.context)[::batch] / batch

    def _compare(self, members: int, records: Sequence[StepRecord], timing: StepTiming) -> None:
        """Changes state: the step's tokens and seconds, to compare speculation with plain decoding."""
        assert self.costs is not None
        if timing.prompt_rows:  # what the step would have taken without them is a guess
            self._backoff(timing.batch).pass_by()
            return
        backoff, total = self._backoff(timing.batch), timing.total
        alone = total - timing.draft
        if timing.others:  # the time of candidates that another controller plans for does not count
            candidates = timing.rows - timing.batch
            steps = self.costs.seconds(timing.batch, candidates, timing.context)
            total -= float(steps[candidates] - steps[candidates - timing.others])
        wide = any(record.tree.candidates for record in records)
        if self.even and not wide and not timing.others and not backoff.resting:
            backoff.see(alone)
        backoff.add(wide, not backoff.resting, members, sum(len(record.emitted) for record in records), total)

    def _rest(self, batch: int) -> int:
        """Steps in which nothing is to be drafted; a size that ran beside prompts only is like the nearest."""
        backoff = self._backoff(batch)
        judged = [size for size, one in self._backoffs.items() if one.known]
        if backoff.resting or backoff.known or not judged:
            return backoff.resting
        return self._backoffs[min(judged, key=lambda size: abs(size - batch))].resting

    def _backoff(self, batch: int) -> Backoff:
        """Lenient, since candidates are weighed by their costs anyway and a text that begins to repeat itself pays many
        times for drafts that brought nothing: it is to rest where costs are misjudged, not after some unlucky steps."""
        return self._backoffs.setdefault(batch, Backoff(rest=16, margin=0.94))


_NO_OFFER = Offer(NO_CANDIDATES, np.ones(1), np.zeros(0, dtype=np.int64))


@compiled
def _most_per_second(weights, seconds, batch, spent, margin):  # type: ignore[no-untyped-def]
    """How many candidates to take, the likeliest first, in a step of so many seconds by candidates and `spent` more."""
    plain = batch / (seconds[0] + spent)
    best, rate, gain = 0, plain, float(batch)
    for i in range(len(weights)):
        gain += weights[i]
        speed = gain / (seconds[i + 1] + spent)
        if speed > rate:
            best, rate = i + 1, speed
    return best if rate > margin * plain else 0


@compiled
def _best_rate(weights, order, seconds, spent):  # type: ignore[no-untyped-def]
    """Most tokens per second with some of these candidates, in steps of so many seconds by candidates and `spent`."""
    gain, best = 1.0, 1.0 / (seconds[0] + spent)
    for i in range(min(len(order), len(seconds) - 1)):
        gain += weights[order[i]]
        best = max(best, gain / (seconds[i + 1] + spent))
    return best
