"""Noise of a part: no decision of one drafter of a mixture shares its random bits with another's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.protocols import Noise, SharedNoise
from outrider.core.tree import TokenTree


@dataclass(frozen=True, slots=True)
class NoiseOfPart:
    noise: Noise
    part: int

    def coin(self, p: float, node: int, draw: int) -> bool:
        return self.noise.coin(p, node + (self.part << 16), draw)

    def draw(self, weights: Tensor | NDArray[np.float64], node: int, draw: int) -> int:
        return self.noise.draw(weights, node + (self.part << 16), draw)

    # The target's noise is one for all: a part that follows it must see what the target will

    def pick(self, probs: Tensor, path: Sequence[int]) -> int:
        return self.noise.pick(probs, path)

    def pick_rows(self, probs: Tensor, tree: TokenTree) -> list[int]:
        return self.noise.pick_rows(probs, tree)

    def first(self, ids: NDArray[np.int64], probs: NDArray[np.float64], path: Sequence[int], count: int) -> list[int]:
        return cast(SharedNoise, self.noise).first(ids, probs, path, count)
