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

from outrider.target.cache import zeros
from outrider.target.openvino_convert import BLOCK, GraphTraits, Rule
from outrider.target.passes import Block

Array = NDArray[np.float32]


def stride(blocks: int) -> int:
    """Room for so many blocks: few different numbers, because the plugin makes code for every new one."""
    step = 2
    while blocks > 4 * step:
        step *= 2
    return max(step, -(-blocks // step) * step)


class RowCache:
    def __init__(self, known: GraphTraits, slots: int) -> None:
        self.slots, self.capacity = slots, 0  # blocks a slot
        self.version = 0  # changes whenever the tensors are other ones
        self._known, self._groups = known, known.groups
        self._blocks: list[Array] = []  # one a group: [tensors, slots, N, *known.block]
        self._recent: list[Array] = []  # likewise [tensors, slots, *known.recent]
        self._flight: dict[
            int, list[Array]
        ] = {}  # of a slot, one a group [tensors, H, rows, D]: stand behind its length
        self._length: dict[int, int] = {}  # of the slots that hold something: columns in blocks and in recent
        self._row: dict[int, int] = {}  # likewise: always 0 .. n - 1

    @property
    def groups(self) -> int:
        """Tensors of equal shape lie in one array; how many arrays."""
        return len(self._groups)

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in (*self._blocks, *self._recent))

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
        blocks = [self._zeros(group, self.capacity, *self._known.block(group[0])) for group in self._groups]
        for new, before in zip(blocks, self._blocks, strict=False):
            new[:, : len(self._row), :old] = before[:, : len(self._row)]
        self._blocks = blocks
        if not self._recent:
            self._recent = [self._zeros(group, *self._known.recent(group[0])) for group in self._groups]

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
            own, first = recent[:, row], min(BLOCK - column, part.shape[2])
            _put(own[:, :, column:], part[:, :, :first])
            if column + part.shape[2] >= BLOCK:
                blocks[:, row, at // BLOCK] = own if group[0] % 2 else own.swapaxes(2, 3)
                _put(own, part[:, :, first:])

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
            own = recent[:, first : first + len(blocks)]
            wide = np.zeros((*own.shape[:3], width, own.shape[4]), dtype=np.float32)
            wide[..., :BLOCK, :] = own
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

    def fill(self, slot: int, length: int) -> None:
        """Changes state: a slot of so many columns of noise, to try the arithmetic on."""
        noise = np.random.default_rng(0)
        rows = [(len(g), self._known.recent(g[0])[0], length, self._known.dim(g[0])) for g in self._groups]
        self.row(slot)
        self._flight[slot] = [noise.standard_normal(shape, dtype=np.float32) for shape in rows]
        self.settle(slot, length)

    def move(self, slots: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Changes state: row sources[i] in flight of slots[i] takes the place targets[i]; both count all columns."""
        for slot, source, target in zip(
            slots, sources, targets, strict=True
        ):  # ascending, and a source behind its target
            length = self._length[slot]
            for rows in self._flight[slot]:
                rows[:, :, target - length] = rows[:, :, source - length]

    def copy(self, source: int, target: int, length: int) -> None:
        """Changes state: the first `length` columns of one slot become those of another."""
        if length:
            self.settle(source, length)
            old, new = self.row(source), self.row(target)
            for blocks, recent in zip(self._blocks, self._recent, strict=True):
                blocks[:, new, : length // BLOCK] = blocks[:, old, : length // BLOCK]
                recent[:, new] = recent[:, old]
            self._length[target] = length

    def wipe(self, slot: int, length: int) -> None:
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

    def __init__(self, blocks: Sequence[Block], rows: int, capacity: int, width: int, rules: Sequence[Rule]) -> None:
        """`width` recent columns: the unfinished block, and room for the rows in flight from before."""
        batch = len(blocks)
        self.input_ids, self.positions = np.empty((2, batch, rows), dtype=np.int64)
        before = np.full((batch, capacity, 1, 1, 1, BLOCK), -np.inf, dtype=np.float32)
        own = np.full((batch, rows, width + rows), -np.inf, dtype=np.float32)
        for i, b in enumerate(blocks):
            finished, unfinished = divmod(b.length, BLOCK)
            self.input_ids[i, : b.rows], self.input_ids[i, b.rows :] = b.tokens[b.done :], b.tokens[0]
            self.positions[i, : b.rows], self.positions[i, b.rows :] = b.length + b.depths[b.done :], b.length
            before[i, :finished] = 0
            own[i, : b.rows, :unfinished] = 0
            own[i, : b.rows, BLOCK : BLOCK + b.done][b.sees[:, : b.done]] = 0
            own[i, : b.rows, width : width + b.rows][b.sees[:, b.done :]] = 0
            padding = np.arange(b.rows, rows)
            own[i, padding, width + padding] = 0  # sees itself, so that it stays finite
        last = int(self.positions.max())
        every = [rule is causal_mask_function or (size is not None and last < size) for rule, size in rules]
        self.masks: list[Array] = []  # one a rule: additive [B, N, 1, 1, 1 or R, BLOCK]
        # likewise [B, J, 1, 1, R, W + R]: a column counts in the block of its position
        self.own_masks: list[Array] = []
        if all(every) and all(within_a_block(b) for b in blocks):
            self.masks, self.own_masks = [before] * len(rules), [own[:, None, None, None]] * len(rules)
            return
        columns = self._columns(blocks, width)
        places = columns // BLOCK - np.array([[b.length // BLOCK] for b in blocks])  # blocks behind the finished ones
        count = 1 + int(places.max())
        elsewhere = places[:, None] != np.arange(count)[:, None]  # [B, J, W + R]
        for (rule, _), everywhere in zip(rules, every, strict=True):
            prefix, among = (before, own) if everywhere else self._restricted(before, own, rule, columns)
            self.masks.append(prefix)
            split = np.where(elsewhere[:, :, None], np.float32(-np.inf), among[:, None])
            self.own_masks.append(split[:, :, None, None])

    def _columns(self, blocks: Sequence[Block], width: int) -> NDArray[np.int64]:
        """[B, W + R]: the text positions of the recent columns and the rows."""
        columns = np.zeros((len(blocks), width + self.positions.shape[1]), dtype=np.int64)
        for i, b in enumerate(blocks):
            columns[i, :BLOCK] = b.length // BLOCK * BLOCK + np.arange(BLOCK)
            columns[i, BLOCK : BLOCK + b.done] = b.length + b.depths[: b.done]
        columns[:, width:] = self.positions
        return columns

    def _restricted(
        self, before: Array, own: Array, rule: Callable[..., Tensor], columns: NDArray[np.int64]
    ) -> tuple[Array, Array]:
        """What a layer type adds (a window, chunks), by positions instead of storage order."""
        (batch, blocks), rows = before.shape[:2], own.shape[1]
        prefix = np.tile(np.arange(blocks * BLOCK), (batch, 1))
        keys = torch.from_numpy(np.concatenate([prefix, columns], axis=1))[:, None, None, :]
        sequence, head = torch.arange(batch)[:, None, None, None], torch.zeros((1, 1, 1, 1), dtype=torch.long)
        allowed = rule(sequence, head, torch.from_numpy(self.positions)[:, None, :, None], keys).expand(
            batch, 1, rows, keys.shape[3]
        )
        far, near = np.split(allowed.numpy()[:, 0], [blocks * BLOCK], axis=2)  # [B, R, N * BLOCK], [B, R, W + R]
        far = far.reshape(batch, rows, blocks, BLOCK).swapaxes(1, 2)[:, :, None, None]
        return np.where(far, before, np.float32(-np.inf)), np.where(near, own, np.float32(-np.inf))
