"""Noise: three streams from one counter-based generator, the same integer bits on every device and in any batch.

`target` is keyed (seed, sample, absolute position) and used by the drafter-invariant rule only; `draft` and `verify`
are keyed (seed, sample, stream, step, node, draw) and never reused. The generator is SplitMix64's mixing function
applied to key + counter, so any value can be computed without the ones before it.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
DRAFT, VERIFY, TARGET = 1, 2, 3


def fresh_seed() -> int:
    return secrets.randbits(48)


def mix(x: int) -> int:
    """SplitMix64's finaliser on one 64-bit integer."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * _MIX1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX2) & _MASK
    return x ^ (x >> 31)


def key(*parts: int) -> int:
    """One 64-bit key from several integers; the order matters."""
    state = 0
    for part in parts:
        state = mix(state + _GOLDEN + mix(part + _GOLDEN))
    return state


def uniform(bits: int) -> float:
    """52 bits to (0, 1), both ends open: with 53 the half no longer fits a float64 and the last value would be 1."""
    return ((bits >> 12) + 0.5) * 2.0**-52


def uniforms(stream: int, count: int, device: torch.device) -> Tensor:
    """[count] float64 uniforms in (0, 1) at counters 0 .. count of one key."""
    x = _counters(count, device) + _signed(stream)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))).mul_(_signed(_MIX1))
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))).mul_(_signed(_MIX2))
    x ^= (x >> 31) & ((1 << 33) - 1)
    return ((x >> 12) & ((1 << 52) - 1)).double().add_(0.5).mul_(2.0**-52)


def race(probs: Tensor, stream: int) -> int:
    """argmin of E_x / p_x for independent exponentials E_x: index x with probability p_x, by the bits of one key.

    E = -log(1 - u) is never below u, so every token with u > p * (the favourite's time) has lost already; the
    logarithm is taken for the few that remain. The bound is widened by more than rounding can take from it, so that
    the favourite itself always remains.
    """
    u = uniforms(stream, probs.numel(), probs.device)
    p = probs.double()
    favourite = int(p.argmax())
    bound = -math.log1p(-float(u[favourite])) / float(p[favourite]) * (1 + 1e-12)
    alive = torch.nonzero(u <= p * bound).flatten()
    times = -torch.log1p(-u[alive]) / p[alive]
    return int(alive[times.argmin()])


@dataclass(frozen=True, slots=True)
class StreamNoise:
    """Noise for one slot and one step. `position` is where the first token of this step will stand."""

    seed: int
    sample: int
    stream: int
    step: int
    position: int

    def coin(self, p: float, node: int, draw: int) -> bool:
        return uniform(key(self.seed, self.sample, self.stream, self.step, node, draw, 0)) < p

    def draw(self, weights: Tensor | NDArray[np.float64], node: int, draw: int) -> int:
        u = uniform(key(self.seed, self.sample, self.stream, self.step, node, draw, 1))
        return inverse(weights, u)

    def pick(self, probs: Tensor, depth: int) -> int:
        return race(probs, key(self.seed, self.sample, TARGET, self.position + depth))


def inverse(weights: Tensor | NDArray[np.float64], u: float) -> int:
    """The index where the running sum of weights passes u times their total; never an index of zero weight.

    Always summed in order on the host: a parallel scan need not be monotone, and would differ between devices.
    """
    values = weights.cpu().double().numpy() if isinstance(weights, Tensor) else weights
    sums = np.cumsum(values, dtype=np.float64)
    assert sums[-1] > 0, "no weight to draw from"
    index = int(np.searchsorted(sums, u * sums[-1], side="right"))
    return index if index < len(sums) else int(np.nonzero(values)[0][-1])


@lru_cache(maxsize=8)
def _counters(count: int, device: torch.device) -> Tensor:
    """SplitMix64 walks its counter in steps of the golden ratio."""
    return torch.arange(1, count + 1, dtype=torch.int64, device=device) * _signed(_GOLDEN)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
