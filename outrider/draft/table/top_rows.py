"""Top rows: the likeliest tokens of every row of scores, as small arrays on the host, in one place.

Everything vocabulary-wide that a table drafter does happens here: one scan for the largest and one for the normalising
sum, on the device where the scores lie; only the few that are kept cross to the host, in one transfer, or come with the
scores where the target brought them. On the host no thread of torch's takes part: it would go on spinning on a core
that the target's next step needs. Ties go to the lower id.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.numeric.compiled import compiled
from outrider.core.numeric.likeliest import largest
from outrider.core.numeric.numbers import log_total
from outrider.core.records import Scores, TopRows

_LOW_WORD = (1 << 32) - 1


def top_of(scores: Scores, count: int) -> TopRows | None:
    """The `count` likeliest tokens of each row: as the target brought them, else from its logits; None without both."""
    if scores.top is not None and scores.top.ids.shape[1] >= count:
        top = scores.top
        return TopRows(np.ascontiguousarray(top.ids[:, :count]), np.ascontiguousarray(top.logprobs[:, :count]))
    return None if scores.logits is None else top_rows(scores.logits, count)


def top_rows(logits: Tensor, count: int) -> TopRows:
    """The `count` likeliest tokens of each row of raw scores [rows, V]."""
    scores = logits.float()
    if scores.device.type == "cpu":
        rows = np.ascontiguousarray(scores.numpy())
        ids, values = largest(rows, count)
        sums = log_totals(rows, values[:, 0])
    else:
        ids, values, sums = _fetch(scores, torch.logsumexp(scores, dim=1), count)
    return TopRows(ids, values - sums[:, None])


def picked(logits: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """These rows of [rows, V]."""
    if logits.device.type == "cpu" and logits.dtype is torch.float32:
        return torch.from_numpy(logits.numpy()[rows])
    return logits[torch.from_numpy(rows).to(logits.device)]


def likeliest(logits: Tensor, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The likeliest token of each of these rows of [rows, V]."""
    some = picked(logits, rows)
    if some.device.type == "cpu" and some.dtype is torch.float32:
        return some.numpy().argmax(1)
    return some.argmax(1).cpu().numpy()


@compiled
def log_totals(scores: NDArray[np.float32], tops: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of each row, whose largest score is known: the logarithm of the sum of e to each."""
    sums = np.empty(len(scores), dtype=np.float32)
    for r in range(len(scores)):
        sums[r] = log_total(scores[r], tops[r])
    return sums


def _fetch(
    scores: Tensor, total: Tensor, count: int
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
    """The same through the device's own top-k, on integers that hold a score and, below it, its id from the top."""
    rows, width = scores.shape
    bits = (scores + 0.0).view(torch.int32).long()  # -0.0 becomes 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # as integers they now compare as the floats do
    keys = (ordered << 32) | (_LOW_WORD - torch.arange(width, device=scores.device))
    best = torch.topk(keys, min(count, width), dim=1).values
    packed = torch.cat([best, total.double().view(torch.int64)[:, None]], dim=1).cpu().numpy()
    high = (packed[:, :-1] >> 32).astype(np.int32)
    found = np.where(high < 0, high ^ 0x7FFFFFFF, high).astype(np.int32).view(np.float32)
    ids = np.full((rows, count), -1, dtype=np.int32)
    values = np.full((rows, count), -np.inf, dtype=np.float32)
    ids[:, : found.shape[1]] = np.where(np.isneginf(found), -1, _LOW_WORD - (packed[:, :-1] & _LOW_WORD))
    values[:, : found.shape[1]] = found
    return ids, values, packed[:, -1].copy().view(np.float64).astype(np.float32)
