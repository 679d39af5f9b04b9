"""Near ties: the noise of a precision, measured without tree code, and which differences it can explain.

The noise is how far the likeliest tokens' logits move apart when plain `transformers` scores the same text in chunks of
other widths instead of token by token. A first difference between two texts counts as a near tie only if the margin
there is below that noise, and more near ties than the margins predict is a failure. Where a runtime's rows have the
same bits in any pass there is no noise, and no tie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.check.reference import Answer, Plain, Watch

SAFETY = 2.0  # the positions under test may meet a somewhat larger deviation than the measured ones
FALSE_ALARM = 1e-4  # of the count of near ties
WIDTHS = (3, 8, 17, 0)  # tokens a forward; 0: the whole text at once
FORCED_TREES = "forced"  # begins the names of runs on trees of the gate's own
EDGES = tuple(10.0**e for e in range(-8, 3))


@dataclass(frozen=True, slots=True)
class Precision:
    """Deviations between schedules: for each scored row, the largest change of a difference of two top logits."""

    deviations: NDArray[np.float64]  # sorted
    positions: int
    widths: tuple[int, ...] = WIDTHS

    @property
    def bound(self) -> float:
        return SAFETY * float(self.deviations[-1])

    def explains(self, margin: float) -> bool:
        """Whether another schedule may choose otherwise there; none does where rows have the same bits in all."""
        return self.bound > 0 and margin <= self.bound

    def chance(self, margin: float) -> float:
        """How likely another schedule moves logits by more than this margin; beyond the bound it does not."""
        if not self.explains(margin):
            return 0.0
        above = len(self.deviations) - int(np.searchsorted(self.deviations, margin, side="left"))
        return (above + 1) / (len(self.deviations) + 1)

    def as_dict(self) -> dict[str, Any]:
        quantiles = np.quantile(self.deviations, (0.5, 0.9, 0.99, 1.0)).tolist()
        return {
            "positions": self.positions, "rescored": len(self.deviations), "widths": list(self.widths),
            "median": quantiles[0], "p90": quantiles[1], "p99": quantiles[2], "largest": quantiles[3],
            "bound": self.bound,
        }  # fmt: skip


def no_noise(answers: Sequence[Answer]) -> Precision:
    """Of rows that have the same bits in any pass: nothing is measured, and any difference refutes."""
    return Precision(np.zeros(1), sum(len(a.tokens) for a in answers), ())


def measure(plain: Plain, answers: Sequence[Answer], watch: Watch, widths: tuple[int, ...] = WIDTHS) -> Precision:
    found: list[float] = []
    for answer in answers:
        begin = plain.behind(answer.job.prompt)
        for width in widths:
            for i, row in enumerate(plain.rescore(answer, width, begin)):
                ids = answer.top_ids[i]
                moved = row[ids].double().cpu().numpy() - answer.top_logits[i]
                found.append(float(moved.max() - moved.min()))
            watch("noise of the precision", len(answer.tokens))
    return Precision(np.sort(np.array(found)), sum(len(a.tokens) for a in answers), widths)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where one run first differs from plain decoding. A token of -1: the text ended there."""

    run: str
    job: str
    position: int
    expected: int
    got: int
    margin: float
    tie: bool


@dataclass(frozen=True, slots=True)
class RunResult:
    name: str
    texts: int
    tokens: int
    steps: int
    drafted: int  # candidates that were verified
    mean_accepted: float
    identical: int


@dataclass(slots=True)
class Comparison:
    """All runs of one part against plain decoding. Changes state in `add` only."""

    precision: Precision
    answers: Sequence[Answer]
    runs: list[RunResult] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)

    def add(
        self, run: str, expected: Sequence[tuple[Answer, list[int]]], got: Sequence[list[int]], steps: int,
        drafted: int = 0,
    ) -> None:  # fmt: skip
        before = len(self.divergences)
        for (answer, want), have in zip(expected, got, strict=True):
            at = first_difference(want, have)
            if at is not None:
                ended = at >= min(len(want), len(have))  # one is a prefix of the other: no margin explains that
                margin = math.inf if ended else float(answer.margins[at])
                tie = self.precision.explains(margin)
                said, heard = (text[at] if at < len(text) else -1 for text in (want, have))
                self.divergences.append(Divergence(run, answer.job.name, at, said, heard, margin, tie))
        tokens_made = sum(map(len, got))
        self.runs.append(
            RunResult(
                run,
                len(got),
                tokens_made,
                steps,
                drafted,
                tokens_made / max(steps, 1),
                len(got) - len(self.divergences) + before,
            )
        )

    @property
    def refuting(self) -> list[Divergence]:
        return [d for d in self.divergences if not d.tie]

    @property
    def ties(self) -> int:
        """Places, not runs: the same tie may show in several runs."""
        return len({(d.job, d.position) for d in self.divergences if d.tie})

    @property
    def expected_ties(self) -> float:
        return sum(
            min(1.0, len(self.runs) * self.precision.chance(float(margin)))
            for answer in self.answers
            for margin in answer.margins
        )

    @property
    def tie_limit(self) -> int:
        return poisson_limit(self.expected_ties, FALSE_ALARM)

    @property
    def passed(self) -> bool:
        return not self.refuting and self.ties <= self.tie_limit

    @property
    def proposed(self) -> int:
        """Candidates of the method's own; forced trees are the gate's."""
        return sum(run.drafted for run in self.runs if not run.name.startswith(FORCED_TREES))

    def summary(self, speculates: bool) -> str:
        """What was found, and over how many candidates; `speculates` tells a method from plain decoding."""
        if self.refuting:
            d = self.refuting[0]
            return (
                f"{len(self.refuting)} texts differ; first: {d.run}, {d.job}, token {d.position}, "
                f"margin {d.margin:.1e} against a noise of {self.precision.bound:.1e}"
            )
        if not self.passed:
            return f"{self.ties} near ties where at most {self.tie_limit} were to be expected"
        tokens, forced = sum(r.tokens for r in self.runs), sum(r.drafted for r in self.runs) - self.proposed
        proposed = f"{self.proposed} candidates of the method's own and " if self.proposed else ""
        none = "; the method itself proposed nothing" if speculates and not self.proposed else ""
        same = f"{self.ties} near ties of {self.tie_limit} allowed" if self.ties else "all identical"
        bound = self.precision.bound
        noise = f"noise bound {bound:.1e}" if bound else "noise 0.0 (rows have the same bits)"
        return (
            f"{len(self.runs)} runs, {tokens} tokens, {proposed}{forced} in forced trees verified, {noise}: "
            f"{same}{none}"
        )

    def as_dict(self) -> dict[str, Any]:
        margins = np.concatenate([a.margins for a in self.answers])
        tied = np.array([d.margin for d in self.divergences if d.tie])
        bins = (0.0, *EDGES, math.inf)
        return {
            "noise": self.precision.as_dict(),
            "positions": len(margins),
            "near_ties": self.ties,
            "near_ties_expected": self.expected_ties,
            "near_ties_allowed": self.tie_limit,
            "near_ties_false_alarm": FALSE_ALARM,
            "margin_histogram": [
                {"from": low, "to": high, "positions": int(((margins >= low) & (margins < high)).sum()),
                 "near_ties": int(((tied >= low) & (tied < high)).sum())}
                for low, high in pairwise(bins)
            ],
            "runs": [_plain_dict(r) for r in self.runs],
            "divergences": [_plain_dict(d) for d in self.divergences],
        }  # fmt: skip


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def poisson_limit(mean: float, false_alarm: float) -> int:
    """The smallest count that a Poisson variable of this mean passes with at most this probability."""
    count, term = 0, math.exp(-mean)
    below = term
    while 1.0 - below > false_alarm and count < 10_000:
        count += 1
        term *= mean / count
        below += term
    return count


def _plain_dict(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}
