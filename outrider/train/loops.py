"""Loops: notices where text that is being written says again what it has just said, for many sequences in step.

A small model's greedy answers often run into repetitions, which a drafter learns at once and then again and again. By
distance it is counted how many tokens in a row were equal to those so far back. Cost: a comparison a token and
distance; nothing is read back from the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

FARTHEST = 256  # tokens back


@dataclass(slots=True)
class Loops:
    sequences: int
    enough: int  # tokens said again that make a loop; 0: nothing does
    device: torch.device
    _equal: Tensor = field(init=False)  # [sequences, FARTHEST] tokens in a row that equal those 1, 2, ... back
    _back: Tensor = field(init=False)  # 1, 2, ...

    def __post_init__(self) -> None:
        self._equal = torch.zeros(self.sequences, FARTHEST, dtype=torch.int16, device=self.device)
        self._back = torch.arange(1, FARTHEST + 1, device=self.device)

    def add(self, tokens: Tensor, at: int, turn: Tensor) -> Tensor:
        """Changes state: column `at` of `tokens` was written. Says which sequences are in a loop [sequences].

        It is the turn[i]-th token of its turn (0: of none); what was said before the turn does not count.
        """
        if not self.enough:
            return torch.zeros_like(turn, dtype=torch.bool)
        reach = min(at, FARTHEST)
        before = tokens[:, at - reach : at].flip(1)
        same = (before == tokens[:, at, None]) & (self._back[:reach] < turn[:, None])
        self._equal[:, :reach] = torch.where(same, self._equal[:, :reach] + 1, 0)
        return (self._equal >= self.enough).any(1)
