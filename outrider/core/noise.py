"""Noise: three streams from one counter-based generator, the same integer bits on every device and in any batch.

Every key holds the seed, the sample's number, the stream, and a hash of all token ids before the decision. `draft` and
`verify` decide inside a step, whose text ends with the pending token; (node, draw) tells its decisions apart. `target`,
used by the drafter-invariant rule only, decides what stands behind a text, be it committed or a path in a tree.

What that guarantees, for any requests with one seed: two decisions share bits only if they are the same decision after
the same text. A text grows in every step, so no key comes twice in a request. A request whose prompt holds another's
whole output draws with bits that the other never used, whatever became of its own drafts: given how the first one went,
the second still has the target's distribution. A prompt that ends inside the other's output, where one of its steps
began, repeats that step's decisions, as a seed is meant to. `target` depends on nothing but seed, sample and text: a
sequence goes on with the same text after any interruption, with any drafter, tree or batch.

The generator is SplitMix64's mixing function applied to key + counter, so any value can be computed without the ones
before it.
"""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.protocols import Noise
from outrider.core.tree import TokenTree

MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
DRAFT, VERIFY, TARGET = 1, 2, 3
_BLOCK = 256  # weights summed together before a draw looks closer
_HIGH_WORD = 1 if sys.byteorder == "little" else 0  # of a 64-bit word seen as two of 32


def fresh_seed() -> int:
    return secrets.randbits(48)


def mix(x: int) -> int:
    """SplitMix64's finaliser on one 64-bit integer."""
    x &= MASK
    x = ((x ^ (x >> 30)) * _MIX1) & MASK
    x = ((x ^ (x >> 27)) * _MIX2) & MASK
    return x ^ (x >> 31)


def key(*parts: int, after: int = 0) -> int:
    """One 64-bit key from several integers; the order matters. `after` is the key of the ones before them."""
    state = after
    for part in parts:
        state = mix(state + _GOLDEN + _scattered(part))
    return state


@lru_cache(maxsize=1 << 14)
def _scattered(part: int) -> int:
    return mix(part + _GOLDEN)


@lru_cache(maxsize=4096)
def _stream_key(seed: int, sample: int, stream: int) -> int:
    return key(seed, sample, stream)


@lru_cache(maxsize=256)
def _step_key(seed: int, sample: int, stream: int, text: int) -> int:
    """What all keys of one step of one sequence have in common: made once, used for every node and draw."""
    return key(text, after=_stream_key(seed, sample, stream))


def text_hash(tokens: Sequence[int] | NDArray[np.int64], place: int = 0) -> int:
    """64 bits of a text; of a stretch that begins at `place`, what it adds to the hash of the text before it.

    The sum, modulo 2^64, of a word for each token at its place: any stretch can be added in one go.
    """
    if len(tokens) <= 16:  # an array is not worth its making
        return sum(_word(int(token), place + i) for i, token in enumerate(tokens)) & MASK
    words = _scattered_words(np.asarray(tokens, dtype=np.int64).astype(np.uint64))
    words += np.arange(place + 1, place + 1 + len(words), dtype=np.uint64) * np.uint64(_GOLDEN)
    return int(_words(0, words).sum(dtype=np.uint64))


def longer(text: int, token: int, place: int) -> int:
    """The hash of a text that goes on with this token, which stands at `place`."""
    return text + _word(token, place) & MASK


def _word(token: int, place: int) -> int:
    return mix(_scattered(token) + (place + 1) * _GOLDEN)


def uniform(bits: int) -> float:
    """52 bits to (0, 1), both ends open: with 53 the half no longer fits a float64 and the last value would be 1."""
    return ((bits >> 12) + 0.5) * 2.0**-52


def uniforms(stream: int, count: int, device: torch.device) -> Tensor:
    """[count] float64 uniforms in (0, 1) at counters 0 .. count of one key."""
    return (
        torch.from_numpy(_uniform(_bits(stream, count))) if device.type == "cpu" else _on_device(stream, count, device)
    )


def _on_device(stream: int, count: int, device: torch.device) -> Tensor:
    """The same numbers in torch."""
    return _mixed(_counters(count, device) + _signed(stream))


def _mixed(x: Tensor) -> Tensor:
    """Uniforms from counters; torch's integers have a sign, which right shifts drag in, so they are masked."""
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
    return _race_on_host(probs.numpy(), stream) if probs.device.type == "cpu" else _race_on_device(probs, stream)


def _race_on_device(probs: Tensor, stream: int) -> int:
    u = _on_device(stream, probs.numel(), probs.device)
    p = probs.double()
    favourite = p.argmax().view(1)
    bound = -torch.log1p(-u[favourite]) / p[favourite] * (1 + 1e-12)
    alive = torch.nonzero(u <= p * bound).flatten()
    times = -torch.log1p(-u[alive]) / p[alive]
    return int(alive[times.argmin()])


def _race_on_host(p: NDArray[np.floating], stream: int) -> int:
    """The same race, sieved by the leading 32 bits of u in float32 before any uniform is made: most of them lose."""
    bits = _bits(stream, len(p))
    favourite = int(p.argmax())
    bound = -math.log1p(-float(_uniform(bits[favourite]))) / float(p[favourite]) * (1 + 1e-12)
    reach = np.multiply(p, bound * 2.0**32 * (1 + 1e-6), dtype=np.float32, casting="same_kind")
    lead = bits.view(np.uint32)[_HIGH_WORD::2].astype(np.float32)  # at most u * 2^32, give or take rounding
    alive = np.nonzero(lead <= reach)[0]
    u, odds = _uniform(bits[alive]), p[alive].astype(np.float64)
    inside = u <= odds * bound  # drops what has no probability too
    times = -np.log1p(-u[inside]) / odds[inside]
    return int(alive[inside][times.argmin()])


def race_rows(probs: Tensor, keys: NDArray[np.uint64]) -> list[int]:
    """`race` of every row of [rows, V] with its own key, on the device where they lie and with one transfer."""
    return (_exponentials(on_device(keys, probs.device), probs.shape[1]) / probs.double()).argmin(1).tolist()


def race_scores(scores: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
    """[rows] `race` over the softmax of each row of [rows, V] at its temperature, by logarithms of the times.

    No distribution is made, so the token may be another where two times agree to about 1e-6: a softmax in float32 is
    rounded. Temperatures are float64; keys are 64 bits as integers with a sign. Nothing leaves the device.
    """
    times = _exponentials(keys, scores.shape[1]).log_()
    return times.sub_(scores.double() / temperatures[:, None]).argmin(1)


def on_device(keys: NDArray[np.uint64], device: torch.device) -> Tensor:
    """64 bits each, as torch's integers with a sign."""
    return torch.from_numpy(keys.view(np.int64)).to(device, non_blocking=True)


def _exponentials(keys: Tensor, count: int) -> Tensor:
    """[rows, count] float64: those of each key."""
    u = _mixed(_counters(count, keys.device) + keys[:, None])
    return torch.log1p(u.neg_()).neg_()


def target_keys(noises: Sequence[StreamNoise], trees: Sequence[TokenTree]) -> NDArray[np.uint64]:
    """`target_key` at every node of each tree, in node order, one tree behind the other."""
    sizes = [len(tree) for tree in trees]
    texts = np.repeat(np.array([noise.text for noise in noises], np.uint64), sizes)
    if max(sizes) > 1:
        first = np.repeat(np.cumsum(sizes) - sizes, sizes)
        depths = np.concatenate([tree.depths for tree in trees])
        above = np.concatenate([tree.parents for tree in trees]) + first
        places = np.repeat(np.array([noise.position for noise in noises]), sizes) + depths
        words = _scattered_words(np.concatenate([tree.tokens for tree in trees]).astype(np.uint64))
        words = _words(0, words + places.astype(np.uint64) * np.uint64(_GOLDEN))
        for depth in range(1, int(depths.max()) + 1):
            at = np.flatnonzero(depths == depth)
            texts[at] = texts[above[at]] + words[at]
    before = np.array([_stream_key(noise.seed, noise.sample, TARGET) for noise in noises], np.uint64)
    return _words(_GOLDEN, np.repeat(before, sizes) + _scattered_words(texts))


def _scattered_words(parts: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`_scattered` for arrays."""
    return _words(_GOLDEN, parts)


def race_order(probs: Tensor, path: Sequence[int], noise: Noise) -> Iterator[int]:
    """All tokens that have probability, in the order in which the target's noise behind `path` would choose them.

    A token that is taken out of a race does not change who wins it of the others. Changes `probs`.
    """
    while bool(probs.max() > 0):
        yield (token := noise.pick(probs, path))
        probs[token] = 0.0


@dataclass(frozen=True, slots=True)
class StreamNoise:
    """Noise for one slot and one step. `position` is where the first token of this step will stand."""

    seed: int
    sample: int
    stream: int
    text: int  # `text_hash` of all tokens so far, the pending one included
    position: int

    @property
    def key(self) -> int:
        """Of this stream in this step; node, draw and use (0: a coin, 1: a draw) come after it."""
        return _step_key(self.seed, self.sample, self.stream, self.text)

    def coin(self, p: float, node: int, draw: int) -> bool:
        return uniform(self._key(node, draw, 0)) < p

    def draw(self, weights: Tensor | NDArray[np.float64], node: int, draw: int) -> int:
        return inverse(weights, uniform(self._key(node, draw, 1)))

    def pick(self, probs: Tensor, path: Sequence[int]) -> int:
        return race(probs, self.target_key(path))

    def pick_rows(self, probs: Tensor, tree: TokenTree) -> list[int]:
        return race_rows(probs, target_keys([self], [tree]))

    def first(self, ids: NDArray[np.int64], probs: NDArray[np.float64], path: Sequence[int], count: int) -> list[int]:
        counters = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
        bits = _words(self.target_key(path), counters)
        times = -np.log1p(-_uniform(bits)) / np.maximum(probs, 1e-300)
        return np.argsort(times, kind="stable")[:count].tolist()

    def target_key(self, path: Sequence[int]) -> int:
        """Of the target's stream behind the text and these tokens after it."""
        text = self.text + text_hash(path, self.position) & MASK
        return key(text, after=_stream_key(self.seed, self.sample, TARGET))

    def _key(self, node: int, draw: int, use: int) -> int:
        return key(node, draw, use, after=self.key)


def inverse(weights: Tensor | NDArray[np.float64], u: float) -> int:
    """The index where the running sum of weights passes u times their total; never an index of zero weight.

    Always summed in one order on the host: a parallel scan need not be monotone, and would differ between devices. Long
    rows are summed by blocks, and in full only inside the block where the sum passes.
    """
    values = weights.cpu().numpy() if isinstance(weights, Tensor) else weights
    first, before, passed = 0, 0.0, None
    if len(values) <= 4 * _BLOCK and values.dtype == np.float64 and (index := _compiled_search()(values, u)) >= 0:
        return int(index)
    if len(values) > 4 * _BLOCK:
        blocks = np.add.reduceat(values, np.arange(0, len(values), _BLOCK), dtype=np.float64).cumsum()
        passed = u * blocks[-1]
        last = int(blocks.searchsorted(blocks[-1]))  # the last block that adds anything
        block = min(int(blocks.searchsorted(passed, side="right")), last)
        first, before = block * _BLOCK, float(blocks[block - 1]) if block else 0.0
        values = values[first : first + _BLOCK]
    sums = values.cumsum() if values.dtype == np.float64 else values.cumsum(dtype=np.float64)  # naming it costs a copy
    assert sums[-1] > 0, "no weight to draw from"
    if passed is None:
        index = int(sums.searchsorted(u * sums[-1], side="right"))
    else:
        index = int((sums + before).searchsorted(passed, side="right"))
    return first + (index if index < len(sums) else int(np.nonzero(values)[0][-1]))


def _search(values: NDArray[np.float64], u: float) -> int:
    """`inverse` of a short row, by the same sums; -1 where rounding, or no weight at all, needs a closer look."""
    total = 0.0
    for value in values:
        total += value
    passed, reached = u * total, 0.0
    for i in range(len(values)):
        reached += values[i]
        if reached > passed:
            return i
    return -1


@lru_cache(maxsize=1)
def _compiled_search() -> Callable[[NDArray[np.float64], float], int]:
    """Made when a short row is first drawn from: plain decoding does not wait for the compiler's import."""
    from outrider.core.numeric.compiled import compiled

    return compiled(_search)


def _bits(stream: int, count: int) -> NDArray[np.uint64]:
    """[count] the generator's words at counters 0 .. count of one key."""
    return _words(stream, _host_counters(count))


def _words(stream: int, counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = counters + np.uint64(stream)
    y = x >> np.uint64(30)
    x ^= y
    x *= np.uint64(_MIX1)
    x ^= np.right_shift(x, np.uint64(27), out=y)
    x *= np.uint64(_MIX2)
    x ^= np.right_shift(x, np.uint64(31), out=y)
    return x


def _uniform(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """`uniform` for arrays."""
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


@lru_cache(maxsize=8)
def _host_counters(count: int) -> NDArray[np.uint64]:
    return np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)


@lru_cache(maxsize=8)
def _counters(count: int, device: torch.device) -> Tensor:
    """SplitMix64 walks its counter in steps of the golden ratio."""
    return torch.arange(1, count + 1, dtype=torch.int64, device=device) * _signed(_GOLDEN)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
