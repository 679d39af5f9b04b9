"""Rehearsal: a made-up request through a drafter and its controller, so that what they compile is ready before
anybody waits for it.

Leaves the drafter as it was: what it learnt is forgotten. For drafters that run no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.proposals import everything
from outrider.core.protocols import Controller, Drafter, Noise, Remembers
from outrider.core.records import Budget, Chunk, Load, Scores, StepRecord, StepTiming, Verdict
from outrider.core.tree import QRow

_TEXT = (1, 2, 3, 1, 2, 3, 1, 2)
_PREDICTION = (3, 1, 2, 3, 1)


@dataclass(frozen=True, slots=True)
class _Text:
    """All of `protocols.Context` that these drafters read."""

    tokens: NDArray[np.int64]
    prompt: tuple[int, ...]
    prediction: tuple[int, ...]
    output: tuple[int, ...] = ()
    temperature: float = 0.0

    def draft_rows(self, logits: Tensor, paths: Sequence[Sequence[int]], width: int) -> list[QRow]:
        return [QRow(self.tokens[2:3], np.array([1.0])) for _ in paths]

    def continuations(self) -> list[list[int]]:
        return []


def rehearse(drafter: Drafter, vocab_size: int, control: Controller | None = None, noise: Noise | None = None) -> None:
    """Two steps: one that follows the drafts and one that does not. A small vocabulary knows its own tokens only."""
    words, expected = (tuple(token % vocab_size for token in text) for text in (_TEXT, _PREDICTION))
    context = _Text(np.array(words, dtype=np.int64), words, expected)
    rows = torch.zeros(len(words) - 1, vocab_size)
    drafter.begin(0, context)
    try:
        drafter.absorb([Chunk(0, 0, words[:-1], Scores(rows))])
        for _ in range(2):
            proposals = drafter.propose([0], [Budget(8, 4)], [noise])  # type: ignore[list-item]
            budgets = [Budget(8, 4)]
            (tree,) = control.size([0], proposals, budgets, Load(1), 0.1) if control else everything(proposals, [8])
            path = tuple(tree.children(0)[:1])
            emitted = (*(int(tree.tokens[node]) for node in path), words[0])
            scores = Scores(torch.zeros(len(tree), vocab_size))
            record = StepRecord(tree, Verdict(path, words[0]), emitted, scores)
            drafter.observe([0], [record])
            if control is not None:
                control.observe([0], [record], StepTiming(0.1, 1.0, 0.0, len(tree), 1))
    finally:
        drafter.end(0)
        if isinstance(drafter, Remembers):
            drafter.forget()
