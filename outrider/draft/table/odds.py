"""Odds: how often a table's successor really came next, by its rank and by the probability that the table gives it.

A table remembers distributions of other contexts, so it is surer than it should be. Learnt from every committed token,
whatever was proposed: each successor that the table knew there either was the next token or was not. Makes the weights
of trees comparable between drafters; never decides what is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import InputError
from outrider.core.numeric.compiled import compiled

RANKS, BINS = 4, 16  # later ranks count as the last; bins are equal steps of log p/(1 - p)
_STEP = 0.75
_PRIOR = 8.0  # observations that the first guess counts for
_FULL = 1024.0  # a cell that has seen so many forgets half


class Odds(NamedTuple):
    offered: NDArray[np.float64]  # [kinds, ranks, bins]
    won: NDArray[np.float64]
    chance: NDArray[np.float64]  # the estimate, kept up to date
    prior: NDArray[np.float64]


def new_odds(kinds: int, trust: float = 0.8) -> Odds:
    """`trust` scales what the table says until something is known."""
    middle = (np.arange(BINS) - (BINS - 1) / 2) * _STEP
    prior = np.tile(trust / (1.0 + np.exp(-middle)), (kinds, RANKS, 1))
    return Odds(np.zeros_like(prior), np.zeros_like(prior), prior.copy(), prior)


def reset(odds: Odds) -> None:
    odds.offered[:], odds.won[:] = 0.0, 0.0
    odds.chance[:] = odds.prior


def stored_odds(odds: Odds) -> dict[str, NDArray[Any]]:
    return {"offered": odds.offered.copy(), "won": odds.won.copy()}


def restore_odds(odds: Odds, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Replace what is known. InputError where the arrays are no counts of this form."""
    offered, won = (np.asarray(arrays.get(name, np.zeros(0)), dtype=np.float64) for name in ("offered", "won"))
    shape = odds.offered.shape
    if offered.shape != shape or won.shape != shape or not (won >= 0).all() or not (won <= offered).all():
        raise InputError(f"stored odds are {offered.shape} and {won.shape}, not counts of {shape}; start without them")
    odds.offered[:], odds.won[:] = offered, won
    odds.chance[:] = (won + _PRIOR * odds.prior) / (offered + _PRIOR)


@compiled
def bin_of(p: float) -> int:
    if p <= 0.0:
        return 0
    if p >= 1.0:
        return BINS - 1
    return min(max(int(np.floor(np.log(p / (1.0 - p)) / _STEP + BINS / 2)), 0), BINS - 1)


@compiled
def chance_of(odds: Odds, kind: int, rank: int, p: float) -> float:
    return odds.chance[kind, min(rank, RANKS - 1), bin_of(p)]


@compiled
def count_offer(odds: Odds, kind: int, rank: int, p: float, won: bool) -> None:
    """Changes state: a successor of this rank and probability was the next token, or was not."""
    r, b = min(rank, RANKS - 1), bin_of(p)
    if odds.offered[kind, r, b] >= _FULL:
        odds.offered[kind, r, b] *= 0.5
        odds.won[kind, r, b] *= 0.5
    odds.offered[kind, r, b] += 1.0
    if won:
        odds.won[kind, r, b] += 1.0
    odds.chance[kind, r, b] = (odds.won[kind, r, b] + _PRIOR * odds.prior[kind, r, b]) / (
        odds.offered[kind, r, b] + _PRIOR
    )
