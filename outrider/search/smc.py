"""Particles: several texts that are drawn under a constraint side by side, weighed, and resampled where weights differ.

Masking each token alone is short-sighted: it goes happily where little legal probability is left. Here every particle
carries the product of the legal shares it met (of a mask exactly, of a predicate by an unbiased estimate: AWRS,
arXiv 2504.05410). Where the effective number of particles falls below `threshold` of them they are drawn anew in
proportion to their weights: those with a future are continued several times, each from a fork of the slot that shares
what is in the cache. `log_normaliser` is the logarithm of an unbiased estimate of the probability that the model alone
says something legal; the weighted texts are the model's, conditioned on that, as the number of particles grows (biased
for few). Samples without resampling (`threshold=0`) are those that the engine draws with the same seed.

Runs on the target itself, a row a particle in one pass; nothing is drafted. A text that is cut by its greatest length
counts as legal as far as it went. Deterministic for a seed.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.core.engine import Engine
from outrider.core.errors import EmptySupport, InputError, OutriderError
from outrider.core.generation import Generation
from outrider.core.noise import TARGET, VERIFY, fresh_seed, key, uniform
from outrider.core.params import SamplingParams
from outrider.core.protocols import Constraints, Predicate
from outrider.core.records import NO_NEEDS, Piece, Scores, Verdict
from outrider.core.schedule import run_all
from outrider.core.sequence import Running
from outrider.core.together import acting_late, split, with_form
from outrider.core.tree import root


class Weighs(Predicate, Protocol):
    """A predicate that also estimates how likely a legal token was."""

    def weighed(
        self, output: Sequence[int], order: Iterator[int], probs: NDArray[np.float64]
    ) -> tuple[int | None, float]: ...  # fmt: skip


@dataclass(slots=True, eq=False)
class _Particle:
    running: Running
    log_weight: float = 0.0

    @property
    def going(self) -> bool:
        return not self.running.done and self.log_weight > -math.inf


@dataclass(frozen=True, slots=True)
class Weighted:
    """One text and its share among the particles; shares sum to 1."""

    generation: Generation
    weight: float


@dataclass(frozen=True, slots=True)
class Population:
    texts: list[Weighted]  # heaviest first; those of weight 0 are left out
    log_normaliser: float  # of an unbiased estimate of the chance that the model alone says something legal
    effective: float  # 1 / the sum of squared shares: how many equal particles these are worth
    resampled: int  # times


def particles(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, constraint: Constraints | None = None,
    count: int = 8, threshold: float = 0.5, on_step: Callable[[int], bool | None] | None = None,
) -> Population:  # fmt: skip
    """Draws `count` particles on the engine's target, which must have as many free slots.

    The constraint is the form that the parameters ask for, an automaton, a predicate, or several of these. `on_step` is
    told how many tokens there are, and ends it there by answering True.
    """
    return _Run(engine, prompt, params, constraint, count, threshold).finish(on_step)


class _Run:
    """Changes the target's slots while it runs, and gives all of them back."""

    def __init__(
        self, engine: Engine, prompt: Sequence[int], params: SamplingParams, constraint: Constraints | None,
        count: int, threshold: float,
    ) -> None:  # fmt: skip
        target = engine.target
        if engine.busy:
            raise OutriderError("particles run on the engine's target itself; let its requests end first")
        if params.greedy or params.top_k or params.top_p < 1 or params.min_p:
            raise InputError("particles need a temperature above 0, and the whole distribution: no top_k, top_p, min_p")
        if not 1 <= count <= target.free_slots:
            free = target.free_slots
            raise InputError(f"{count} particles, but {free} slots are free: ask for 1 to {free}, or raise max_slots")
        if not 0 <= threshold <= 1:
            raise InputError(f"a resampling threshold of {threshold}: use 0 (never) to 1 (after every token)")
        reshaping, automaton = split(with_form(params, constraint, engine.compile_form))
        bound, predicate = acting_late(constraint)
        if bound is not None or (automaton is None and predicate is None):
            raise InputError("particles need a grammar or a predicate, and no bound beside it")
        if predicate is not None and not hasattr(predicate, "weighed"):
            raise InputError("this predicate does not weigh tokens; give one of outrider.constrain.predicate")
        self.target, self.count, self.threshold = target, count, threshold
        self.seed = fresh_seed() if params.seed is None else params.seed
        self.log_normaliser, self.resampled, self.tokens = 0.0, 0, 0
        self.prompt = tuple(int(token) for token in prompt)
        one = Running(
            self.prompt, replace(params, n=1), engine.recipe, self.seed, 0, engine.eos_ids, target.vocab_size,
            target.max_context, engine.decode, reshaping, automaton, predicate=predicate,
        )  # fmt: skip
        self.particles = [_Particle(_twin(one, sample)) for sample in range(count)]

    def finish(self, on_step: Callable[[int], bool | None] | None) -> Population:
        try:
            self._begin()
            while any(p.going for p in self.particles):
                self._step()
                self._resample()
                if on_step is not None and on_step(self.tokens):
                    break
            self._settle()
            return self._population()
        finally:
            for p in self.particles:
                self._free(p)

    def _begin(self) -> None:
        first = self.target.acquire(self.prompt[:-1])
        self.particles[0].running.slot = first
        held = self.target.length(first)
        run_all(self.target, [(first, self.prompt[held:-1])])
        for p in self.particles[1:]:
            p.running.slot = self.target.fork(first)

    def _step(self) -> None:
        """A token for every particle that goes on, from one pass."""
        going = [p for p in self.particles if p.going]
        pieces = [Piece(p.running.slot, tree=root(p.running.pending)) for p in going]
        for p, scores in zip(going, self.target.run(pieces, NO_NEEDS), strict=True):
            self._extend(p, scores)
        alive = [p for p in going if p.going]
        self.target.commit([p.running.slot for p in alive], [()] * len(alive))
        for p in going:
            if not p.going:
                self._free(p)
        self.tokens += 1

    def _extend(self, p: _Particle, scores: Scores) -> None:
        s = p.running
        tree = root(s.pending)
        rows = s.rows(scores, tree)
        try:
            token: int | None
            weight = 1.0
            if s.predicate is not None:
                order, probs = rows.order(0)
                weigher: Weighs = s.predicate  # type: ignore[assignment]
                token, weight = weigher.weighed(tuple(s.history.output), order, probs.cpu().numpy())
            else:
                token = s.noise(TARGET).pick(rows.probs(0), ())
        except EmptySupport:
            token = None
        if token is None:
            p.log_weight = -math.inf
            return
        if s.history.legal is not None:
            weight *= _legal_share(s, scores)
        p.log_weight += math.log(weight) if weight > 0 else -math.inf
        s.emit(tree, Verdict((), token), rows)

    def _resample(self) -> None:
        """Where the effective number is too small; systematic: a share of w is drawn w * count times, up or down."""
        shares, total = self._shares()
        if not total or not any(p.going for p in self.particles) or _effective(shares) >= self.threshold * self.count:
            return
        start = uniform(key(self.seed, self.count, VERIFY, self.tokens))
        places = (np.arange(self.count) + start) / self.count
        drawn = np.minimum(np.searchsorted(np.cumsum(shares), places, side="right"), self.count - 1)
        copies = np.bincount(drawn, minlength=self.count)
        self.log_normaliser += math.log(total / self.count)
        self.resampled += 1
        kept = self.particles
        empty = [i for i in range(self.count) if not copies[i]]
        for i in empty:
            self._free(kept[i])
        for i, times in enumerate(copies.tolist()):
            for _ in range(times - 1):
                kept[empty.pop(0)] = self._clone(kept[i], sample=0)
        for sample, p in enumerate(kept):
            p.running.sample, p.log_weight = sample, 0.0

    def _clone(self, p: _Particle, sample: int) -> _Particle:
        twin = _Particle(_twin(p.running, sample))
        if p.going:
            twin.running.slot = self.target.fork(p.running.slot)
        return twin

    def _settle(self) -> None:
        """Text that was held back comes out."""
        for p in self.particles:
            s = p.running
            s.stats.new_tokens = s.stats.steps = s.history.generated
            if s.finish is not None:
                s.close(s.finish)

    def _shares(self) -> tuple[NDArray[np.float64], float]:
        """Of the particles, and the sum of the weights."""
        weights = np.exp([p.log_weight for p in self.particles])
        total = float(weights.sum())
        return (weights / total if total else weights), total

    def _population(self) -> Population:
        shares, total = self._shares()
        if not total:
            raise EmptySupport(f"all {self.count} particles met a dead end: ask for more, or loosen the constraint")
        texts = [
            Weighted(p.running.generation(), float(share))
            for p, share in zip(self.particles, shares, strict=True)
            if share > 0
        ]
        texts.sort(key=lambda one: -one.weight)
        log_normaliser = self.log_normaliser + math.log(total / self.count)
        return Population(texts, log_normaliser, _effective(shares), self.resampled)

    def _free(self, p: _Particle) -> None:
        if p.running.slot >= 0:
            self.target.release(p.running.slot)
            p.running.slot = -1


def _twin(s: Running, sample: int) -> Running:
    """The same text as another sample, without a slot."""
    twin = replace(
        s, sample=sample, slot=-1, origins=list(s.origins), logprobs=list(s.logprobs), pieces=deque(s.pieces),
    )  # fmt: skip
    twin.drafter = None
    twin.stats = copy.copy(s.stats)
    twin.history.append(s.history.output)
    twin.text = copy.deepcopy(s.text, {id(s.decode): s.decode})
    return twin


def _legal_share(s: Running, scores: Scores) -> float:
    """Of the model's distribution at the pending token, what the mask left."""
    assert scores.logits is not None
    row = s.history.seen(scores.logits[0], (), ())
    if row.legal is None:
        return 1.0
    bits = np.unpackbits(row.legal.view(np.uint8), bitorder="little")[: len(row.probs)].view(bool)
    return float(row.probs[bits].sum())


def _effective(shares: NDArray[np.float64]) -> float:
    return 1.0 / float((shares**2).sum()) if shares.any() else 0.0
