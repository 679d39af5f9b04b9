"""Packing: the rows of a pass one behind another, and the few sizes in which passes are recorded.

A recorded pass has a fixed number of sequences, of rows and of rows with logits; what is lacking is padding, of which
no sequence sees anything. Rows without logits come first, so that the others are the last ones and the vocabulary is
multiplied by these alone. Knows nothing of how the rows are run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.core.records import Needs
from outrider.runtime.flight import Block

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
SCORED = (1, 64, 256)  # rows with logits in a pass that has others, too; above, all have them


@dataclass(frozen=True, slots=True)
class Bucket:
    """The size of a recorded pass."""

    sequences: int
    rows: int
    scored: int  # the last so many rows have logits


@dataclass(frozen=True, slots=True)
class Packed:
    """Blocks that share a pass, in the order of their rows, and where these stand."""

    blocks: Sequence[Block]
    begins: Sequence[int]  # first row of each block
    texts: int  # blocks at the front without logits
    bucket: Bucket

    @property
    def where(self) -> NDArray[np.int64]:
        """[rows of the blocks]: where each stands in the pass."""
        rows = [b.rows for b in self.blocks]
        shift = np.array(self.begins) - np.cumsum([0, *rows[:-1]])
        return np.arange(sum(rows)) + np.repeat(shift, rows)


def pack(blocks: Sequence[Block], needs: Needs) -> Packed:
    """Text without logits from the front, the others to the end; where all have logits they stand at the front."""
    silent = [b for b in blocks if not b.scored(needs)]
    ordered = [*silent, *(b for b in blocks if b.scored(needs))]
    total, scored = sum(b.rows for b in blocks), sum(b.rows for b in ordered[len(silent) :])
    rows = _size(ROWS, total)
    begins, at = [], 0
    for i, b in enumerate(ordered):
        if silent and i == len(silent):
            at = rows - scored
        begins.append(at)
        at += b.rows
    kept = min(_size(SCORED, scored), rows) if silent and scored <= SCORED[-1] else rows
    return Packed(ordered, begins, len(silent), Bucket(_size(SEQUENCES, len(ordered)), rows, kept))


def passes(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    """Blocks in their order, as many together as fit in the largest pass."""
    part: list[Block] = []
    rows = 0
    for b in blocks:
        if part and (rows + b.rows > ROWS[-1] or len(part) == SEQUENCES[-1]):
            yield part
            part, rows = [], 0
        part.append(b)
        rows += b.rows
    if part:
        yield part


def _size(sizes: Sequence[int], wanted: int) -> int:
    return next(size for size in sizes if size >= wanted)
