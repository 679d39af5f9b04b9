"""The martingale part: are sampled tokens distributed as the target says, under rules whose decisions use the draft?

With p recomputed by one independent forward of the unmodified model, and f a function of the next token that was fixed
before it was decided, the sum of f(y) - E_p f over all tokens is a martingale when y ~ p; divided by the square root of
the summed variances it is close to standard normal for long texts. f may use the text so far and the draft's
*row* q, never the token drawn from it: given that token, y is no longer distributed as p even in an exact method.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.check.reference import Job, Plain, Watch
from outrider.check.runs import Recorder, Subject, finish
from outrider.core.records import StepRecord
from outrider.core.tree import Draw

FALSE_ALARM = 1e-4  # two-sided, over all statistics together
CLIP_RATIO, CLIP_LOG_P = 4.0, 8.0
Array = NDArray[np.float64]

# f(p, q) -> [V]; q is the row of the node's first sampled draw, spread over the vocabulary.
WITH_Q: dict[str, Callable[[Array, Array], Array]] = {
    "log q/p": lambda p, q: np.clip(_log(q) - _log(p), -CLIP_RATIO, CLIP_RATIO),
    "min(1, q/p)": lambda p, q: np.minimum(1.0, q / np.maximum(p, 1e-300)),
    "the draft's favourite": lambda p, q: (np.arange(len(p)) == q.argmax()).astype(np.float64),
}
WITHOUT_Q: dict[str, Callable[[Array], Array]] = {
    "log p": lambda p: np.maximum(_log(p), -CLIP_LOG_P),
    "quantile": lambda p: np.cumsum(p) - p / 2,
}
# Rules that decide a node's token from that node's own draws: given the nodes above it, y ~ p at every node. Of any
# other exact rule (block, traversal) only a step's first token is known to follow p once its draft is looked at.
NODE_BY_NODE = frozenset({"rejection", "recursive", "naive", "optimal", "k-seq", "transport"})
TESTS_FIRST_DRAW = frozenset({"rejection", "recursive", "naive"})  # kept with probability min(1, p/q)
ACCEPTED = "first draft accepted"
REPEATING = ", repeating"  # the same f, times the sign of the sum so far in its text: shows noise that is used again


@dataclass(frozen=True, slots=True)
class Sample:
    """A generated text and, for each of its tokens, the draws made at its place (none: nothing was proposed there)."""

    job: Job
    tokens: list[int]
    draws: list[tuple[Draw, ...]]


@dataclass(slots=True)
class Statistic:
    name: str
    tokens: int = 0
    total: float = 0.0  # sum of f(y) - E_p f
    variance: float = 0.0  # sum of Var_p f
    shift: float = 0.0  # sum of E f - E_p f if the residual were wrong

    def add(self, value: float, mean: float, variance: float, shift: float) -> None:
        self.tokens += 1
        self.total += value - mean
        self.variance += variance
        self.shift += shift

    @property
    def z(self) -> float:
        return self.total / math.sqrt(self.variance) if self.variance > 0 else 0.0

    @property
    def z_if_wrong(self) -> float:
        """The expected z under the planted residual bug."""
        return self.shift / math.sqrt(self.variance) if self.variance > 0 else 0.0


@dataclass(slots=True)
class Martingale:
    """Sums over all texts. Changes state in `add` only."""

    rule: str = "rejection"
    statistics: dict[str, Statistic] = field(default_factory=dict)
    texts: int = 0
    tokens: int = 0
    offered: int = 0  # tokens at whose place a candidate stood
    drafted: int = 0  # those of them at whose place something was sampled from a draft row
    impossible: int = 0  # tokens to which the recomputed distribution gives no probability

    @property
    def threshold(self) -> float:
        """Bonferroni over the statistics."""
        count = max(len(self.statistics), 1)
        return NormalDist().inv_cdf(1 - FALSE_ALARM / (2 * count))

    @property
    def refuting(self) -> list[Statistic]:
        return [s for s in self.statistics.values() if abs(s.z) > self.threshold]

    @property
    def passed(self) -> bool:
        return not self.refuting

    def power(self, s: Statistic) -> float:
        """Chance that this statistic alone passes the threshold under the residual bug."""
        normal, z = NormalDist(s.z_if_wrong), self.threshold
        return normal.cdf(-z) + 1 - normal.cdf(z)

    @property
    def best_power(self) -> float:
        return max((self.power(s) for s in self.statistics.values()), default=0.0)

    def summary(self, coupled: bool, speculates: bool) -> str:
        """What was found, over how many candidates, and what it says of the rule."""
        largest = max(self.statistics.values(), key=lambda s: abs(s.z))
        found = f"largest |z| {abs(largest.z):.1f} ({largest.name}), refuted above {self.threshold:.1f}"
        if not speculates:
            return f"{self.tokens} tokens of plain decoding; {found}"
        if not self.offered:
            return f"{self.tokens} tokens, and the method proposed nothing at any: plain decoding alone; {found}"
        stood = f"{self.tokens} tokens, candidates stood at {self.offered} of them"
        if not coupled:
            return f"{stood}; {found}; this rule asks no draft for probabilities: see exhaustive and seeded"
        if not self.drafted:
            return f"{stood}, all chosen and none drawn; {found}; for what rejected draws leave see exhaustive"
        power = f"power {self.best_power:.4f} against a wrong residual"
        return f"{stood}, drawn from a draft at {self.drafted}; {found}, {power}"

    def add(self, plain: Plain, sample: Sample) -> None:
        history = plain.history(sample.job)
        rows = plain.rows(sample.job.prompt, sample.tokens)
        sums: dict[str, float] = {}  # of this text
        self.texts += 1
        for row, token, draws in zip(rows, sample.tokens, sample.draws, strict=True):
            p = torch.softmax(history.process(row).double(), 0).cpu().numpy()
            self._token(p, token, draws, sums)
            history.append((token,))

    def _token(self, p: Array, token: int, draws: Sequence[Draw], sums: dict[str, float]) -> None:
        self.tokens += 1
        self.impossible += bool(p[token] == 0)
        sampled = [d for d in draws if d.row is not None]
        wrong = distribution_if_wrong(p, sampled)
        for name, f in WITHOUT_Q.items():
            self._count(name, f(p), p, wrong, token, sums)
        if not sampled:
            return
        self.drafted += 1
        q = spread(sampled[0], len(p))
        for name, g in WITH_Q.items():
            self._count(name, g(p, q), p, wrong, token, sums)
        if self.rule in TESTS_FIRST_DRAW:  # a rejected token is never drawn again, so equal means accepted
            accept = float(np.minimum(p, q).sum())
            self._statistic(ACCEPTED).add(float(token == sampled[0].token), accept, accept * (1 - accept), 0.0)

    def _count(self, name: str, f: Array, p: Array, wrong: Array, token: int, sums: dict[str, float]) -> None:
        mean = float(p @ f)
        variance = max(float(p @ (f - mean) ** 2), 0.0)
        shift = float(wrong @ f) - mean
        self._statistic(name).add(float(f[token]), mean, variance, shift)
        so_far = sums.get(name, 0.0)
        if so_far:
            sign = math.copysign(1.0, so_far)
            self._statistic(name + REPEATING).add(sign * float(f[token]), sign * mean, variance, sign * shift)
        sums[name] = so_far + float(f[token]) - mean

    def _statistic(self, name: str) -> Statistic:
        return self.statistics.setdefault(name, Statistic(name))

    def as_dict(self) -> dict[str, Any]:
        return {
            "texts": self.texts, "tokens": self.tokens, "offered": self.offered, "drafted": self.drafted,
            "impossible_tokens": self.impossible,
            "false_alarm": FALSE_ALARM, "threshold": self.threshold, "power_against_wrong_residual": self.best_power,
            "statistics": [
                {"name": s.name, "tokens": s.tokens, "z": s.z, "z_if_residual_wrong": s.z_if_wrong,
                 "power": self.power(s)}
                for s in self.statistics.values()
            ],
        }  # fmt: skip


def spread(draw: Draw, size: int) -> Array:
    q = np.zeros(size)
    assert draw.row is not None
    inside = draw.row.ids < size
    q[draw.row.ids[inside]] = draw.row.probs[inside]
    return q


def distribution_if_wrong(p: Array, draws: Sequence[Draw]) -> Array:
    """The token's distribution if every rejection fell back to p itself instead of what the rejection leaves of it."""
    probs, left = np.zeros_like(p), 1.0
    for draw in draws:
        both = np.minimum(p, spread(draw, len(p)))
        probs += left * both
        left *= 1.0 - float(both.sum())
    return probs + left * p


def run_martingale(sums: Martingale, subject: Subject, jobs: Sequence[Job], nodes: int | None, watch: Watch) -> None:
    """Changes `sums`: generates these texts in a ragged batch, always speculating, and adds them.

    `nodes` drafts fewer than the method would: most evidence lies at the first draft, and texts come sooner.
    """
    recorder = Recorder(subject.recipe.drafter) if subject.recipe.drafter is not None else None
    recipe = dataclasses.replace(subject.speculating(nodes), drafter=recorder)
    handles = [subject.engine.submit(job.prompt, job.params, recipe) for job in jobs]
    finish(subject.engine, handles, "sampling", watch)
    for job, handle in zip(jobs, handles, strict=True):
        tokens = handle.result().token_ids
        steps = recorder.steps_of(handle.sequences[0].history) if recorder else []
        sums.add(subject.plain, Sample(job, tokens, draws_along(steps, sums.rule) if recorder else [()] * len(tokens)))
        sums.offered += sum(bool(step.tree.draws[node]) for step, node in decided(steps))
        watch("recomputing the target's distribution", 0)


def draws_along(steps: Iterable[StepRecord], rule: str) -> list[tuple[Draw, ...]]:
    """For each emitted token of one sequence, the draws made where it was decided, where the rule allows their use."""
    return [step.tree.draws[node] if node == 0 or rule in NODE_BY_NODE else () for step, node in decided(steps)]


def decided(steps: Iterable[StepRecord]) -> Iterator[tuple[StepRecord, int]]:
    """For each emitted token, its step and the node at which it was decided."""
    for step in steps:
        for node in (0, *step.verdict.path)[: len(step.emitted)]:
            yield step, node


def _log(x: Array) -> Array:
    return np.log(np.maximum(x, 1e-300))
