"""Cost model: seconds of a target's step by its rows, from a curve measured once and corrected by what steps take.

The curve knows sizes that were never tried, the steps know this context, this batch and what else the machine does; the
correction is the ratio of the two at the sizes seen, carried over to their neighbours. Sizes up to the same power of
two count together, so that a longer context is noticed within a few steps. A size seen once or twice counts as all
others do: what is made ready at its first step would otherwise keep it from ever being tried again; and one not seen
for long is forgotten, so that a slow spell of the machine cannot keep it from being tried again. Fewer rows are
never taken to cost more, for they could be run as more. A target that pads its steps says to what: rows that it would
run anyway cost nothing, and the first one beyond them what it does. Where a runtime goes on for some steps in the size
of a wide one, a plain step counts only when it is settled or faster than expected. There is one for each target, fed by
every step of every method. Changes no output. Estimates are made anew every few steps, which takes microseconds.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ENOUGH = 3  # steps of a size that tell what it costs
WINDOW = 2 * ENOUGH - 1  # of them that are remembered: so many new ones outweigh the old
PERIOD = 8  # steps after which estimates are made anew
OLD = 64  # steps after which a size that was not among them is forgotten
SETTLED = 8  # plain steps in a row after which a runtime has forgotten a wider one


class _Step(NamedTuple):
    time: int  # its number
    rows: int
    ratio: float  # seconds, seen by expected


@dataclass(slots=True)
class CostModel:
    curve: Callable[[int], float]  # seconds by rows in all; more never cost less
    width: Callable[[int], int] | None = None  # rows that a step of a single sequence runs for so many; None: as many
    even: bool = True  # a plain step costs the same behind a wide one as behind another
    _in_a_row: int = SETTLED  # plain steps; nothing wide was there before the first step
    _seen: dict[int, dict[int, deque[_Step]]] = field(default_factory=dict)  # by batch and size
    _known: dict[int, NDArray[np.float64]] = field(default_factory=dict)  # by batch: what `seconds` says
    _unread: dict[int, int] = field(default_factory=dict)  # by batch: steps that it does not know of yet
    _steps: int = 0
    _expected: NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))  # by rows

    def add(self, rows: int, batch: int, seconds: float) -> None:
        """Changes state: a step of `rows` in all over `batch` sequences took so long."""
        self._in_a_row = self._in_a_row + 1 if rows <= batch else 0
        settled = self.even or rows > batch or self._in_a_row > SETTLED or batch not in self._seen
        if not settled and seconds >= self.seconds(batch, 0)[0]:
            return
        seen = self._seen.setdefault(batch, defaultdict(lambda: deque(maxlen=WINDOW)))
        rows = rows if batch > 1 or self.width is None else self.width(rows)
        self._steps += 1
        seen[_size(rows)].append(_Step(self._steps, rows, seconds / float(self._expect(rows)[rows])))
        self._unread[batch] = self._unread.get(batch, 0) + 1

    def seconds(self, batch: int, most: int) -> NDArray[np.float64]:
        """[most + 1]: steps of `batch` sequences with 0, 1, ... candidates in all."""
        known = self._known.get(batch)
        if known is None or len(known) <= most or self._unread.get(batch, 0) >= PERIOD:
            most_known = most if known is None else max(most, len(known) - 1)
            known = self._known[batch] = self._estimate(batch, most_known)
            self._unread[batch] = 0
        return known[: most + 1]

    def _estimate(self, batch: int, most: int) -> NDArray[np.float64]:
        rows = self._run(batch, batch + most, batch)
        every = self._expect(int(rows[-1]))[rows] * np.interp(rows, *self._corrections(batch))
        return np.ascontiguousarray(np.minimum.accumulate(every[::-1])[::-1])  # as compiled code was made ready for

    def _run(self, first: int, last: int, batch: int) -> NDArray[np.int64]:
        """What steps of `first` to `last` rows run."""
        rows = np.arange(first, last + 1)
        return rows if batch > 1 or self.width is None else np.array([self.width(own) for own in rows.tolist()])

    def _corrections(self, batch: int) -> tuple[list[float], list[float]]:
        """By rows at the sizes that are known well: linear between them, flat beyond."""
        seen = self._seen.get(batch)
        if not seen:
            return [0.0], [1.0]
        last = max(steps[-1].time for steps in seen.values())  # stays, in a batch that was not met for long too
        for size in [size for size, steps in seen.items() if steps[-1].time < min(last, self._steps - OLD)]:
            del seen[size]
        known = [steps for _, steps in sorted(seen.items()) if len(steps) >= ENOUGH]
        if not known:
            return [0.0], [median(own.ratio for steps in seen.values() for own in steps)]
        sizes = [median(own.rows for own in steps) for steps in known]
        return sizes, [median(own.ratio for own in steps) for steps in known]

    def _expect(self, rows: int) -> NDArray[np.float64]:
        """What the curve says of 0 to at least `rows` rows."""
        if rows >= len(self._expected):
            more = [max(self.curve(r), 1e-9) for r in range(len(self._expected), rows + 1)]
            self._expected = np.concatenate([self._expected, more])
        return self._expected


def _size(rows: int) -> int:
    """1, 2, 3 to 4, 5 to 8, ...: steps of about the same size, which runtimes make the same."""
    return (rows - 1).bit_length()
