"""Read cost: seconds that a drafter takes to read the target's rows after a step, by how many rows the step had.

On a CPU each row costs the same; on a GPU a call costs the same however many rows it reads. So a fixed part and a part
a row are fitted to recent steps of different sizes. Changes no output. Cost: microseconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

REMEMBERED = 17  # steps


@dataclass(slots=True)
class ReadCost:
    _steps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))  # rows, seconds

    def add(self, rows: int, seconds: float) -> None:
        """Changes state: reading the rows of a step took so long."""
        self._steps.append((rows, seconds))

    def seconds(self, rows: int) -> NDArray[np.float64]:
        """[rows]: what reading 1, 2, ... rows takes; where all steps were of one size, any size takes as long."""
        fixed, per_row = self._line()
        return fixed + per_row * np.arange(1, rows + 1, dtype=np.float64)

    def _line(self) -> tuple[float, float]:
        """Through the medians of the smaller and of the larger steps: one slow step changes nothing."""
        steps = sorted(self._steps)
        small, large = steps[: (len(steps) + 1) // 2], steps[len(steps) // 2 :]
        (few, quick), (many, slow) = (tuple(map(median, zip(*half, strict=True))) for half in (small, large))
        per_row = max((slow - quick) / (many - few), 0.0) if many > few else 0.0
        return max(quick - per_row * few, 0.0), per_row
