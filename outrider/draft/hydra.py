"""Hydra: Medusa's heads, each of which also reads the tokens drafted before it.

arXiv 2402.05109. Lossless. Head k reads the target's last feature, the embedding of the pending token and those of the
k candidates on its own path, so that siblings get laws of their own. No cache but one feature a sequence. Cost: one
small product a tree level over the nodes of that level, and the target's head.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from outrider.draft.head_laws import NOTHING
from outrider.draft.medusa import MedusaHeads, MedusaSource
from outrider.tree import QRow, TokenTree


class HydraHeads(MedusaHeads):
    def reads(self, number: int) -> int:
        return number + 2  # the feature, the pending token and the candidates before

    def state(self, number: int, feature: Tensor, path: Tensor) -> Tensor:
        read = torch.cat([feature, path.flatten(-2)], -1)
        return feature + silu(self.blocks[number](read))


class HydraSource(MedusaSource):
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
        """The law after each path, the pending token first; paths of one length, a head's, go through it together."""
        laws, states, places = [NOTHING] * len(paths), [], []
        able = [i for i, slot in enumerate(slots) if self.seats[slot].feature is not None]
        with self.active():
            for length in sorted({len(paths[i]) for i in able}):
                if length > self.net.deepest:
                    break
                own = [i for i in able if len(paths[i]) == length]
                tokens = torch.from_numpy(np.array([paths[i] for i in own])).to(self.device)
                embedded = self.embed(tokens).to(self.dtype)
                states.append(self.net.state(length - 1, self.features([slots[i] for i in own]), embedded))
                places += own
        if places:
            for i, law in zip(places, self.laws([slots[i] for i in places], torch.cat(states)), strict=True):
                laws[i] = law
        return laws
