"""A pool of n-grams by their first token: bounded in bytes, the least recently seen ones leave first.

Organised as a processor's cache is: the first token names a set, a set has a fixed number of places, and a newcomer
takes the place of the oldest n-gram of its own token once that has its share, else of the oldest in the set. So nothing
ever grows, and finding or adding costs one pass over one set.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import InputError
from outrider.core.numeric.compiled import compiled

CROWD = 4  # first tokens that can fill their share of one set


def check_room(limit: int, size: int, share: int) -> None:
    """Refuse so few bytes that not even one set fits."""
    if limit < (least := _bytes_of_a_set(size, share)):
        raise InputError(f"a pool of {limit} bytes holds no n-grams; give it {least} bytes or more")


def _bytes_of_a_set(size: int, share: int) -> int:
    return CROWD * share * (4 * size + 8)


@dataclass(slots=True)
class NgramPool:
    size: int  # tokens an n-gram, the first one included
    share: int  # n-grams kept for one first token
    limit: int = 4 << 20  # bytes
    _grams: NDArray[np.int32] = field(init=False)  # [sets, places, size]
    _stamps: NDArray[np.int64] = field(init=False)  # [sets, places], when last seen; 0: empty
    _clock: int = 0

    def __post_init__(self) -> None:
        check_room(self.limit, self.size, self.share)
        places = CROWD * self.share
        sets = self.limit // _bytes_of_a_set(self.size, self.share)
        self._grams = np.zeros((sets, places, self.size), dtype=np.int32)
        self._stamps = np.zeros((sets, places), dtype=np.int64)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._stamps))

    @property
    def bytes(self) -> int:
        return self._grams.nbytes + self._stamps.nbytes

    def add(self, grams: NDArray[np.int64]) -> None:
        """[k, size], the most recent last. Changes state."""
        _add(self._grams, self._stamps, self._clock, grams, self.share)
        self._clock += len(grams)

    def add_text(self, tokens: NDArray[np.int64], start: int) -> None:
        """The n-grams of a text that end at position `start` or later. Changes state."""
        new = tokens[max(start - self.size + 1, 0) :]
        if len(new) >= self.size:
            self.add(np.lib.stride_tricks.sliding_window_view(new, self.size))

    def find(self, first: int, count: int) -> NDArray[np.int64]:
        """[<= count, size - 1] what follows `first`, the most recently seen first. Does not change state."""
        return _find(self._grams, self._stamps, first, count)

    def all(self) -> NDArray[np.int32]:
        """[k, size], the most recently seen last."""
        used = self._stamps > 0
        return self._grams[used][np.argsort(self._stamps[used], kind="stable")]

    def clear(self) -> None:
        self._stamps[:] = 0


@compiled
def _set_of(first: int, sets: int) -> int:
    return ((first * 2654435761) & 0xFFFFFFFF) % sets


@compiled
def _add(table: NDArray[np.int32], stamps: NDArray[np.int64], clock: int, grams: NDArray[np.int64], share: int) -> None:
    sets, places, size = table.shape
    for i in range(len(grams)):
        gram = grams[i]
        held = table[_set_of(gram[0], sets)]
        seen = stamps[_set_of(gram[0], sets)]
        same, oldest, oldest_same, at = 0, 0, -1, -1
        for j in range(places):
            if seen[j] < seen[oldest]:
                oldest = j
            if seen[j] and held[j, 0] == gram[0]:
                same += 1
                if oldest_same < 0 or seen[j] < seen[oldest_same]:
                    oldest_same = j
                equal = True
                for k in range(1, size):
                    equal &= held[j, k] == gram[k]
                if equal:
                    at = j
                    break
        if at < 0:
            at = oldest_same if same >= share else oldest
            for k in range(size):
                held[at, k] = gram[k]
        seen[at] = clock + i + 1


@compiled
def _find(table: NDArray[np.int32], stamps: NDArray[np.int64], first: int, count: int) -> NDArray[np.int64]:
    sets, places, size = table.shape
    held, seen = table[_set_of(first, sets)], stamps[_set_of(first, sets)]
    out = np.empty((count, size - 1), dtype=np.int64)
    before = np.int64(0x7FFFFFFFFFFFFFFF)
    for found in range(count):
        best = -1
        for j in range(places):
            if 0 < seen[j] < before and held[j, 0] == first and (best < 0 or seen[j] > seen[best]):
                best = j
        if best < 0:
            return out[:found]
        before = seen[best]
        for k in range(1, size):
            out[found, k - 1] = held[best, k]
    return out
