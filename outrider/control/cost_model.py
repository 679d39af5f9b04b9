"""Cost model: seconds of a target's step by its rows, from a curve measured once and corrected by what steps take.

The curve covers sizes that were never tried; the steps reflect this context, this batch and the machine's load. The
correction is the ratio of the two at the sizes seen, interpolated between them. There is one model for each target, fed
by every step of every method. Changes no output. Cost: estimates are made anew every few steps, in microseconds.

- Sizes up to the same power of two count together, and so do texts of about the same length; a size that was not seen
  at this length takes its correction from the nearest length at which it was.
- A size that was seen only once or twice has no correction of its own yet: its first step may have compiled something,
  and that must not keep it from being tried again. One not seen for long is forgotten, for the same reason.
- Fewer rows never cost more than more rows do, for they could be padded to them.
- A target that pads its steps says to what (`width`): rows that it runs anyway cost nothing.
- Of a mixture model it knows what each expert costs that a step touches (`experts.py`): a text whose rows begin to
  choose different experts makes wide steps more expensive at once, at sizes that were not run since, too.
- Where a runtime runs for some steps in the size of a wide one, a plain step counts only after others in a row, or if
  it was faster than expected.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.control.experts import ExpertUse

ENOUGH = 3  # steps of a size that tell what it costs
WINDOW = 2 * ENOUGH - 1  # steps of a size that are remembered: ENOUGH new ones outweigh the old
PERIOD = 8  # steps after which estimates are made anew
OLD = 64  # steps after which a size that was not among them is forgotten
SHORT = 256  # tokens of text below which lengths make no difference
SETTLED = 8  # plain steps in a row after which a runtime has forgotten a wider one


class _Step(NamedTuple):
    time: int  # its number
    rows: int
    ratio: float  # seconds, seen by expected


class Kind(NamedTuple):
    """Steps that are taken to cost the same for the same rows."""

    batch: int
    length: int  # of a text, as a power of two

    @classmethod
    def of(cls, batch: int, context: int) -> Kind:
        return cls(batch, (context // max(batch, 1) // SHORT).bit_length())


@dataclass(slots=True)
class CostModel:
    curve: Callable[[int], float]  # seconds by rows in all; more never cost less
    width: Callable[[int], int] | None = None  # rows that a step of a single sequence runs for so many; None: as many
    even: bool = True  # a plain step costs the same behind a wide one as behind another
    experts: ExpertUse | None = None  # of a mixture model
    _in_a_row: int = SETTLED  # plain steps; nothing wide was there before the first step
    _seen: dict[Kind, dict[int, deque[_Step]]] = field(default_factory=dict)  # by size
    _known: dict[Kind, NDArray[np.float64]] = field(default_factory=dict)  # what `seconds` says
    _unread: dict[Kind, int] = field(default_factory=dict)  # steps since it was worked out
    _steps: int = 0
    _expected: NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))  # by rows

    def add(self, rows: int, batch: int, seconds: float, context: int = 0) -> None:
        """Changes state: a step of `rows` in all over `batch` sequences of `context` tokens in all took so long."""
        kind = Kind.of(batch, context)
        touched, changed = (0.0, False) if self.experts is None else self.experts.see(batch, rows)
        self._in_a_row = self._in_a_row + 1 if rows <= batch else 0
        settled = self.even or rows > batch or self._in_a_row > SETTLED or not self._at_lengths(batch)
        if not settled and seconds >= self.seconds(batch, 0, context)[0]:
            return
        seen = self._seen.setdefault(kind, defaultdict(lambda: deque(maxlen=WINDOW)))
        rows = rows if batch > 1 or self.width is None else self.width(rows)
        self._steps += 1
        expected = float(self._expected_at(np.array([rows]), np.array([touched]))[0])
        seen[_size(rows)].append(_Step(self._steps, rows, seconds / expected))
        self._unread[kind] = PERIOD if changed else self._unread.get(kind, 0) + 1

    def seconds(self, batch: int, candidates: int, context: int = 0) -> NDArray[np.float64]:
        """[candidates + 1]: steps of `batch` sequences of `context` tokens in all with 0, 1, ... candidates in all."""
        kind = Kind.of(batch, context)
        known = self._known.get(kind)
        if known is None or len(known) <= candidates or self._unread.get(kind, 0) >= PERIOD:
            wanted = candidates if known is None else max(candidates, len(known) - 1)
            known = self._known[kind] = self._estimate(kind, wanted)
            self._unread[kind] = 0
        return known[: candidates + 1]

    def _estimate(self, kind: Kind, candidates: int) -> NDArray[np.float64]:
        rows = self._run(kind.batch, kind.batch + candidates, kind.batch)
        touched = None if self.experts is None else self.experts.touched(kind.batch, rows)
        every = self._expected_at(rows, touched) * np.interp(rows, *self._corrections(kind))
        return np.ascontiguousarray(np.minimum.accumulate(every[::-1])[::-1])  # contiguous, as compiled code expects it

    def _run(self, first: int, last: int, batch: int) -> NDArray[np.int64]:
        """How many rows steps of `first` to `last` rows run, padding included."""
        rows = np.arange(first, last + 1)
        return rows if batch > 1 or self.width is None else np.array([self.width(count) for count in rows.tolist()])

    def _corrections(self, kind: Kind) -> tuple[list[float], list[float]]:
        """Rows of the sizes that were seen often enough, and the ratio of each: linear between them, flat beyond."""
        lengths = self._at_lengths(kind.batch)
        if not lengths:
            return [0.0], [1.0]
        last = max(steps[-1].time for seen in lengths.values() for steps in seen.values())  # stays, however old
        for seen in lengths.values():
            for size in [size for size, steps in seen.items() if steps[-1].time < min(last, self._steps - OLD)]:
                del seen[size]
        nearest = sorted(lengths, key=lambda length: abs(length - kind.length))
        sizes = sorted({size for seen in lengths.values() for size in seen})
        known = []
        for size in sizes:
            at = next((length for length in nearest if len(lengths[length].get(size, ())) >= ENOUGH), None)
            if at is not None:
                known.append(lengths[at][size])
        if not known:
            return [0.0], [median(step.ratio for seen in lengths.values() for steps in seen.values() for step in steps)]
        rows = [median(step.rows for step in steps) for steps in known]
        return rows, [median(step.ratio for step in steps) for steps in known]

    def _at_lengths(self, batch: int) -> dict[int, dict[int, deque[_Step]]]:
        """Steps of so many sequences, by the length of their texts."""
        return {kind.length: seen for kind, seen in self._seen.items() if kind.batch == batch and seen}

    def _expected_at(self, rows: NDArray[np.int64], touched: NDArray[np.float64] | None) -> NDArray[np.float64]:
        """What the curve says of these numbers of rows; of a mixture model, if so many experts are touched."""
        found = self._expect(int(rows[-1]))[rows]
        if self.experts is None or touched is None:
            return found
        return self.experts.seconds(rows, found, touched, float(self._expect(1)[1]))

    def _expect(self, rows: int) -> NDArray[np.float64]:
        """What the curve says of 0 to at least `rows` rows."""
        if rows >= len(self._expected):
            more = [max(self.curve(r), 1e-9) for r in range(len(self._expected), rows + 1)]
            self._expected = np.concatenate([self._expected, more])
        return self._expected


def _size(rows: int) -> int:
    """1, 2, 3 to 4, 5 to 8, ...: steps of about the same size, which runtimes make the same."""
    return (rows - 1).bit_length()
