"""RowCache: keys and values of the running slots as contiguous inputs of a graph, and the masks over them.

A graph reads whole tensors, so all slots share one capacity, which grows in strides with the longest text and falls
back when the last slot is released; slots in use lie in neighbouring rows. Rows in flight live behind the committed
prefix (node i of a tree at length + i), and masks hide what is stale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from outrider.target.cache import zeros
from outrider.target.openvino_convert import Rule, Traits
from outrider.target.passes import Block

LEAST = 128  # columns; every new capacity costs the plugin some milliseconds of code generation


def stride(columns: int) -> int:
    """The capacity for so many columns: at most half as many again, and few different ones."""
    step = LEAST
    while columns > 4 * step:
        step *= 2
    return max(LEAST, -(-columns // step) * step)


class RowCache:
    def __init__(self, known: Traits, slots: int) -> None:
        self.slots, self.capacity = slots, 0
        self.version = 0  # changes whenever the tensors are other ones
        self._groups, self._shapes = known.groups, [known.tensor_shape(group[0]) for group in known.groups]
        self._blocks: list[NDArray[np.float32]] = []  # one a group: [tensors, slots, H, C, D]
        self._row: dict[int, int] = {}  # of the slots that hold something: always 0 .. n - 1

    @property
    def bytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def row(self, slot: int) -> int:
        """Changes state: a slot gets a row when it is first used."""
        return self._row.setdefault(slot, len(self._row))

    def reserve(self, columns: int) -> None:
        """Changes state: room for a slot of so many columns; may move everything to larger tensors."""
        if columns <= self.capacity:
            return
        self.version += 1
        old, used, self.capacity = self.capacity, len(self._row), stride(columns)
        blocks = []
        for i, (group, (heads, dim)) in enumerate(zip(self._groups, self._shapes, strict=True)):
            shape = (len(group), self.slots, heads, self.capacity, dim)
            blocks.append(zeros(shape, torch.float32, torch.device("cpu")).numpy())
            if old:
                blocks[i][:, :used, :, :old] = self._blocks[i][:, :used]
        self._blocks = blocks

    def views(self, first: int, batch: int) -> dict[int, NDArray[np.float32]]:
        """Every tensor's rows first .. first + batch, contiguous: [B, H, C, D]."""
        return {
            tensor: block[place, first : first + batch]
            for group, block in zip(self._groups, self._blocks, strict=True)
            for place, tensor in enumerate(group)
        }

    def write(self, first: int, blocks: Sequence[Block], new: Sequence[NDArray[np.float32]]) -> None:
        """Changes state: keep the rows that a graph gave back, one array a group [tensors * B, H, R, D]."""
        for stored, fresh in zip(self._blocks, new, strict=True):
            own = fresh.reshape(len(stored), len(blocks), *fresh.shape[1:])
            for i, b in enumerate(blocks):
                stored[:, first + i, :, b.length + b.done : b.reach] = own[:, i, :, : b.rows]

    def move(self, slots: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Changes state: copy column sources[i] of slots[i] to column targets[i], in all layers at once."""
        rows = [self._row[slot] for slot in slots]
        for block in self._blocks:
            block[:, rows, :, list(targets)] = block[:, rows, :, list(sources)]

    def copy(self, source: int, target: int, length: int) -> None:
        """Changes state: the first `length` columns of one slot become those of another."""
        if length:
            old, new = self.row(source), self.row(target)
            for block in self._blocks:
                block[:, new, :, :length] = block[:, old, :, :length]

    def wipe(self, slot: int, length: int) -> None:
        """Changes state: forget a slot; the last row moves into its place. What is hidden must still be finite."""
        row = self._row.pop(slot, None)
        if row is None:
            return
        last = len(self._row)
        for other, place in self._row.items():
            if place == last:
                self._row[other] = row
        if not last:
            self.version += 1
            self._blocks, self.capacity = [], 0
        for block in self._blocks:
            if row != last:
                block[:, row] = block[:, last]
            block[:, last] = 0


class Layout:
    """The inputs of one run over neighbouring rows, padded to `rows`: who sees whom, and where everybody stands."""

    def __init__(self, blocks: Sequence[Block], rows: int, capacity: int, rules: Sequence[Rule]) -> None:
        batch = len(blocks)
        self.input_ids, self.positions = np.empty((2, batch, rows), dtype=np.int64)
        mask = np.full((batch, 1, rows, capacity + rows), -np.inf, dtype=np.float32)
        for i, b in enumerate(blocks):
            self.input_ids[i, : b.rows], self.input_ids[i, b.rows :] = b.tokens[b.done :], b.tokens[0]
            self.positions[i, : b.rows], self.positions[i, b.rows :] = b.length + b.depths[b.done :], b.length
            own = mask[i, 0]
            own[: b.rows, : b.length] = 0
            own[: b.rows, b.length : b.length + b.done][b.sees[:, : b.done]] = 0
            own[: b.rows, capacity : capacity + b.rows][b.sees[:, b.done :]] = 0
            padding = np.arange(b.rows, rows)
            own[padding, capacity + padding] = 0  # sees itself, so that it stays finite
        last = int(self.positions.max())
        self.masks: list[NDArray[np.float32]] = []  # one a rule: additive [B, 1, R, C + R]
        for rule, size in rules:
            everywhere = rule is causal_mask_function or (size is not None and last < size)
            self.masks.append(mask if everywhere else self._restricted(mask, rule, blocks, capacity))

    def _restricted(
        self, mask: NDArray[np.float32], rule: Callable[..., Tensor], blocks: Sequence[Block], capacity: int
    ) -> NDArray[np.float32]:
        """What a layer type adds (a window, chunks), by positions instead of storage order."""
        keys = np.concatenate([np.tile(np.arange(capacity), (len(blocks), 1)), self.positions], axis=1)  # [B, C + R]
        for i, b in enumerate(blocks):
            keys[i, b.length : b.length + b.done] = b.length + b.depths[: b.done]
        batch, head = torch.arange(len(blocks))[:, None, None, None], torch.zeros((1, 1, 1, 1), dtype=torch.long)
        positions = torch.from_numpy(self.positions)[:, None, :, None]
        allowed = rule(batch, head, positions, torch.from_numpy(keys)[:, None, None, :])
        return np.where(allowed.numpy(), mask, np.float32(-np.inf))
