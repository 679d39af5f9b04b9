"""Gamma: how long a chain should be, from how sure its first tokens were and from what a step of this target takes.

SpecKV's controller (arXiv 2605.02888). A network of one hidden layer maps the drafter's entropy and confidence over the
tokens drafted so far, the target's precision and a candidate length to the share of the chain that is accepted. The
length with most expected tokens a second is taken; the paper's own objective, most expected tokens, has no time in it
and is there as `paper`. Learns from the steps themselves: every so often a whole chain shows what each length would
have brought. Lossless: lengths follow from past steps and from tokens that stay. Cost: tens of microseconds a decision,
some milliseconds every `refit` steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import InputError

LENGTHS = (2, 4, 6, 8)
UNITS, FEATURES = 16, 4  # of the hidden layer; mean and largest entropy, mean and least confidence
CODES = {"float32": 0.0, "bfloat16": 0.0, "float16": 0.0, "int8": 1.0, "int8-weights": 1.0, "int4": 2.0}
Floats = NDArray[np.float64]


class ShareNet:
    """Inputs, standardised and kept within what was seen -> the share of a chain that is accepted."""

    def __init__(self, inputs: int, seed: int = 42) -> None:
        rng = np.random.default_rng(seed)
        self.weights = [
            rng.normal(0, (2 / inputs) ** 0.5, (inputs, UNITS)), np.zeros(UNITS),
            rng.normal(0, (1 / UNITS) ** 0.5, UNITS), np.full(1, 0.5),
        ]  # fmt: skip
        self.low, self.high = np.zeros(inputs), np.zeros(inputs)
        self.mean, self.scale = np.zeros(inputs), np.ones(inputs)
        self._moments = [(np.zeros_like(w), np.zeros_like(w)) for w in self.weights]
        self._steps, self._rng = 0, rng

    def shares(self, x: Floats) -> Floats:
        """[n, inputs] -> [n], from 0 to 1."""
        return np.clip(self._forward(x)[1], 0.0, 1.0)

    def fit(self, x: Floats, y: Floats, steps: int, batch: int = 512, rate: float = 3e-3) -> None:
        """Changes state: squared loss by Adam, from where it is."""
        self.low, self.high = x.min(0), x.max(0)
        self.mean, self.scale = x.mean(0), np.maximum(x.std(0), 1e-6)
        for _ in range(steps):
            rows = self._rng.integers(0, len(x), min(batch, len(x)))
            hidden, said, given = *self._forward(x[rows]), self._standardised(x[rows])
            error = 2 * (said - y[rows]) / len(rows)
            back = np.outer(error, self.weights[2]) * (hidden > 0)
            self._adam([given.T @ back, back.sum(0), hidden.T @ error, error.sum(keepdims=True)], rate)

    def _standardised(self, x: Floats) -> Floats:
        return (np.clip(x, self.low, self.high) - self.mean) / self.scale

    def _forward(self, x: Floats) -> tuple[Floats, Floats]:
        first, bias, second, offset = self.weights
        hidden = np.maximum(self._standardised(x) @ first + bias, 0.0)
        return hidden, hidden @ second + offset[0]

    def _adam(self, gradients: Sequence[Floats], rate: float) -> None:
        self._steps += 1
        for weight, gradient, (mean, square) in zip(self.weights, gradients, self._moments, strict=True):
            mean += 0.1 * (gradient - mean)
            square += 0.001 * (gradient * gradient - square)
            corrected = mean / (1 - 0.9**self._steps)
            weight -= rate * corrected / (np.sqrt(square / (1 - 0.999**self._steps)) + 1e-8)


@dataclass(slots=True)
class GammaLength:
    """Chooses among `LENGTHS`, each in reach of a chain that has so many tokens already."""

    step_seconds: Callable[[int], float]  # of the target's step, by rows
    draft_seconds: Callable[[], float]  # of one drafted token; 0 while unknown
    precision: str = "float32"
    paper: bool = False  # most expected tokens: not a speed
    explore: int = 16  # chains of which one is drafted whole
    refit: int = 128  # whole chains between two fits; the first after a quarter of them
    keep: int = 4096  # whole chains
    _log: list[Floats] = field(default_factory=list)  # of each: features of its first 2, 4, .. tokens, code, accepted
    _net: ShareNet | None = None
    _chains: int = 0
    _unfitted: int = 0

    def takes_whole(self) -> bool:
        """Changes state: whether the chain that begins now is to be drafted whole."""
        self._chains += 1
        return self._net is None or self._chains % self.explore == 0

    def length(self, features: Floats, drafted: int) -> int:
        """For a chain whose `drafted` tokens have these features; of equals the shorter."""
        if self._net is None:
            return LENGTHS[-1]
        reach = [length for length in LENGTHS if length >= drafted] or [drafted]
        x = np.array([self._inputs(features, CODES.get(self.precision, 0.0), drafted, length) for length in reach])
        expected = 1.0 + self._net.shares(x) * np.array(reach)
        if not self.paper:
            draft = self.draft_seconds()
            expected = expected / np.array([length * draft + self.step_seconds(length + 1) for length in reach])
        return reach[int(expected.argmax())]

    def observe(self, features: Sequence[Floats], accepted: int) -> None:
        """Changes state: of a whole chain, the features of its first 2, 4, .. tokens, and how many stood."""
        code = CODES.get(self.precision, 0.0)
        self._log.append(np.concatenate([*features, [code, float(accepted)]]))
        del self._log[: -self.keep]
        self._unfitted += 1
        if self._unfitted >= (self.refit if self._net is not None else self.refit // 4):
            self._unfitted = 0
            self._fit(steps=60 if self._net is not None else 400)

    def _fit(self, steps: int) -> None:
        x, y = examples(np.stack(self._log))
        if self._net is None:
            self._net = ShareNet(x.shape[1])
        self._net.fit(x, y, steps)

    @staticmethod
    def _inputs(features: Floats, code: float, drafted: int, length: int) -> Floats:
        return np.concatenate([features, [code, float(drafted), float(length)]])

    def memory(self) -> dict[str, NDArray[Any]]:
        """The chains that were drafted whole, in whatever precision."""
        return {"chains": np.stack(self._log)} if self._log else {}

    def remember(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        chains = arrays.get("chains")
        if chains is None:
            return
        if chains.ndim != 2 or chains.shape[1] != len(LENGTHS) * FEATURES + 2:
            raise InputError("the memory of chain lengths is of another form; remove the file")
        self._log = [row.astype(np.float64) for row in chains[-self.keep :]]
        if len(self._log) >= self.refit // 4:
            self._fit(steps=400)

    def forget(self) -> None:
        self._log, self._net, self._unfitted = [], None, 0


def examples(chains: Floats) -> tuple[Floats, Floats]:
    """Of whole chains: what was known after each number of tokens, with every length from there, and the share of that
    length that stood."""
    codes, accepted = chains[:, -2], chains[:, -1]
    inputs, shares = [], []
    for place, drafted in enumerate(LENGTHS):
        known = chains[:, place * FEATURES : (place + 1) * FEATURES]
        for length in LENGTHS[place:]:
            more = np.column_stack([codes, np.full(len(chains), drafted), np.full(len(chains), length)])
            inputs.append(np.hstack([known, more]))
            shares.append(np.minimum(accepted, length) / length)
    return np.vstack(inputs), np.concatenate(shares)
