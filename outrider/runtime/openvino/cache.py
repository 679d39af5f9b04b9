"""RowCache: keys and values of the running slots as contiguous inputs of a graph, and the masks over them.

Finished blocks of text lie as the graph's products want them, all slots with the same number of blocks, which grows in
strides with the longest text and falls back when the last slot is released; slots in use lie in neighbouring rows. The
unfinished block lies beside them, and the rows in flight wait until it is known which of them stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from outrider.runtime.cache import moves, zeros
from outrider.runtime.openvino.convert import BLOCK, CacheTensors
from outrider.runtime.passes import Block
from outrider.runtime.probe import MaskRule

Array = NDArray[np.float32]


def stride(blocks: int) -> int:
    """Room for so many blocks: few different numbers, because the plugin makes code for every new one."""
    step = 2
    while blocks > 4 * step:
        step *= 2
    return max(step, -(-blocks // step) * step)


class RowCache:
    def __init__(self, tensors: CacheTensors, slots: int) -> None:
        self.slots, self.capacity = slots, 0  # blocks a slot
        self.version = 0  # changes whenever the tensors are other ones
        self._tensors, self._groups = tensors, tensors.groups
        self._blocks: list[Array] = []  # one a group: [tensors, slots, N, *tensors.block]
        self._recent: list[Array] = []  # likewise [tensors, slots, *tensors.recent]
        # of a slot, one a group [tensors, H, rows, D]: stand behind its length
        self._flight: dict[int, list[Array]] = {}
        self._length: dict[int, int] = {}  # of the slots that hold something: columns in blocks and in recent
        self._row: dict[int, int] = {}  # likewise: always 0 .. n - 1

    @property
    def groups(self) -> int:
        """Tensors of equal shape lie in one array; how many arrays."""
        return len(self._groups)

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in (*self._blocks, *self._recent))

    @property
    def empty(self) -> bool:
        """No slot holds anything."""
        return not self._row

    def row(self, slot: int) -> int:
        """Changes state: a slot gets a row when it is first used."""
        self._length.setdefault(slot, 0)
        return self._row.setdefault(slot, len(self._row))

    def reserve(self, length: int) -> None:
        """Changes state: room for a slot of so many columns; may move everything to larger tensors."""
        if self._recent and length // BLOCK <= self.capacity:
            return
        self.version += 1
        old, self.capacity = self.capacity, stride(length // BLOCK)
        blocks = [self._zeros(group, self.capacity, *self._tensors.block(group[0])) for group in self._groups]
        for new, before in zip(blocks, self._blocks, strict=False):
            new[:, : len(self._row), :old] = before[:, : len(self._row)]
        self._blocks = blocks
        if not self._recent:
            self._recent = [self._zeros(group, *self._tensors.recent(group[0])) for group in self._groups]

    def _zeros(self, group: list[int], *shape: int) -> Array:
        return zeros((len(group), self.slots, *shape), torch.float32, torch.device("cpu")).numpy()

    def settle(self, slot: int, length: int) -> None:
        """Changes state: of the rows in flight those up to `length` are text now; none where that is the old length."""
        row, at = self.row(slot), self._length[slot]
        self.reserve(length)
        if at == length:
            return
        flight = self._flight.pop(slot)
        for begin in range(at, length, BLOCK):  # at most one end of a block in each part
            self._append(row, begin, [rows[:, :, begin - at : min(begin + BLOCK, length) - at] for rows in flight])
        self._length[slot] = length

    def _append(self, row: int, at: int, parts: Sequence[Array]) -> None:
        """Changes state: up to a block's worth of columns behind `at`; a block that is full joins the finished ones."""
        column = at % BLOCK
        for group, blocks, recent, part in zip(self._groups, self._blocks, self._recent, parts, strict=True):
            unfinished, first = recent[:, row], min(BLOCK - column, part.shape[2])
            _put(unfinished[:, :, column:], part[:, :, :first])
            if column + part.shape[2] >= BLOCK:
                blocks[:, row, at // BLOCK] = unfinished if group[0] % 2 else unfinished.swapaxes(2, 3)
                _put(unfinished, part[:, :, first:])

    def views(self, first: int, batch: int) -> dict[str, Array]:
        """Every tensor's rows first .. first + batch, contiguous."""
        return {
            f"{name}.{tensor}": array[place, first : first + batch]
            for name, arrays in (("past", self._blocks), ("recent", self._recent))
            for group, array in zip(self._groups, arrays, strict=True)
            for place, tensor in enumerate(group)
        }

    def extended(self, first: int, blocks: Sequence[Block], width: int) -> dict[str, Array]:
        """The recent columns, copied, with the rows behind them that are in flight from earlier passes."""
        inputs: dict[str, Array] = {}
        for g, (group, recent) in enumerate(zip(self._groups, self._recent, strict=True)):
            held = recent[:, first : first + len(blocks)]
            wide = np.zeros((*held.shape[:3], width, held.shape[4]), dtype=np.float32)
            wide[..., :BLOCK, :] = held
            for i, b in enumerate(blocks):
                if b.done:
                    _put(wide[:, i, :, BLOCK:], self._flight[b.slot][g][:, :, : b.done])
            inputs |= {f"recent.{tensor}": wide[place] for place, tensor in enumerate(group)}
        return inputs

    def write(self, blocks: Sequence[Block], new: Sequence[Array]) -> None:
        """Changes state: keep the rows that a graph gave back, one array a group [tensors * B, H, R, D]."""
        for i, b in enumerate(blocks):
            fresh = [g.reshape(-1, len(blocks), *g.shape[1:])[:, i, :, : b.rows] for g in new]
            if b.done:
                before = self._flight[b.slot]
                self._flight[b.slot] = [
                    np.concatenate([o[:, :, : b.done], f], 2) for o, f in zip(before, fresh, strict=True)
                ]
            else:
                self._flight[b.slot] = [f.copy() for f in fresh]
            if b.text:
                self.settle(b.slot, b.reach)

    def fill(self, slot: int, length: int) -> None:
        """Changes state: a slot of so many columns of noise, to try the arithmetic on."""
        noise = np.random.default_rng(0)
        rows = [(len(g), self._tensors.recent(g[0])[0], length, self._tensors.dim(g[0])) for g in self._groups]
        self.row(slot)
        self._flight[slot] = [noise.standard_normal(shape, dtype=np.float32) for shape in rows]
        self.settle(slot, length)

    def keep(self, slots: Sequence[int], lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Changes state: accepted rows in flight join the text, the others are gone."""
        if wanted := moves(slots, lengths, paths):
            self.move(*zip(*wanted, strict=True))
        for slot, length, path in zip(slots, lengths, paths, strict=True):
            self.settle(slot, length + 1 + len(path))

    def move(self, slots: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Changes state: row sources[i] in flight of slots[i] takes the place targets[i]; both count all columns.

        They ascend, and a source stands behind its target.
        """
        for slot, source, target in zip(slots, sources, targets, strict=True):
            length = self._length[slot]
            for rows in self._flight[slot]:
                rows[:, :, target - length] = rows[:, :, source - length]

    def copy(self, source: int, target: int, length: int) -> None:
        """Changes state: the first `length` columns of one slot become those of another."""
        if length:
            old, new, finished = self.row(source), self.row(target), length // BLOCK
            for group, blocks, recent in zip(self._groups, self._blocks, self._recent, strict=True):
                blocks[:, new, :finished] = blocks[:, old, :finished]
                recent[:, new] = (
                    recent[:, old] if self._unfinished(source, length) else _opened(group, blocks, old, finished)
                )
            self._length[target] = length

    def rows_at(self, slot: int, begin: int, end: int) -> list[Array]:
        """As the unfinished block lies, one array a group; `begin` is where a block begins."""
        row, block = self.row(slot), begin // BLOCK
        return [
            recent[:, row].copy() if self._unfinished(slot, begin) else _opened(group, blocks, row, block).copy()
            for group, blocks, recent in zip(self._groups, self._blocks, self._recent, strict=True)
        ]

    def put(self, slot: int, begin: int, rows: list[Array], count: int) -> None:
        """Changes state: the first `count` columns of a copy stand behind `begin` others, which are whole blocks."""
        self.reserve(begin + count)
        row, block = self.row(slot), begin // BLOCK
        for group, blocks, recent, kept in zip(self._groups, self._blocks, self._recent, rows, strict=True):
            if count == BLOCK:
                blocks[:, row, block] = kept if group[0] % 2 else kept.swapaxes(2, 3)
            else:
                recent[:, row] = kept
        self._length[slot] = begin + count

    def cut(self, slot: int, length: int) -> None:
        """Changes state: what stands behind the first `length` columns of a slot is hidden from now on."""
        row = self.row(slot)
        if not self._unfinished(slot, length):
            for group, blocks, recent in zip(self._groups, self._blocks, self._recent, strict=True):
                recent[:, row] = _opened(group, blocks, row, length // BLOCK)
        self._flight.pop(slot, None)
        self._length[slot] = length

    def _unfinished(self, slot: int, length: int) -> bool:
        """Whether so much of a slot's text ends in its unfinished block."""
        return length // BLOCK == self._length[slot] // BLOCK

    def wipe(self, slot: int) -> None:
        """Changes state: forget a slot; the last row moves into its place. What is hidden must still be finite."""
        row = self._row.pop(slot, None)
        if row is None:
            return
        used = self._length.pop(slot) // BLOCK  # blocks; those behind them were never touched, and stay so
        self._flight.pop(slot, None)
        last = len(self._row)
        for other, place in self._row.items():
            if place == last:
                self._row[other] = row
                used = max(used, self._length[other] // BLOCK)
        if not last:
            self.version += 1
            self._blocks, self._recent, self.capacity = [], [], 0
        for array in (*(blocks[:, :, :used] for blocks in self._blocks), *self._recent):
            if row != last:
                array[:, row] = array[:, last]
            array[:, last] = 0


def _opened(group: list[int], blocks: Array, row: int, block: int) -> Array:
    """A finished block of text as the unfinished one lies, of a group's tensors."""
    return blocks[:, row, block] if group[0] % 2 else blocks[:, row, block].swapaxes(2, 3)


def _put(columns: Array, rows: Array) -> None:
    """Changes `columns` [tensors, H, C, D + lanes]: begins with rows [tensors, H, n, D]; lanes of values are ones."""
    count, dim = rows.shape[2:]
    columns[:, :, :count, :dim] = rows
    columns[:, :, :count, dim:] = 1


def within_a_block(b: Block) -> bool:
    """All its rows count in the unfinished block of text."""
    return b.length % BLOCK + int(b.depths.max()) < BLOCK


class Layout:
    """The inputs of one run over neighbouring rows, padded to `rows`: who sees whom, and where everybody stands."""

    def __init__(
        self, blocks: Sequence[Block], rows: int, capacity: int, width: int, rules: Sequence[MaskRule]
    ) -> None:
        """`width` recent columns: the unfinished block, and room for the rows in flight from before."""
        batch = len(blocks)
        self.input_ids, self.positions = np.empty((2, batch, rows), dtype=np.int64)
        before = np.full((batch, capacity, 1, 1, 1, BLOCK), -np.inf, dtype=np.float32)
        tail = np.full((batch, rows, width + rows), -np.inf, dtype=np.float32)
        for i, b in enumerate(blocks):
            finished, unfinished = divmod(b.length, BLOCK)
            self.input_ids[i, : b.rows], self.input_ids[i, b.rows :] = b.tokens[b.done :], b.tokens[0]
            self.positions[i, : b.rows], self.positions[i, b.rows :] = b.length + b.depths[b.done :], b.length
            before[i, :finished] = 0
            tail[i, : b.rows, :unfinished] = 0
            tail[i, : b.rows, BLOCK : BLOCK + b.done][b.sees[:, : b.done]] = 0
            tail[i, : b.rows, width : width + b.rows][b.sees[:, b.done :]] = 0
            padding = np.arange(b.rows, rows)
            tail[i, padding, width + padding] = 0  # sees itself, so that it stays finite
        last = int(self.positions.max())
        every = [rule is causal_mask_function or (size is not None and last < size) for rule, size in rules]
        self.masks: list[Array] = []  # one a rule: additive [B, N, 1, 1, 1 or R, BLOCK]
        # likewise [B, J, 1, 1, R, W + R]: a column counts in the block of its position
        self.tail_masks: list[Array] = []
        if all(every) and all(within_a_block(b) for b in blocks):
            self.masks, self.tail_masks = [before] * len(rules), [tail[:, None, None, None]] * len(rules)
            return
        columns = self._columns(blocks, width)
        places = columns // BLOCK - np.array([[b.length // BLOCK] for b in blocks])  # blocks behind the finished ones
        count = 1 + int(places.max())
        elsewhere = places[:, None] != np.arange(count)[:, None]  # [B, J, W + R]
        for (rule, _), everywhere in zip(rules, every, strict=True):
            prefix, among = (before, tail) if everywhere else self._restricted(before, tail, rule, columns)
            self.masks.append(prefix)
            split = np.where(elsewhere[:, :, None], np.float32(-np.inf), among[:, None])
            self.tail_masks.append(split[:, :, None, None])

    def _columns(self, blocks: Sequence[Block], width: int) -> NDArray[np.int64]:
        """[B, W + R]: the text positions of the recent columns and the rows."""
        columns = np.zeros((len(blocks), width + self.positions.shape[1]), dtype=np.int64)
        for i, b in enumerate(blocks):
            columns[i, :BLOCK] = b.length // BLOCK * BLOCK + np.arange(BLOCK)
            columns[i, BLOCK : BLOCK + b.done] = b.length + b.depths[: b.done]
        columns[:, width:] = self.positions
        return columns

    def _restricted(
        self, before: Array, tail: Array, rule: Callable[..., Tensor], columns: NDArray[np.int64]
    ) -> tuple[Array, Array]:
        """What a layer type adds (a window, chunks), by positions instead of storage order."""
        (batch, blocks), rows = before.shape[:2], tail.shape[1]
        prefix = np.tile(np.arange(blocks * BLOCK), (batch, 1))
        keys = torch.from_numpy(np.concatenate([prefix, columns], axis=1))[:, None, None, :]
        sequence, head = torch.arange(batch)[:, None, None, None], torch.zeros((1, 1, 1, 1), dtype=torch.long)
        allowed = rule(sequence, head, torch.from_numpy(self.positions)[:, None, :, None], keys).expand(
            batch, 1, rows, keys.shape[3]
        )
        far, near = np.split(allowed.numpy()[:, 0], [blocks * BLOCK], axis=2)  # [B, R, N * BLOCK], [B, R, W + R]
        far = far.reshape(batch, rows, blocks, BLOCK).swapaxes(1, 2)[:, :, None, None]
        return np.where(far, before, np.float32(-np.inf)), np.where(near, tail, np.float32(-np.inf))
