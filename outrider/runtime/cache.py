"""What a backend's cache must be able to do, in the words of slots and positions; how it is stored is its own affair.

A slot holds the text that is committed and, behind it, the rows of candidates that ran since: node i of a tree stands
i places behind the text. A cache is told which of them stay (`keep`); one of keys and values moves them there, a
recurrent state is replayed along the path (`recurrent/`). What it is not told to keep, the next pass may write over.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class Cache(Protocol):
    """What running sequences have left behind in a model. All methods change state."""

    @property
    def bytes(self) -> int: ...  # of memory set aside; on a CPU only what was used is touched

    def keep(self, slots: Sequence[int], lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Of the rows behind `lengths[i]` tokens of text those of node 0 and of `paths[i]` are text from now on."""
        ...


class StretchCache(Cache, Protocol):
    """One that has a stretch of its memory for every slot."""

    def copy(self, source: int, target: int, length: int) -> None:
        """A slot that holds nothing gets the first `length` tokens of another."""
        ...

    def rows_at(self, slot: int, begin: int, end: int) -> Any:
        """A copy of what these positions of a slot hold; `begin` is where a block begins, and `end` in it."""
        ...

    def put(self, slot: int, begin: int, rows: Any, count: int) -> None:
        """A slot that holds `begin` tokens gets the first `count` rows of such a copy."""
        ...

    def cut(self, slot: int, length: int) -> None:
        """Forget what stands behind the first `length` tokens of a slot."""
        ...

    def wipe(self, slot: int) -> None:
        """Forget a slot, so thoroughly that nothing of it can reach the next sequence there."""
        ...


def moves(
    slots: Sequence[int], lengths: Sequence[int], paths: Sequence[Sequence[int]]
) -> list[tuple[int, int, int]]:  # fmt: skip
    """What `keep` asks of a cache of rows: (slot, from, to), each behind its target; what is in place stays."""
    return [
        (slot, length + node, length + to)
        for slot, length, path in zip(slots, lengths, paths, strict=True)
        for to, node in enumerate(path, 1)
        if node != to
    ]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores a token; layers with equal shapes share a tensor."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        return self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, scattered: bool = False) -> Tensor:
    """Zeros; on a CPU the pages are not touched before they are used, so a generous bound costs nothing.

    Scattered: what is used lies in many short stretches far apart, each of which would touch megabytes in large pages.
    Otherwise pages are as large as they come, which is faster to read.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    if scattered and hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_NOHUGEPAGE)
        raw = np.frombuffer(pages, dtype=np.uint8, count=size)
    else:
        line = 64  # align to a cache line
        wide = np.zeros(size + line, dtype=np.uint8)
        offset = -wide.ctypes.data % line
        raw = wide[offset : offset + size]
    return torch.from_numpy(raw).view(dtype).view(shape)
