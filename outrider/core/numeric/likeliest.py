"""Sparse draft distributions from the logits of a trained head: the likeliest tokens, in one transfer for all rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.numeric.compiled import compiled
from outrider.core.tree import QRow

NO_ROW = QRow(np.empty(0, dtype=np.int64), np.empty(0))  # of a drafter that has nothing to say
_BLOCK = 32  # scores compared together before any of them is looked at alone


def head_distributions(logits: Tensor, temperature: Sequence[float], ids: Tensor, width: int) -> list[QRow]:
    """One a row of [rows, vocabulary] at the row's temperature: its `width` likeliest tokens, likeliest first.

    `ids` are the target's ids of the head's tokens.
    """
    scaled = logits.float()
    if any(value != 1.0 for value in temperature):
        scaled = scaled / torch.tensor(temperature, device=logits.device)[:, None]
    every = scaled.softmax(-1)
    if every.device.type == "cpu":
        places, probs = largest(every.numpy(), width)
        found = ids.numpy()[places]
    else:
        kept, at = every.topk(width, dim=-1)
        probs, found = kept.cpu().numpy(), ids[at].cpu().numpy()
    return sparse_rows(found, probs.astype(float))


def sparse_rows(ids: NDArray[np.int64], probs: NDArray[np.float64]) -> list[QRow]:
    """[rows, width] each, likeliest first: what has no chance is left out."""
    return [QRow(i, p) if p[-1] > 0 else QRow(i[p > 0], p[p > 0]) for i, p in zip(ids, probs, strict=True)]


@compiled
def largest(scores: NDArray[np.float32], count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The `count` largest of each row, and before them where they stand; largest first."""
    rows, width = scores.shape
    ids = np.full((rows, count), -1, dtype=np.int32)
    values = np.full((rows, count), -np.inf, dtype=np.float32)
    for r in range(rows):
        row, places, best = scores[r], ids[r], values[r]
        for start in range(0, width, _BLOCK):
            end = min(start + _BLOCK, width)
            low = best[count - 1]
            above = 0
            for i in range(start, end):  # no branch inside: the compiler compares many at once
                above += row[i] > low
            if above == 0:
                continue
            for i in range(start, end):
                value = row[i]
                if value > best[count - 1]:  # strictly: of equals the first, which has the lower id, stays
                    at = count - 1
                    while at > 0 and value > best[at - 1]:
                        best[at], places[at] = best[at - 1], places[at - 1]
                        at -= 1
                    best[at], places[at] = value, i
    return ids, values
