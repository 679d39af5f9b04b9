"""Hydra: Medusa's heads, each of which also reads the tokens drafted before it.

arXiv 2402.05109. Lossless. Head k reads the target's last feature, the embedding of the pending token and those of the
k candidates on its path, so that siblings get distributions of their own. No cache but one feature a sequence. Cost:
one small product a tree level over the nodes of that level, and the target's head.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from outrider.core.numeric.likeliest import NO_ROW
from outrider.core.tree import QRow, TokenTree
from outrider.draft.feature.medusa import HeadsSource


class HydraSource(HeadsSource):
    name = "hydra"

    @torch.inference_mode()
    def start(self, slots: Sequence[int]) -> list[QRow]:
        pending = [[int(self.seats[slot].context.tokens[-1])] for slot in slots]
        return self._after(slots, pending)

    @torch.inference_mode()
    def extend(self, slots: Sequence[int], trees: Sequence[TokenTree], done: Sequence[int]) -> list[list[QRow]]:
        owners, paths = [], []
        for slot, tree, first in zip(slots, trees, done, strict=True):
            for node in range(first, len(tree)):
                owners.append(slot)
                paths.append([int(tree.tokens[0]), *tree.path_tokens(node)])
        rows = iter(self._after(owners, paths))
        return [[next(rows) for _ in range(first, len(tree))] for tree, first in zip(trees, done, strict=True)]

    def _after(self, slots: Sequence[int], paths: Sequence[list[int]]) -> list[QRow]:
        """After each path, the pending token first; paths of one length, a head's, go through it together."""
        found, states, places = [NO_ROW] * len(paths), [], []
        able = [i for i, slot in enumerate(slots) if self.seats[slot].feature is not None]
        with self.active():
            for length in sorted({len(paths[i]) for i in able}):
                if length > self.net.deepest:
                    break
                alike = [i for i in able if len(paths[i]) == length]
                tokens = torch.from_numpy(np.array([paths[i] for i in alike])).to(self.device)
                embedded = self.embed(tokens).to(self.dtype)
                states.append(self.net.state(length - 1, self.features([slots[i] for i in alike]), embedded))
                places += alike
        if places:
            rows = self.distributions([slots[i] for i in places], torch.cat(states))
            for i, row in zip(places, rows, strict=True):
                found[i] = row
        return found
