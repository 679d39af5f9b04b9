"""Which request is in which row of a batch, for engines that hand over rows of tokens without names.

A row that goes on with the text it held is the same request; rows are moved when others end, so a text that is not
where it was is looked for in all of them. Two requests with the same text are as good as exchanged: drafts are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


@dataclass(slots=True)
class RowNames:
    """Numbers for requests, each of which keeps its own from step to step."""

    _texts: dict[int, Tokens] = field(default_factory=dict)  # by number, as they were
    _rows: dict[int, int] = field(default_factory=dict)  # row -> number, at the last call
    _made: int = 0

    def names(self, rows: Sequence[int], texts: Sequence[Tokens]) -> list[int]:
        """Changes state: the number of the request in each of these rows, a new one where the text is new."""
        left = dict(self._texts)
        found: list[int | None] = []
        for row, text in zip(rows, texts, strict=True):
            number = self._rows.get(row)
            found.append(number if number in left and _goes_on(left[number], text) else None)
            if found[-1] is not None:
                del left[found[-1]]
        names = []
        for number, text in zip(found, texts, strict=True):
            if number is None:
                number = next((one for one, before in left.items() if _goes_on(before, text)), None)
                if number is None:
                    number = self._made
                    self._made += 1
                else:
                    del left[number]
            names.append(number)
        self._texts = dict(zip(names, texts, strict=True))
        self._rows = dict(zip(rows, names, strict=True))
        return names


def _goes_on(before: Tokens, text: Tokens) -> bool:
    """Whether the text begins with what it was; the end is compared first, for there two texts differ."""
    size = len(before)
    return len(text) >= size and before[-1] == text[size - 1] and np.array_equal(before, text[:size])
