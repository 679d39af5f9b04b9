"""Mix: the trees of several drafters in one, cut to the size that gives the most tokens per second.

Paper: merged trees and confidence routing after TAPS (arXiv 2603.27027); as a trie, re-ranked by acceptance learnt on
line. Lossless: ranked parts propose point masses, which may be cut; dear ones among them are asked only where that has
paid; parts that draw are allotted their share before they draw and are never cut. Cost: the parts' own, and tens of
microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.compiled import compiled
from outrider.draft.evidence import Evidence, Union
from outrider.draft.worth import Worth, rates
from outrider.errors import InputError
from outrider.protocols import (
    NO_NEEDS,
    Budget,
    Chunk,
    Context,
    Drafter,
    Needs,
    Noise,
    Remembers,
    SharedNoise,
    StepRecord,
)
from outrider.tree import TokenTree, fixed, merge, root

Seconds = Callable[[int, int], NDArray[np.float64]]  # by batch and most candidates: seconds with 0, 1, ... of them


@dataclass(slots=True)
class Mix:
    ranked: Sequence[Drafter]  # point masses only: all are asked for the whole budget, the best nodes stay
    drawn: Sequence[Drafter] = ()  # sampled: each gets its share before it draws
    dear: int = 0  # how many of the ranked, the last ones, are asked only where that has paid
    deepest: int = 6  # how deep those are asked
    seconds: Seconds | None = None  # of a step without drafting; None: the whole budget is used
    combine: Literal["merge", "route"] = "merge"  # route: the tree of the surest part only
    margin: float = 1.02  # how much faster than plain the estimate must be
    name: str = "mix"
    needs: Needs = field(init=False, default=NO_NEEDS)
    evidence: Evidence = field(init=False)
    shares: Shares = field(init=False)
    worths: list[Worth] = field(init=False)  # of the dear parts
    _contexts: dict[int, Context] = field(default_factory=dict)
    _used: float = 8.0  # candidates that were verified in recent steps: the most, soon forgotten
    _unions: dict[int, Union] = field(default_factory=dict)  # this step's candidates, before the cut

    def __post_init__(self) -> None:
        self.evidence = Evidence(len(self.ranked))
        self.shares = Shares(len(self.drawn))
        self.worths = [Worth(self.deepest) for _ in range(self.dear)]
        for part in self.parts:
            self.needs |= part.needs

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return (*self.ranked, *self.drawn)

    @property
    def shared_noise(self) -> bool:
        return any(part.shared_noise for part in self.parts)

    def begin(self, slot: int, context: Context, chunks: Iterable[Chunk]) -> None:
        self._contexts[slot] = context
        hungry = sum(part.needs != Needs() for part in self.parts)
        shared = list(chunks) if hungry > 1 else chunks  # a stream is read once
        for part in self.parts:
            part.begin(slot, context, shared if part.needs != Needs() else ())

    def end(self, slot: int) -> None:
        self._contexts.pop(slot, None)
        self._unions.pop(slot, None)
        for part in self.parts:
            part.end(slot)

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> list[TokenTree]:
        begun = time.perf_counter()
        bare = [root(int(self._contexts[slot].tokens[-1])) for slot in slots]
        drawn = self._draw(slots, bare, budgets, noise) if self.drawn else []
        cheap, own = self.ranked[: len(self.ranked) - self.dear], [self._enough(budget) for budget in budgets]
        offers = [part.propose(slots, own, noise) for part in cheap]
        unions = self._unite(offers, len(slots))
        asked: list[_Asked] = []
        for number in range(len(cheap), len(self.ranked)):
            before = time.perf_counter()
            asked.append(self._ask(number, unions, slots, bare, own, noise))
            offers.append(asked[-1].trees)
            if any(asked[-1].depths):
                unions = self._unite(offers, len(slots))
            self.worths[number - len(self.ranked)].time(max(asked[-1].levels), time.perf_counter() - before)
        self._unions.update(zip(slots, unions, strict=True))
        taken = [tree.candidates for tree in drawn] or [0] * len(slots)
        room = [budget.nodes - count for budget, count in zip(budgets, taken, strict=True)]
        spent = time.perf_counter() - begun
        for number, answer in enumerate(asked, len(cheap)):
            self._learn_worth(number, answer, unions, room, spent)
        sizes = self._sizes(unions, room, sum(taken), spent)
        self._used = max(0.9 * self._used, max(sizes))
        names = [part.name for part in self.ranked]
        trees = [_tree(tree, own, size, names) for tree, own, size in zip(bare, unions, sizes, strict=True)]
        return [merge(a, b) for a, b in zip(drawn, trees, strict=True)] if drawn else trees

    def observe(self, slot: int, record: StepRecord) -> None:
        if (seen := self._unions.pop(slot, None)) is not None:
            if len(seen.order):
                self.evidence.learn(seen, record.emitted)
            if self.drawn:
                self.shares.learn(record, [part.name for part in self.drawn])
        for part in self.parts:
            part.observe(slot, record)

    def _enough(self, budget: Budget) -> Budget:
        """Room for twice the candidates that have been in use: a larger tree takes longer to draft and to weigh."""
        if self.seconds is None:
            return budget
        return budget & Budget(int(2 * self._used) + 2, budget.depth)

    def _ask(
        self, number: int, rest: Sequence[Union], slots: Sequence[int], bare: Sequence[TokenTree],
        budgets: Sequence[Budget], noise: Sequence[Noise],
    ) -> _Asked:  # fmt: skip
        """The trees of a dear part, as deep as has paid where the others expect what they expect now."""
        part, worth = self.ranked[number], self.worths[number - len(self.ranked)]
        if self.seconds is None:
            depths = [budget.depth for budget in budgets]
            return _Asked([0.0] * len(slots), depths, part.propose(slots, budgets, noise), depths)
        trees = list(bare)
        cheap = [float(own.weights.sum()) - 1.0 for own in rest]  # node 0 is text already
        depths = [worth.depth(own, budget.depth) for own, budget in zip(cheap, budgets, strict=True)]
        able = [i for i, depth in enumerate(depths) if depth > 0]
        levels = [0] * len(slots)
        if able:
            least = worth.least(float(self.seconds(len(slots), 0)[0]))
            own = [Budget(budgets[i].nodes, depths[i], least) for i in able]
            for i, tree in zip(
                able, part.propose([slots[i] for i in able], own, [noise[i] for i in able]), strict=True
            ):
                trees[i] = tree
            for i, budget in zip(able, own, strict=True):
                levels[i] = _levels(trees[i], budget)
        return _Asked(cheap, depths, trees, levels)

    def _learn_worth(
        self, number: int, asked: _Asked, unions: Sequence[Union], room: Sequence[int], spent: float
    ) -> None:
        """Changes state: what the step is worth with this part as deep as it was asked, less deep, and without it."""
        if self.seconds is None:
            return
        worth, batch = self.worths[number - len(self.ranked)], len(unions)
        cases = zip(unions, asked.cheap, asked.depths, asked.levels, room, strict=True)
        for own, cheap, depth, levels, left in cases:
            if depth < worth.deepest:
                worth.pass_by(cheap)
            if depth == 0:
                continue
            step = self.seconds(batch, batch * min(len(own.order), left))[::batch] / batch
            drafting = worth.seconds(depth)
            drafting[levels:] = drafting[levels]  # it went no deeper
            others = max(spent - drafting[-1], 0.0)
            drafting = (others + drafting) / batch
            worth.learn(cheap, rates(own.weights, own.order, own.masks, own.depths, 1 << number, step, drafting))

    def _draw(
        self, slots: Sequence[int], bare: Sequence[TokenTree], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[TokenTree]:
        """The trees of the parts that draw, each within the share it was allotted before."""
        trees = list(bare)
        for number, (part, share) in enumerate(zip(self.drawn, self.shares.now(), strict=True)):
            own = [Budget(int(budget.nodes * share), budget.depth) for budget in budgets]
            able = [i for i, budget in enumerate(own) if min(budget.nodes, budget.depth) > 0]
            if able:
                apart = [_Apart(noise[i], number) for i in able]
                made = part.propose([slots[i] for i in able], [own[i] for i in able], apart)
                for i, tree in zip(able, made, strict=True):
                    trees[i] = merge(trees[i], tree)
        return trees

    def _unite(self, offers: Sequence[Sequence[TokenTree]], batch: int) -> list[Union]:
        """The candidates of each sequence, from the trees of each part."""
        return [self._united([trees[i] for trees in offers]) for i in range(batch)]

    def _united(self, trees: Sequence[TokenTree]) -> Union:
        if self.combine == "merge" or not trees:
            return self.evidence.weigh(trees)
        alone = [self.evidence.weigh([tree], first=i) for i, tree in enumerate(trees)]
        return max(alone, key=lambda own: float(own.weights.sum()))

    def _sizes(self, unions: Sequence[Union], room: Sequence[int], already: int, spent: float) -> list[int]:
        """How many of each slot's best candidates to keep: likeliest first over the whole batch, while it pays.

        `already` candidates stay anyway, and `spent` seconds have gone to drafting.
        """
        most = [min(len(own.order), left) for own, left in zip(unions, room, strict=True)]
        if self.seconds is None or not any(most):
            return most
        if len(unions) == 1:
            return [self._best(unions[0].weights[unions[0].order[: most[0]]], 1, already, spent)]
        slot = np.repeat(np.arange(len(unions)), most)
        worth = np.concatenate([own.weights[own.order[:count]] for own, count in zip(unions, most, strict=True)])
        first = np.argsort(-worth, kind="stable")  # along a path weights never rise, so parents come first
        best = self._best(worth[first], len(unions), already, spent)
        return np.bincount(slot[first[:best]], minlength=len(unions)).tolist()

    def _best(self, worth: NDArray[np.float64], batch: int, already: int, spent: float) -> int:
        """How many of these candidates, likeliest first, give the most tokens per second."""
        assert self.seconds is not None
        return _most_per_second(worth, self.seconds(batch, already + len(worth))[already:], batch, spent, self.margin)

    def memory(self) -> dict[str, NDArray[Any]]:
        kept: dict[str, NDArray[Any]] = {"evidence": self.evidence.counts, "parts": self._names()}
        for part in self.parts:
            if isinstance(part, Remembers):
                kept |= {f"{part.name}/{name}": array for name, array in part.memory().items()}
        return kept

    def remember(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        counts, names = arrays.get("evidence"), arrays.get("parts", self._names())
        same = counts is not None and counts.shape == self.evidence.counts.shape
        if counts is None or not same or not np.array_equal(names, self._names()):
            raise InputError("it belongs to another mixture of drafters; keep one file for each")
        for part in self.parts:
            prefix = f"{part.name}/"
            own = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
            if own and isinstance(part, Remembers):
                part.remember(own)
        self.evidence.counts[:] = counts

    def _names(self) -> NDArray[np.uint8]:
        """Whose evidence is counted, in this order."""
        return np.frombuffer(",".join(part.name for part in self.ranked).encode(), dtype=np.uint8)

    def forget(self) -> None:
        """Changes state: what texts have taught is gone; what the parts' seconds were worth, as all timing, stays."""
        self.evidence, self.shares = Evidence(len(self.ranked)), Shares(len(self.drawn))
        for part in self.parts:
            if isinstance(part, Remembers):
                part.forget()


@dataclass(frozen=True, slots=True)
class _Asked:
    """What became of a dear part in one step, by sequence."""

    cheap: Sequence[float]  # candidates that the others expect to be accepted
    depths: Sequence[int]  # how deep it was asked
    trees: list[TokenTree]
    levels: Sequence[int]  # how deep it went


@dataclass(slots=True)
class Shares:
    """Which part of the budget each drawing drafter gets: by how much of what was accepted came from it."""

    count: int
    least: float = 0.1  # enough to notice when a drafter becomes useful again
    most: float = 0.75  # what they leave to the ranked parts
    keep: float = 0.97
    _won: NDArray[np.float64] = field(init=False)  # accepted tokens by drafter, the ranked ones together last

    def __post_init__(self) -> None:
        self._won = np.ones(self.count + 1)

    def now(self) -> list[float]:
        if not self.count:
            return []
        share = np.maximum(self._won[:-1] / self._won.sum(), self.least)
        return (share * min(1.0, self.most / share.sum())).tolist()

    def learn(self, record: StepRecord, names: Sequence[str]) -> None:
        """Changes state: who proposed what was accepted."""
        self._won *= self.keep
        for node in record.verdict.path:
            origin = record.tree.origins[node] if record.tree.origins else ""
            self._won[names.index(origin) if origin in names else -1] += 1 - self.keep


@dataclass(frozen=True, slots=True)
class _Apart:
    """Noise of a part's own: no decision of one drafter shares its random bits with another's."""

    noise: Noise
    part: int

    def coin(self, p: float, node: int, draw: int) -> bool:
        return self.noise.coin(p, node + (self.part << 16), draw)

    def draw(self, weights: Tensor | NDArray[np.float64], node: int, draw: int) -> int:
        return self.noise.draw(weights, node + (self.part << 16), draw)

    # The target's own noise is one for all: a part that follows it must see what the target will

    def pick(self, probs: Tensor, path: Sequence[int]) -> int:
        return self.noise.pick(probs, path)

    def pick_rows(self, probs: Tensor, tree: TokenTree) -> list[int]:
        return self.noise.pick_rows(probs, tree)

    def first(self, ids: NDArray[np.int64], probs: NDArray[np.float64], path: Sequence[int], count: int) -> list[int]:
        return cast(SharedNoise, self.noise).first(ids, probs, path, count)


def _levels(tree: TokenTree, budget: Budget) -> int:
    """How often the drafter ran for this tree: below every path that was worth it, within the depth it was asked.

    In a full tree not below the least likely path: what follows it has no place.
    """
    if not tree.candidates:
        return 0  # it knew nothing yet
    if tree.weights is None:
        return min(1 + tree.depth, budget.depth)
    last = tree.weights.min() if tree.candidates >= budget.nodes else 0.0
    went_on = tree.depths[(tree.weights >= budget.least) & (tree.weights > last)]
    return min(1 + int(went_on.max(initial=0)), budget.depth)


def _tree(bare: TokenTree, own: Union, size: int, names: Sequence[str]) -> TokenTree:
    if size == 0:
        return bare
    tokens, parents, weights = _cut(own.tokens, own.parents, own.weights, own.order[:size])
    return fixed(tokens, parents, ("", *(names[source] for source in own.sources[own.order[:size]].tolist())), weights)


@compiled
def _cut(tokens, parents, weights, chosen):  # type: ignore[no-untyped-def]
    """Tokens, parents and weights of these nodes, which stand behind their parents, and of node 0 before them."""
    place = np.zeros(len(tokens), np.int64)
    above, kept = np.full(len(chosen) + 1, -1, np.int64), np.zeros(len(chosen) + 1, np.int64)
    for i in range(len(chosen)):
        kept[i + 1] = chosen[i]
        place[chosen[i]] = i + 1
        above[i + 1] = place[parents[chosen[i]]]
    return tokens[kept], above, weights[kept]


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
