"""Integers that grow at one end, and how often each of them occurred, without a look at all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Growing:
    """Integers in a buffer that doubles: appending is O(1) amortised, `view` copies nothing."""

    def __init__(self, values: Sequence[int] = ()) -> None:
        self._data = np.array(values, dtype=np.int64)
        self._size = len(values)

    @property
    def view(self) -> NDArray[np.int64]:
        return self._data[: self._size]

    def __len__(self) -> int:
        return self._size

    def append(self, value: int) -> None:
        self._reserve(self._size + 1)
        self._data[self._size] = value
        self._size += 1

    def extend(self, values: Sequence[int]) -> None:
        size = self._size + len(values)
        self._reserve(size)
        self._data[self._size : size] = values
        self._size = size

    def _reserve(self, size: int) -> None:
        if size > len(self._data):
            grown = np.empty(max(64, 2 * size), dtype=np.int64)
            grown[: self._size] = self.view
            self._data = grown


class Tally:
    """Distinct ids below `limit` and how often each occurred, so that a penalty never scans the context."""

    def __init__(self, tokens: Sequence[int], limit: int) -> None:
        self._limit = limit
        self._place: dict[int, int] = {}
        self._ids = Growing()
        self._counts = Growing()
        self.add(tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Changes state."""
        for token in tokens:
            if token < self._limit:
                if token not in self._place:
                    self._place[token] = len(self._place)
                    self._ids.append(token)
                    self._counts.append(0)
                self._counts.view[self._place[token]] += 1

    def plus(self, path: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids and counts as they would be with `path` appended: the same numbers, so the same bits, as after it is.

        Views where there is no path: do not keep them.
        """
        ids, counts = self._ids.view, self._counts.view
        if len(path):
            fresh = [t for t in dict.fromkeys(path) if t < self._limit and t not in self._place]
            place = {t: len(ids) + i for i, t in enumerate(fresh)}
            ids = np.concatenate([ids, np.array(fresh, dtype=np.int64)])
            counts = np.concatenate([counts, np.zeros(len(fresh), dtype=np.int64)])
            np.add.at(counts, [place.get(t, self._place.get(t, -1)) for t in path if t < self._limit], 1)
        return ids, counts
