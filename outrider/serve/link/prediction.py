"""How much of a text the caller had predicted: what OpenAI's usage calls accepted and rejected prediction tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.draft.lookup.predicted import CERTAIN, follow


def agreed(prediction: Sequence[int], output: Sequence[int]) -> int:
    """Tokens of the output that stood where the prediction said, through insertions and deletions.

    A pointer walks along the prediction as the drafter's does, so this is what it could have drafted; each place of
    the prediction counts once.
    """
    if not len(prediction) or not len(output):
        return 0
    expected, said = np.array(prediction, dtype=np.int64), np.array(output, dtype=np.int64)
    pointer, run, used = 0, CERTAIN, np.zeros(len(expected), dtype=bool)
    for read, token in enumerate(said):
        if run and pointer < len(expected) and expected[pointer] == token:
            used[pointer] = True
        pointer, run = follow(expected, said[: read + 1], read, pointer, run)
    return int(used.sum())
