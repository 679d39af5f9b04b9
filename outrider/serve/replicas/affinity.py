"""Which of several engines a text goes to: one that has run its beginning, unless that one has too much to do."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

BLOCK = 32  # tokens: shorter beginnings are not worth a longer way
KNOWN = 100_000  # beginnings that are remembered
AHEAD = 4  # requests that the engine with the beginning may have more than the idlest


def beginnings(tokens: Sequence[int], salt: str = "") -> list[str]:
    """A name for each beginning of whole blocks, shortest first; texts with another salt share none."""
    names, hashed = [], blake2b(salt.encode(), digest_size=12)
    whole = np.array(tokens[: len(tokens) // BLOCK * BLOCK], dtype=np.int64)
    for block in range(0, len(whole), BLOCK):
        hashed.update(whole[block : block + BLOCK].tobytes())
        names.append(hashed.hexdigest())
    return names


@dataclass(slots=True)
class Affinity:
    """Changes state with every choice. Not for two threads."""

    _homes: OrderedDict[str, Hashable] = field(default_factory=OrderedDict)  # beginning -> engine
    _running: Counter[Hashable] = field(default_factory=Counter)  # requests by engine
    _rng: random.Random = field(default_factory=random.Random)

    def order(self, names: Sequence[str], engines: Collection[Hashable]) -> list[Hashable]:
        """The engines, the best first: the one with the longest beginning, then those with the least to do."""
        idle = sorted(engines, key=lambda engine: (self._running[engine], self._rng.random()))
        for name in reversed(names):
            home = self._homes.get(name)
            if home in engines:
                if self._running[home] <= self._running[idle[0]] + AHEAD:
                    return [home, *(engine for engine in idle if engine != home)]
                break
        return idle

    def sent(self, names: Sequence[str], engine: Hashable) -> None:
        """The request went there."""
        self._running[engine] += 1
        for name in names:
            self._homes[name] = engine
            self._homes.move_to_end(name)
        while len(self._homes) > KNOWN:
            self._homes.popitem(last=False)

    def done(self, engine: Hashable) -> None:
        self._running[engine] -= 1
        if self._running[engine] <= 0:
            del self._running[engine]
