"""Adaptive weighted rejection: the first token that passes, and an unbiased estimate of how likely a legal one was.

Paper: AWRS (arXiv 2504.05410), the recursive estimator. Tokens come in the order of the target's exponential race,
which is that of drawing without replacement. Let `left` be the probability of what was not refused when token v passes,
and q = p(v) / left. Then

    weight = left * (1 if the next token of the order passes, too, else q)

has E[weight 1[token = v]] = p(v) c(v) for every v: given what was refused, the second factor's mean is the legal share
of `left`. Weight 1 where all pass; 0, and no token, where none does. Exact for the token, which is the one that a mask
would leave to be chosen. Cost: a call for each token that is refused, one for the one that passes, and one more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray


def first(order: Iterator[int], allows: Callable[[int], bool]) -> int | None:
    """The first that passes; None where none does."""
    return next((token for token in order if allows(token)), None)


def weighed(
    order: Iterator[int], probs: NDArray[np.float64], allows: Callable[[int], bool], limit: int | None = None
) -> tuple[int | None, float]:  # fmt: skip
    """The first that passes, and its weight. `probs` are those of the race, summing to 1; changes them.

    Where `limit` tokens were refused it is none, of weight 0: the mean is too low then, by at most what was left.
    """
    for count, token in enumerate(order):
        if count == limit:
            break
        if not allows(token):
            probs[token] = 0.0
            continue
        left, p = float(probs.sum()), float(probs[token])
        following = next(order, None)
        sure = following is None or allows(following)
        return token, left if sure else p
    return None, 0.0
