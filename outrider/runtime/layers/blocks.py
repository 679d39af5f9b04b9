"""Block drafters in torch: masks behind a text filled in one pass, any number of slots, on any device.

Exact in the network's precision, or with matrices in eight bits where `active` says so. Rows of a block stand behind
those of the text in the cache and are written over later. Cost: a pass reads the weights once, however long the block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.core.layer_driver import LayerPiece, LayerTraits, Wanted
from outrider.core.numeric.likeliest import head_distributions
from outrider.core.tree import QRow
from outrider.models.networks.block import BlockNet, DeerNet, DFlashNet
from outrider.runtime.layers.cache import FeatureCache
from outrider.runtime.layers.plain import attend

ROWS_AT_ONCE = 512  # of text


class BlockRunner:
    """Runs rows of several slots through a network's layers, keys and values in a cache."""

    def __init__(
        self, net: BlockNet, embed: Callable[[Tensor], Tensor],
        active: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        """`embed` is the target's; `active` surrounds every forward."""
        shape, weight = net.shape, net.norm.weight
        self.net: Any = net
        self._embed, self.active = embed, active
        self.traits = LayerTraits(shape.layers, shape.hidden, shape.vocab, weight.device, weight.dtype)
        self.cache = FeatureCache(shape.deep * shape.kv_heads, shape.head_dim, weight.dtype, weight.device)

    @property
    def deepest(self) -> int:
        return self.net.deepest

    def embed(self, tokens: Tensor) -> Tensor:
        return self._embed(tokens)[..., : self.traits.hidden].to(self.traits.dtype)

    def run(
        self, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int], tokens: Tensor, positions: Tensor, *,
        causal: bool,
    ) -> Tensor:  # fmt: skip
        """What comes out for tokens [B, R] at these positions, stored from `starts` on: [B, R, d]. Changes the cache.

        Each sees the rows before its slot's start and, of these rows, those up to itself or all `counts` of them.
        """
        rows, heads, reach = tokens.shape[1], self.net.shape.kv_heads, max(starts) + tokens.shape[1]
        self.cache.reserve(max(slots) + 1, reach)
        last = np.arange(1, rows + 1)[None] if causal else np.array(counts)[:, None]
        sees = np.arange(reach) < (np.array(starts)[:, None] + last)[..., None]  # [B, R or 1, reach]
        mask = None if sees.all() else torch.from_numpy(sees).to(self.traits.device)
        if mask is not None:
            mask = mask.expand(-1, rows, -1)[:, None]

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            its = slice(layer * heads, (layer + 1) * heads)
            self.cache.write(slots, starts, counts, k, v, its)
            return attend(q, *self.cache.read(slots, reach, its), mask)

        return self.net(self.embed(tokens), self.net.rotation(positions), attention)

    def fill(
        self, slots: Sequence[int], starts: Sequence[int], missed: Sequence[int], pending: Sequence[int],
        temperatures: Sequence[float], width: int,
    ) -> list[list[QRow]]:  # fmt: skip
        """Of each slot the distributions behind its text; `missed` are the rows of it that the cache never held."""
        shape, device, first = self.net.shape, self.traits.device, self.net.first
        tokens = np.stack([self.net.block(token) for token in pending])
        positions = (np.array(starts) + np.array(missed))[:, None] + np.arange(shape.block)
        counts = [shape.block] * len(slots)
        inputs, places = torch.from_numpy(np.stack([tokens, positions])).to(device)
        states = self.run(slots, starts, counts, inputs, places, causal=False)
        states = states[:, first : first + self.deepest]
        each = [value for value in temperatures for _ in range(self.deepest)]
        found = head_distributions(self.net.logits(states.flatten(0, 1)), each, self.net.ids, width)
        return [found[at : at + self.deepest] for at in range(0, len(found), self.deepest)]


class FeatureBlocks(BlockRunner):
    """What `BlockDriver` says, for a network over the target's hidden states."""

    net: DFlashNet

    def fuse(self, features: Tensor) -> Tensor:
        with self.active():
            return self.net.fuse(features)

    def forward(self, pieces: Sequence[LayerPiece]) -> list[Tensor]:
        """Only keys and values come of rows of text: the states are handed back."""
        if pieces:
            every = np.concatenate([piece.positions for piece in pieces])
            starts = [piece.start for piece in pieces]
            with self.active():
                self._read([piece.slot for piece in pieces], starts, [piece.states for piece in pieces], every)
        return [piece.states for piece in pieces]

    def blocks(self, wanted: Sequence[Wanted], width: int) -> list[list[QRow]]:
        slots, missed = [part.slot for part in wanted], [part.missed for part in wanted]
        counts = [len(part.tokens) for part in wanted]
        places = [part.length + part.missed + np.arange(count) for part, count in zip(wanted, counts, strict=True)]
        with self.active():
            waiting = chain.from_iterable(part.waiting for part in wanted)
            fused = self.net.fuse(torch.cat([features.joined() for features in waiting]))
            self._read(slots, [part.length for part in wanted], fused.split(counts), np.concatenate(places))
            starts = [part.length + count for part, count in zip(wanted, counts, strict=True)]
            pending = [int(part.tokens[-1]) for part in wanted]
            return self.fill(slots, starts, missed, pending, [part.temperature for part in wanted], width)

    def _read(
        self, slots: Sequence[int], starts: Sequence[int], states: Sequence[Tensor], positions: np.ndarray
    ) -> None:
        """Keys and values of fused states go to the cache; positions of all of them, one slot behind another."""
        counts = [len(part) for part in states]
        self.cache.reserve(max(slots) + 1, max(start + count for start, count in zip(starts, counts, strict=True)))
        rotary = self.net.rotation(torch.from_numpy(positions)[None].to(self.traits.device))
        keys, values = self.net.context(torch.cat(list(states))[None], rotary)
        each = zip(slots, starts, counts, keys[0].split(counts, 1), values[0].split(counts, 1), strict=True)
        for slot, start, count, k, v in each:
            self.cache.write([slot], [start], [count], k[None], v[None])


class TokenBlocks(BlockRunner):
    """What `BlockDriver` says but for the target's features, for a network that reads the text itself."""

    net: DeerNet

    @torch.inference_mode()
    def read(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        """Changes state: these tokens of the text stand in the cache from place `start` on."""
        for first in range(0, len(tokens), ROWS_AT_ONCE):
            part = torch.tensor([list(tokens[first : first + ROWS_AT_ONCE])], device=self.traits.device)
            count = part.shape[1]
            places = start + first + torch.arange(count, device=self.traits.device)[None]
            with self.active():
                self.run([slot], [start + first], [count], part, places, causal=True)

    @torch.inference_mode()
    def blocks(self, wanted: Sequence[Wanted], width: int) -> list[list[QRow]]:
        slots, counts = [part.slot for part in wanted], [len(part.tokens) for part in wanted]
        starts = [part.length for part in wanted]
        rows = np.arange(max(counts))
        tokens = np.stack([part.tokens[np.minimum(rows, len(part.tokens) - 1)] for part in wanted])
        inputs = np.stack([tokens, np.array(starts)[:, None] + rows])
        with self.active():
            text, places = torch.from_numpy(inputs).to(self.traits.device)
            self.run(slots, starts, counts, text, places, causal=True)
            ends = [start + count for start, count in zip(starts, counts, strict=True)]
            pending = [int(part.tokens[-1]) for part in wanted]
            return self.fill(slots, ends, [0] * len(slots), pending, [part.temperature for part in wanted], width)
