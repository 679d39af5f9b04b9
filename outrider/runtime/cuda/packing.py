"""Packing: the rows of a pass one behind another, and the few sizes in which passes are recorded.

A recorded pass has a fixed number of sequences, of rows and of rows with logits; what is lacking is padding, of which
no sequence sees anything, so that a pass may run in any size that holds it. Rows without logits come first: the others
are the last ones, and the vocabulary is multiplied by these alone. Knows nothing of how the rows are run.
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
COARSE = (1, 4, 16, 64)  # numbers of sequences whose sizes are recorded beforehand: each holds the ones in between
WIDER, FREE_ROWS = 2, 64  # times the rows that a pass may run in where its size is not recorded; so many cost nothing


@dataclass(frozen=True, slots=True)
class Bucket:
    """The size of a recorded pass."""

    sequences: int
    rows: int
    scored: int  # the last so many rows have logits

    @property
    def cost(self) -> tuple[int, int, int]:
        """By which the cheapest of several is found."""
        return self.rows, self.scored, self.sequences

    def holds(self, other: Bucket) -> bool:
        """Whether the rows of the other fit in here as well, and cost little more than in a size that is theirs."""
        enough = self.sequences >= other.sequences and self.rows >= other.rows and self.scored >= other.scored
        near = self.rows <= max(WIDER * other.rows, FREE_ROWS) and self.sequences <= 4 * other.sequences
        return enough and near


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


def smallest(blocks: Sequence[Block], needs: Needs) -> Bucket:
    """The size of these: no other that is recorded holds them in fewer rows."""
    rows = _size(ROWS, sum(b.rows for b in blocks))
    scored = sum(b.rows for b in blocks if b.scored(needs))
    silent = not all(b.scored(needs) for b in blocks)
    kept = min(_size(SCORED, scored), rows) if silent and scored <= SCORED[-1] else rows
    return Bucket(_size(SEQUENCES, len(blocks)), rows, kept)


def pack(blocks: Sequence[Block], needs: Needs, bucket: Bucket) -> Packed:
    """Text without logits from the front, the others to the end; where all have logits they stand at the front."""
    silent = [b for b in blocks if not b.scored(needs)]
    ordered = [*silent, *(b for b in blocks if b.scored(needs))]
    apart = bool(silent) or bucket.scored < bucket.rows
    begins, at = [], 0
    for i, b in enumerate(ordered):
        if apart and i == len(silent):
            at = bucket.rows - sum(b.rows for b in ordered[i:])
        begins.append(at)
        at += b.rows
    return Packed(ordered, begins, len(silent), bucket)


def cover(slots: int, tree_rows: int, prompt_rows: int) -> list[Bucket]:
    """A few sizes, one of which holds nearly any pass of so many slots: those of plain steps and of small trees first.

    Every row has logits, so that prompts run in them, too.
    """
    most = _size(SEQUENCES, min(slots, SEQUENCES[-1]))
    found = []
    for count in sorted({min(count, most) for count in COARSE}):
        widest = _size(ROWS, min(count * tree_rows + prompt_rows, ROWS[-1]))
        found += list(enumerate(_steps(count, widest)))
    return [Bucket(count, rows, rows) for _, (count, rows) in sorted(found, key=lambda one: one[0])]


def _steps(count: int, widest: int) -> list[tuple[int, int]]:
    """Of so many sequences: plain steps, then powers of two up to the widest pass; of a single one all small sizes."""
    more = [rows for rows in ROWS if rows > max(count, 8) and rows & (rows - 1) == 0] if count > 1 else [
        rows for rows in ROWS if rows > 1 and (rows <= FREE_ROWS or rows & (rows - 1) == 0)
    ]  # fmt: skip
    last = next((i for i, rows in enumerate(more) if rows >= widest), len(more) - 1)
    return [(count, count), *((count, rows) for rows in more[: last + 1])]


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
