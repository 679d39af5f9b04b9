"""Pass: the layout of one forward over the rows of several slots, and the masks that follow from it.

A row sees its slot's committed prefix, and itself and its ancestors among the rows in flight. What a layer type adds (a
window, chunks) is the model's own mask function, evaluated on positions by depth instead of storage order. Padded rows
repeat their slot's pending token and what it sees, so they stay finite; nobody sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from outrider.runtime.flight import Block as Block
from outrider.runtime.flight import text_block as text_block
from outrider.runtime.flight import tree_block as tree_block

NAME = "outrider"  # of our attention and mask functions in transformers' registries
QUERY_SCALE = "outrider_query_scale"  # where an attention layer holds factors of its queries, [B, 1, R, 1]


class Pass:
    """One forward: what goes in, where its rows are stored, and who sees whom."""

    fixed = False  # whether where rows are stored stands in tensors alone, for a recording

    def __init__(self, blocks: Sequence[Block], dtype: torch.dtype, device: torch.device) -> None:
        first = blocks[0]
        self.blocks, self.dtype, self.device = blocks, dtype, device
        self.batch = len(blocks)
        self.rows = max(b.rows for b in blocks)
        self.reach = max(b.reach for b in blocks)
        self.slot, self.start = first.slot, first.length + first.done
        self.consecutive = all(b.slot == first.slot + i for i, b in enumerate(blocks))
        self.attended = 0  # calls of our attention function: 0 tells a model with attention code of its own
        self._folded: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._places: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._key_positions: Tensor | None = None
        self.vectors: list[tuple[int, int, Tensor]] = []  # block, first row, what it and those behind it read
        inputs = np.empty((2, self.batch, self.rows), dtype=np.int64)
        for i, b in enumerate(blocks):
            inputs[0, i, : b.rows], inputs[0, i, b.rows :] = b.tokens[b.done :], b.tokens[0]
            if (vectors := b.vectors) is not None:
                inputs[0, i, b.rows - len(vectors) : b.rows] = b.tokens[0]  # any token: its embedding is not read
                self.vectors.append((i, b.rows - len(vectors), vectors))
            inputs[1, i, : b.rows], inputs[1, i, b.rows :] = b.length + b.depths[b.done :], b.length
        self.last_position = int(inputs[1].max())
        self.input_ids, self.positions = torch.from_numpy(inputs).to(device, non_blocking=True)  # [B, R] each
        self.mask = self._mask()

    def _mask(self) -> Tensor | None:
        """Additive [B, 1, R, reach], 0 or -inf; None where every row sees everything."""
        first = self.blocks[0]
        if self.rows == 1 and all(b.reach == first.reach and b.rows == 1 and b.sees.all() for b in self.blocks):
            return None
        if self.batch == 1:
            tail = torch.from_numpy(np.where(first.sees, np.float32(0), np.float32(-np.inf)))
            mask = torch.zeros((1, 1, self.rows, self.reach), dtype=self.dtype, device=self.device)
            mask[0, 0, :, first.length :] = tail.to(self.device, self.dtype, non_blocking=True)
            return mask
        # Each slot's row of the cache is one of: prefix (column 0), node t (column t + 1), nothing (last column).
        nodes = max(len(b.tokens) for b in self.blocks)
        table = np.full((self.batch, self.rows, nodes + 2), -np.inf, dtype=np.float32)
        table[:, :, 0] = 0
        for i, b in enumerate(self.blocks):
            table[i, : b.rows, 1 : len(b.tokens) + 1][b.sees] = 0
            table[i, b.rows :, 1] = 0
        lengths = np.array([b.length for b in self.blocks])[:, None]
        column = (np.arange(self.reach) - lengths + 1).clip(0, nodes + 1)  # [B, reach]
        index = torch.from_numpy(column).to(self.device, non_blocking=True)[:, None].expand(-1, self.rows, -1)
        source = torch.from_numpy(table).to(self.device, self.dtype, non_blocking=True)
        return source.gather(2, index)[:, None]

    @property
    def key_positions(self) -> Tensor:
        """[B, reach]: the text position of each row of the cache."""
        if self._key_positions is None:
            positions = np.tile(np.arange(self.reach), (self.batch, 1))
            for i, b in enumerate(self.blocks):
                positions[i, b.length : b.reach] = b.length + b.depths
            self._key_positions = torch.from_numpy(positions).to(self.device, non_blocking=True)
        return self._key_positions

    def places(self, capacity: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where the rows are stored: slots [B, 1] and rows [B, R]; padding goes to the last row of the slot."""
        if device not in self._places:
            rows = np.full((self.batch, self.rows), capacity - 1)
            for i, b in enumerate(self.blocks):
                rows[i, : b.rows] = np.arange(b.length + b.done, b.reach)
            slots = np.array([[b.slot] for b in self.blocks])
            self._places[device] = (torch.from_numpy(slots).to(device), torch.from_numpy(rows).to(device))
        return self._places[device]

    def restricted(self, rule: Callable[..., Tensor], size: int | None) -> Tensor | None:
        """The mask of a layer type: `rule` is transformers' function of positions, `size` its window if it has one."""
        if rule is causal_mask_function or (size is not None and self.last_position < size):
            return self.mask
        batch = torch.arange(self.batch, device=self.device)[:, None, None, None]
        head = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=self.device)
        allowed = rule(batch, head, self.positions[:, None, :, None], self.key_positions[:, None, None, :])
        nothing = torch.full((), -torch.inf, dtype=self.dtype, device=self.device)
        seen = torch.zeros((), dtype=self.dtype, device=self.device) if self.mask is None else self.mask
        return torch.where(allowed, seen, nothing)

    @property
    def explicit_mask(self) -> Tensor:
        """The same mask for models that take it as an argument: never None."""
        if self.mask is not None:
            return self.mask
        return torch.zeros((self.batch, 1, self.rows, self.reach), dtype=self.dtype, device=self.device)

    def folded(self, mask: Tensor, group: int) -> Tensor:
        """`mask` repeated for the `group` query heads that share a key head; made once a forward, not once a layer."""
        key = (id(mask), group)
        if key not in self._folded:
            self._folded[key] = (mask.repeat(1, 1, group, 1), mask)  # holding the mask keeps its id its own
        return self._folded[key][0]


_current: ContextVar[Pass | None] = ContextVar("outrider_pass", default=None)


@contextmanager
def running(current: Pass) -> Iterator[None]:
    token = _current.set(current)
    try:
        yield
    finally:
        _current.reset(token)


def current_pass() -> Pass | None:
    return _current.get()


def _mask_of_layer_type(
    *_: Any, mask_function: Callable[..., Tensor] = causal_mask_function, local_size: int | None = None, **__: Any
) -> Tensor | None:
    """What transformers calls, once a layer type, when a model builds the masks of a forward."""
    current = _current.get()
    return None if current is None else current.restricted(mask_function, local_size)


ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask_of_layer_type)
