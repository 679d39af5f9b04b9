"""How many rows a forward runs in OpenVINO: few different numbers, and the last one again where padding is cheaper.

The plugin makes code for every number of rows it has not met, and works out all operations anew whenever the number is
another than in the last forward, which takes as long as a step of a small model. So a step that needs a few rows less
than the last one runs as many, the rest being padding, and only a run of smaller steps makes it smaller.
"""

from __future__ import annotations

from dataclasses import dataclass

FEW = 8  # rows that cost little more than one
PATIENCE = 6  # smaller steps in a row before the forward becomes smaller


@dataclass(slots=True)
class Steady:
    patience: int = PATIENCE
    _now: int = 0  # rows of the last forward
    _small: int = 0  # steps in a row that needed less
    _most: int = 0  # the largest of them

    def rows(self, needed: int) -> int:
        """Changes state: the rows to run where so many are needed."""
        wanted = padded(needed)
        if wanted < self._now <= max(FEW, 2 * wanted) and self._small < self.patience:
            self._small, self._most = self._small + 1, max(self._most, wanted)
            return self._now
        self._now = max(wanted, self._most) if wanted < self._now <= max(FEW, 2 * wanted) else wanted
        self._small = self._most = 0
        return self._now

    def forget(self) -> None:
        """Changes state: the next forward runs just what it needs."""
        self._now = self._small = self._most = 0


def padded(rows: int) -> int:
    """One, then even numbers up to 16, then eight sizes for each doubling."""
    step = 2 if rows > 2 else 1
    while rows > 8 * step:
        step *= 2
    return -(-rows // step) * step
