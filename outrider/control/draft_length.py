"""Draft length: a chain as long as drafts have been accepted, for drafters that say many tokens at once.

The adaptive draft length of DiffuSpec (arXiv 2510.02358). Exponential means G of the lengths proposed and A of those
accepted: the next draft is floor(G) long, and longer by delta where about all that was proposed was taken, A >= G; a
length whose last row costs more than it can bring is never asked. Judged for each request by itself. Lossless: decided
before drafting. Cost: nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import floor

from outrider.core.proposals import Proposals, everything
from outrider.core.records import Budget, Load, StepRecord, StepTiming
from outrider.core.tree import TokenTree

NEARLY = 0.25  # tokens: the gap that one miss leaves between the means only halves, and would never close


@dataclass(slots=True)
class Means:
    """Of one sequence."""

    length: int  # of the next draft
    proposed: float = 0.0  # G
    accepted: float = 0.0  # A


@dataclass(slots=True)
class DraftLength:
    longest: int  # k_max
    shortest: int = 2  # k_min
    ends: frozenset[int] = frozenset()  # tokens that end a text: one at the end of a draft is no length of it
    keep: float = 0.5  # 1 - rho
    seconds: Callable[[int], float] | None = None  # of a step by rows; None: rows are free
    name: str = "draft-length"
    _means: dict[int, Means] = field(default_factory=dict)
    _best: float = 0.5  # largest share of a draft that was accepted lately

    @property
    def delta(self) -> int:
        return max(1, (self.longest - self.shortest) // 3)

    def begin(self, slot: int) -> None:
        self._means[slot] = Means(self.longest)

    def end(self, slot: int) -> None:
        self._means.pop(slot, None)

    def plan(self, slots: Sequence[int], limits: Sequence[Budget], load: Load) -> list[Budget]:
        pays = self._longest_that_pays()
        lengths = [min(self._means[slot].length, pays) for slot in slots]
        return [Budget(length, length) & limit for length, limit in zip(lengths, limits, strict=True)]

    def size(
        self, slots: Sequence[int], proposals: Proposals, budgets: Sequence[Budget], load: Load, seconds: float
    ) -> list[TokenTree]:
        return everything(proposals, [budget.nodes for budget in budgets])

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord], timing: StepTiming) -> None:
        for slot, record in zip(slots, records, strict=True):
            if record.tree.candidates:
                ended = int(record.tree.tokens[-1]) in self.ends
                self._learn(self._means[slot], record.tree.depth - ended, len(record.verdict.path))

    def _learn(self, means: Means, proposed: int, accepted: int) -> None:
        means.proposed = self.keep * means.proposed + (1 - self.keep) * proposed
        means.accepted = self.keep * means.accepted + (1 - self.keep) * accepted
        whole = means.accepted >= means.proposed - NEARLY
        length = floor(means.proposed + NEARLY) + self.delta * whole
        means.length = min(max(length, self.shortest), self.longest)
        share = min(accepted / max(proposed, 1), 1.0)
        self._best = max(share, 0.99 * self._best)

    def _longest_that_pays(self) -> int:
        """The last row must bring as many tokens a second as the whole step does, each accepted as the best were."""
        if self.seconds is None:
            return self.longest
        length = self.longest
        while length > self.shortest:
            tokens = sum(self._best**depth for depth in range(length + 1))
            last = self.seconds(length + 1) - self.seconds(length)
            if self._best**length * self.seconds(length + 1) >= tokens * last:
                break
            length -= 1
        return length
