"""SlotCache: keys and values of all slots in preallocated tensors, handed to the model as a transformers `Cache`.

Layers of equal shape share one tensor [layers, slots, heads, capacity, dim], so keeping an accepted path is one gather
over all layers. Rows in flight live behind the committed prefix (node i of a tree at length + i); the last row of a
slot is a bin for padding. Nothing grows: sliding-window layers keep all rows too, and the mask honours the window.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from outrider.runtime.cache import LayerShape, moves, zeros
from outrider.runtime.passes import Block, Pass


class SlotCache(Cache):
    def __init__(self, shapes: Sequence[LayerShape], slots: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.slots, self.capacity = slots, capacity + 1  # the last row takes what padded rows write
        self.blocks: list[tuple[Tensor, Tensor]] = []  # per distinct shape: keys, values [layers, slots, H, C, D]
        self._keys: list[Tensor] = [torch.empty(0)] * len(shapes)  # per layer, views [slots, H, C, D]
        self._values = list(self._keys)
        for shape in dict.fromkeys(shapes):
            layers = [i for i, other in enumerate(shapes) if other == shape]
            rows = (len(layers), slots, shape.heads, self.capacity)
            keys, values = (
                zeros((*rows, dim), shape.dtype, shape.device, scattered=True)
                for dim in (shape.key_dim, shape.value_dim)
            )
            self.blocks.append((keys, values))
            for place, layer in enumerate(layers):
                self._keys[layer], self._values[layer] = keys[place], values[place]
        # A step of one slot slices these; making the views once halves the slicing of every layer.
        self._slot_keys = [k.split(1) for k in self._keys]
        self._slot_values = [v.split(1) for v in self._values]
        self._pass: Pass | None = None
        self._touched = [0] * slots  # rows that may hold something

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for block in self.blocks for t in block)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all slots, [slots, H, C, D]."""
        return self._keys[index], self._values[index]

    def bind(self, current: Pass) -> SlotCache:
        """Changes state: the next forward reads and writes where this pass says."""
        self._pass = current
        self.touch(current.blocks)
        return self

    def finish(self) -> None:
        """Nothing to do: text and candidates are where they belong."""

    def touch(self, blocks: Sequence[Block]) -> None:
        """Changes state: rows of these blocks are written; the slots are to be wiped so far."""
        for b in blocks:
            self._touched[b.slot] = max(self._touched[b.slot], b.reach)

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write the rows of this pass, return what they may look at: [B, H, reach, D], a view where slots allow."""
        p = self._pass
        assert p is not None
        if p.batch == 1 and not p.fixed:
            k, v = self._slot_keys[layer_idx][p.slot], self._slot_values[layer_idx][p.slot]
            k.narrow(2, p.start, p.rows).copy_(key_states)
            v.narrow(2, p.start, p.rows).copy_(value_states)
            return k.narrow(2, 0, p.reach), v.narrow(2, 0, p.reach)
        k, v = self._keys[layer_idx], self._values[layer_idx]
        slots, rows = p.places(self.capacity, k.device)
        k.transpose(1, 2)[slots, rows] = key_states.transpose(1, 2)  # [B, R, H, D]
        v.transpose(1, 2)[slots, rows] = value_states.transpose(1, 2)
        k, v = k.narrow(2, 0, p.reach), v.narrow(2, 0, p.reach)
        if p.consecutive:
            return k.narrow(0, p.slot, p.batch), v.narrow(0, p.slot, p.batch)
        return k.index_select(0, slots.flatten()), v.index_select(0, slots.flatten())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._pass.reach - self._pass.rows if self._pass else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return (self._pass.reach if self._pass else query_length), 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.capacity

    def keep(self, slots: Sequence[int], lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Changes state: accepted rows go to their places behind the text."""
        if wanted := moves(slots, lengths, paths):
            self.move(*zip(*wanted, strict=True))

    def move(self, slots: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Changes state: copy row sources[i] of slots[i] to row targets[i], in all layers at once."""
        index = np.array([slots, sources, targets])
        for block in self.blocks:
            slot, source, target = torch.from_numpy(index).to(block[0].device)
            for tensor in block:
                tensor[:, slot, :, target] = tensor[:, slot, :, source]

    def copy(self, source: int, target: int, length: int) -> None:
        """Changes state: the first `length` rows of one slot become those of another."""
        for block in self.blocks:
            for tensor in block:
                tensor[:, target, :, :length].copy_(tensor[:, source, :, :length])
        self._touched[target] = length

    def rows_at(self, slot: int, begin: int, end: int) -> list[Tensor]:
        return [tensor[:, slot, :, begin:end].clone() for block in self.blocks for tensor in block]

    def put(self, slot: int, begin: int, rows: list[Tensor], count: int) -> None:
        """Changes state: the first `count` rows of a copy stand behind `begin` others."""
        for tensor, kept in zip((tensor for block in self.blocks for tensor in block), rows, strict=True):
            tensor[:, slot, :, begin : begin + count] = kept[:, :, :count]
        self._touched[slot] = max(self._touched[slot], begin + count)

    def cut(self, slot: int, length: int) -> None:
        """Nothing to do: masks hide what stands behind the text."""

    def wipe(self, slot: int) -> None:
        """Changes state: forget a slot. A masked row still meets weight 0, and 0 times a stale infinity is not 0."""
        for block in self.blocks:
            for tensor in block:
                tensor[:, slot, :, : self._touched[slot]].zero_()
                tensor[:, slot, :, -1].zero_()
        self._touched[slot] = 0
