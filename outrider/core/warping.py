"""Warping: temperature and truncation of processed logits, and the array operations that they need.

Each function takes one row [V], and on a GPU also [rows, V]; it never writes to its argument and gives it back as it is
where there is nothing to do. On the host rows are numpy's, so that no thread of torch's wakes between two steps of a
runtime with threads of its own. Same results as `transformers`' warpers, but that ties at the edge of top-p go by id.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_PREFIX = 256  # tokens top-p looks at before it looks further; on CPU a prefix is far cheaper than a full sort


def keep_top_k(scores: Tensor, k: int) -> Tensor:
    """The k highest; all that equal the k-th stay, as in transformers. 0 keeps everything."""
    if not 0 < k < scores.shape[-1]:
        return scores
    return _at_least(scores, torch.topk(scores, k).values[..., -1:])


def keep_top_p(scores: Tensor, p: float) -> Tensor:
    """The fewest likeliest tokens whose probability reaches p; among equals at the boundary the lowest ids stay.

    A token stays while the probability before it is below p. That is decided by sorted values alone, so on the host a
    sorted prefix that reaches p is enough, and which of the equals stay is settled afterwards by id.
    """
    if p >= 1:
        return scores
    if cheap_together(scores):  # sorting is cheap and asking for a value is not
        return _top_p_together(scores, p)
    row = scores.numpy()
    top = row.max()
    total = np.exp(row - top).sum(dtype=np.float64)
    values = torch.topk(scores, min(_PREFIX, len(row))).values.numpy()
    reached = np.exp(values - top).cumsum(dtype=np.float64) / total
    if reached[-1] < p:
        values = np.sort(row)[::-1]
        reached = np.exp(values - top).cumsum(dtype=np.float64) / total
    kept = 1 + np.count_nonzero(reached[:-1] < p)
    floor = values[kept - 1]
    out = row < floor
    if len(row) - np.count_nonzero(out) > kept:
        out[np.flatnonzero(row == floor)[kept - np.count_nonzero(row > floor) :]] = True
    return torch.from_numpy(np.where(out, -math.inf, row))


def _top_p_together(scores: Tensor, p: float | Tensor) -> Tensor:
    values = torch.sort(scores, descending=True).values
    odds = (values - values[..., :1]).exp_()
    reached = odds.cumsum(-1, dtype=torch.float64) / odds.sum(-1, keepdim=True, dtype=torch.float64)
    kept = 1 + (reached[..., :-1] < p).sum(-1, keepdim=True)
    floor = values.gather(-1, kept - 1)
    tied = scores == floor
    out = (scores < floor) | (tied & (tied.cumsum(-1) > kept - (scores > floor).sum(-1, keepdim=True)))
    return scores.masked_fill(out, -math.inf)


def truncate_together(
    scores: Tensor, ks: NDArray[np.int64], ps: NDArray[np.float64], min_ps: NDArray[np.float64]
) -> Tensor:
    """[rows, V]: `keep_top_k`, `keep_top_p`, `keep_min_p`, with values for each row; no row is asked for a value."""
    width = scores.shape[1]
    ks = np.where(ks > 0, np.minimum(ks, width), width)
    if (rows := np.flatnonzero(ks < width)).size:
        some = _picked(scores, rows)
        last = _column(ks[rows] - 1, scores.device)
        floor = torch.topk(some, int(ks[rows].max())).values.gather(1, last)
        scores = _put(scores, rows, some.masked_fill(some < floor, -math.inf))
    if (rows := np.flatnonzero(ps < 1)).size:
        kept = _top_p_together(_picked(scores, rows), _column(ps[rows], scores.device))
        scores = _put(scores, rows, kept)
    if (rows := np.flatnonzero(min_ps)).size:
        some = _picked(scores, rows)
        floor = some.amax(1, keepdim=True) + _column(np.log(min_ps[rows]).astype(np.float32), scores.device)
        scores = _put(scores, rows, some.masked_fill(some < floor, -math.inf))
    return scores


def _picked(scores: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """These rows; without a copy where they are all."""
    return scores if len(rows) == len(scores) else scores[torch.from_numpy(rows).to(scores.device, non_blocking=True)]


def _put(scores: Tensor, rows: NDArray[np.int64], new: Tensor) -> Tensor:
    if len(rows) == len(scores):
        return new
    return scores.index_copy(0, torch.from_numpy(rows).to(scores.device, non_blocking=True), new)


def _column(values: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)[:, None]


def keep_min_p(scores: Tensor, min_p: float) -> Tensor:
    """Tokens at least `min_p` times as likely as the likeliest. 0 keeps everything."""
    return _at_least(scores, largest(scores) + math.log(min_p)) if min_p else scores


def cheap_together(scores: Tensor) -> bool:
    """Whether many rows cost as much as one, and asking for a value costs a wait: on a GPU."""
    return scores.device.type != "cpu"


def copied(logits: Tensor) -> Tensor:
    """A copy in float32."""
    on_host = not cheap_together(logits)
    return torch.from_numpy(logits.float().numpy().copy()) if on_host else logits.to(torch.float32, copy=True)


def divided(scores: Tensor, by: float) -> Tensor:
    if by == 1:
        return scores
    return scores / by if cheap_together(scores) else torch.from_numpy(scores.numpy() / by)


def largest(scores: Tensor) -> Tensor:
    """[..., 1]: the largest."""
    if cheap_together(scores):
        return scores.amax(-1, keepdim=True)
    return torch.from_numpy(scores.numpy().max(-1, keepdims=True))


def _at_least(scores: Tensor, floor: Tensor) -> Tensor:
    """-inf for what is below the floor."""
    if cheap_together(scores):
        return scores.masked_fill(scores < floor, -math.inf)
    row = scores.numpy()
    return torch.from_numpy(np.where(row < floor.numpy(), -math.inf, row))


def as_wide(logits: Tensor, width: int) -> Tensor:
    """[rows, width]: cut, or filled up with tokens of no probability."""
    if logits.shape[1] >= width:
        return logits[:, :width]
    missing = width - logits.shape[1]
    if cheap_together(logits):
        return torch.nn.functional.pad(logits, (0, missing), value=-math.inf)
    return torch.from_numpy(np.pad(logits.float().numpy(), ((0, 0), (0, missing)), constant_values=-math.inf))


def from_the_top(scores: Tensor) -> Iterator[int]:
    """Of [V], all tokens that are not banned, likeliest first, the lowest id among equals."""
    values, ids = torch.sort(scores, descending=True, stable=True)
    return iter(ids[values > -math.inf].tolist())


def highest(scores: Tensor, count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The values and ids of the `count` highest of each row, on the host."""
    if cheap_together(scores):
        found = torch.topk(scores, count)
        return found.values.cpu().numpy(), found.indices.cpu().numpy()
    rows = [torch.topk(row, count) for row in scores]
    return np.stack([row.values.numpy() for row in rows]), np.stack([row.indices.numpy() for row in rows])
