"""Arithmetic of rejection: the acceptance ratio of one draw, and what a rejection leaves of the target's distribution.

The distribution p_j after j - 1 rejections is carried as unnormalised weights and their sum, `left / mass`, so that a
rejection touches only the tokens of the draft row: norm([p_j - q]+) has the weights [left - mass q]+. Works in the
dtype of the target's row and on its device; one copy of the row a rejection.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.errors import UnsupportedDraws
from outrider.core.tree import Draw, QRow


def accept_ratio(left: Tensor, mass: float, draw: Draw) -> float:
    """min(1, p(x) / q(x)) for the drawn token x; a token outside the target's vocabulary has p(x) = 0."""
    assert draw.row is not None, "a point mass has no ratio"
    q = draw.row.prob(draw.token)
    if q <= 0.0:
        raise UnsupportedDraws(
            f"token {draw.token} cannot have been drawn from a row that gives it no probability; "
            "hand over the row that the draw was made from"
        )
    p = float(left[draw.token]) if draw.token < left.numel() else 0.0
    return min(1.0, p / (mass * q))


def at_row(p: Tensor, row: QRow) -> NDArray[np.float64]:
    """p at the tokens of a draft row, in float64 on the host; 0 beyond the vocabulary."""
    inside = row.ids < p.numel()
    values = np.zeros(len(row.ids))
    values[inside] = p[torch.from_numpy(row.ids[inside]).to(p.device)].double().cpu().numpy()
    return values


def point(token: int) -> QRow:
    """A point mass as the row it amounts to."""
    return QRow(np.array([token], dtype=np.int64), np.ones(1))


def after_rejection(left: Tensor, mass: float, row: QRow) -> tuple[Tensor, float]:
    """Weights and sum of norm([p - q]+). Exact for "no proposal" too, where q sums below 1."""
    inside = row.ids < left.numel()
    ids, probs = (row.ids, row.probs) if inside.all() else (row.ids[inside], row.probs[inside])
    rest, total = (_on_host if left.device.type == "cpu" else _on_device)(left, mass, ids, probs)
    # Nothing left means p <= q everywhere, where a true rejection has probability 0: this one came from rounding, its
    # chance is of that size, and keeping p is as close to the target's distribution as the numbers allow.
    return (rest, total) if total > 0.0 else (left, mass)


def _on_host(left: Tensor, mass: float, ids: NDArray[np.int64], probs: NDArray[np.float64]) -> tuple[Tensor, float]:
    """In numpy: torch would wake its threads for a row."""
    rest = left.numpy().copy()  # `left` may be the caller's row
    rest[ids] = np.maximum(rest[ids] - mass * probs.astype(rest.dtype), 0.0)
    return torch.from_numpy(rest), float(rest.sum(dtype=np.float64))


def _on_device(left: Tensor, mass: float, ids: NDArray[np.int64], probs: NDArray[np.float64]) -> tuple[Tensor, float]:
    at, q = torch.from_numpy(ids).to(left.device), torch.from_numpy(probs).to(left.device, left.dtype)
    rest = left.index_put((at,), (left[at] - mass * q).clamp_(min=0.0))
    return rest, float(rest.sum(dtype=torch.float64))
