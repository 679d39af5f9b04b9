"""Acceptance head: marks of drafted tokens by a small trained network on the drafter's own hidden states.

SpecDec++ (arXiv 2405.19715). Lossless: nothing is proposed here, and a grower asks only about tokens that stay in the
draft. Cost: a few small products and one transfer a level, for the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.protocols import States
from outrider.core.tree import TokenTree


@dataclass(slots=True)
class HeadMarks:
    source: States
    head: Callable[[Tensor], Tensor]  # [n, d] -> [n]: chances of acceptance

    @torch.inference_mode()
    def chances(
        self, slots: Sequence[int], trees: Sequence[TokenTree], done: Sequence[int]
    ) -> list[NDArray[np.float64]]:
        states = self.source.states(slots)
        counts = [len(rows) for rows in states]
        if not any(counts):
            return [np.empty(0) for _ in slots]
        every = self.head(torch.cat([rows for rows in states if len(rows)])).double().cpu().numpy()
        return np.split(every, np.cumsum(counts)[:-1])
