"""What a sequence's parameters change in rows of scores before the temperature, as ids and numbers: for one row on the
host, or for many rows of many sequences at once wherever they lie.

Both do the same operations on the same float32 numbers, so a row has the same bits in any company. Cost: microseconds
on the host; elsewhere a few launches and one transfer for all rows together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
NO_IDS, NO_NUMBERS = np.empty(0, np.int64), np.empty(0, np.float32)


class RowEdits(NamedTuple):
    """Of one row. No id stands twice in one field but the last."""

    seen: Ids = NO_IDS  # scores that the repetition penalty scales
    scale: float = 1.0
    said: Ids = NO_IDS  # scores that the other penalties lower, and by how much each
    penalties: Floats = NO_NUMBERS
    biased: Ids = NO_IDS
    biases: Floats = NO_NUMBERS
    banned: Sequence[int] = ()


NO_EDITS = RowEdits()


def edit(scores: Tensor, edits: Sequence[RowEdits]) -> None:
    """Changes `scores`, [rows, V] float32 and dense."""
    if scores.device.type == "cpu":
        for row, one in zip(scores.numpy(), edits, strict=True):
            _edit_on_host(row, one)
    else:
        edit_together(scores, edits)


def _edit_on_host(row: Floats, edits: RowEdits) -> None:
    seen, scale, said, penalties, biased, biases, banned = edits
    if len(seen):
        picked, factor = row[seen], np.float32(scale)
        row[seen] = np.where(picked < 0, picked * factor, picked / factor)
    if len(said):
        row[said] -= penalties
    if len(biased):
        row[biased] += biases
    if len(banned):
        row[banned] = -math.inf


def edit_together(scores: Tensor, edits: Sequence[RowEdits]) -> None:
    """The same in a few operations for all rows, on whatever device."""
    flat, width = scores.view(-1), scores.shape[1]
    fields = zip(*((e.seen, e.said, e.biased, e.banned) for e in edits), strict=True)
    ids = [_flat(field, width) for field in fields]
    scales = np.repeat(np.array([e.scale for e in edits], np.float32), [len(e.seen) for e in edits])
    numbers = [
        scales,
        *(np.concatenate(field) for field in zip(*((e.penalties, e.biases) for e in edits), strict=True)),
    ]
    seen, said, biased, banned = _sent(ids, scores.device)
    scale, penalty, bias = _sent(numbers, scores.device)
    if len(seen):
        picked = flat[seen]
        flat[seen] = torch.where(picked < 0, picked * scale, picked / scale)
    if len(said):
        flat[said] -= penalty
    if len(biased):
        flat[biased] += bias
    if len(banned):
        flat.index_fill_(0, banned, -math.inf)


def _flat(rows: Sequence[Sequence[int] | Ids], width: int) -> Ids:
    """Places in all rows, one behind the other, of each row's ids."""
    counts = [len(row) for row in rows]
    ids = np.concatenate([np.asarray(row, dtype=np.int64) for row in rows])
    return ids + np.repeat(np.arange(len(rows)) * width, counts)


def _sent(parts: Sequence[NDArray[np.generic]], device: torch.device) -> list[Tensor]:
    """These arrays on the device, in one transfer."""
    whole = torch.from_numpy(np.concatenate(parts))
    whole = whole.to(device, non_blocking=True) if len(whole) else whole
    ends = list(accumulate(len(part) for part in parts))
    return [whole[end - len(part) : end] for part, end in zip(parts, ends, strict=True)]
