"""One trained layer in torch: any number of slots in one forward, on any device. The other drivers fall back on it.

Exact in the network's precision, or with weights and activations in eight bits on a CPU where it is asked for. Cost:
each forward reads the weights once; pieces of very different lengths run one by one, since all are padded to the
longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from outrider.core.layer_driver import LayerPiece, LayerTraits
from outrider.core.numeric.likeliest import head_distributions
from outrider.core.tree import QRow
from outrider.models.networks.eagle3 import FeatureLayer
from outrider.runtime.layers.cache import FeatureCache
from outrider.runtime.packed import PackedLinears

PADDING = 2  # times the rows that there are: what padding may make of them


def eight_bits(net: nn.Module) -> PackedLinears:
    """What multiplies the network's matrices in eight bits while it is active, a head of the target's included."""
    return PackedLinears(nn.ModuleList([net, *getattr(net, "shared", ())]), eight_bits=True)


class PlainDriver:
    """What `LayerDriver` says."""

    def __init__(
        self, net: FeatureLayer, embed: Callable[[Tensor], Tensor], *, packed: bool = False,
        cache: FeatureCache | None = None,
    ) -> None:  # fmt: skip
        """`embed` is the target's. A network narrower than the target reads the first dimensions of its features and
        embeddings. `packed`: in eight bits where this machine can."""
        shape, weight = net.shape, net.fc.weight
        self.net, self._embed, self._packed = net, embed, packed
        self.traits = LayerTraits(shape.layers, shape.hidden, shape.vocab, weight.device, weight.dtype)
        self._eight: PackedLinears | None = None
        self.cache = cache or FeatureCache(shape.kv_heads, shape.head_dim, weight.dtype, weight.device)

    def active(self) -> AbstractContextManager[None]:
        """Changes state: matrices are packed when they are first multiplied here, since compiled code may do it all."""
        if not self._packed or not isinstance(self.net, nn.Module):
            return nullcontext()
        if self._eight is None:
            self._eight = eight_bits(self.net)
        return self._eight.active()

    def renewed(self, net: FeatureLayer) -> PlainDriver:
        return PlainDriver(net, self._embed, packed=self._packed, cache=self.cache)

    def embed(self, tokens: Tensor) -> Tensor:
        return self._embed(tokens)[..., : self.traits.hidden].to(self.traits.dtype)

    def fuse(self, features: Tensor) -> Tensor:
        return self.net.fuse(features)

    def forward(self, pieces: Sequence[LayerPiece]) -> list[Tensor]:
        counts = [len(piece.tokens) for piece in pieces]
        if not pieces:
            return []
        if len(pieces) * max(counts) > PADDING * sum(counts):
            return [states for piece in pieces for states in self.forward([piece])]
        batch, rows, reach = len(pieces), max(counts), max(piece.reach for piece in pieces)
        device = self.traits.device
        inputs = np.zeros((2, batch, rows), dtype=np.int64)
        sees = np.zeros((batch, 1, rows, reach), dtype=bool)
        sees[..., 0] = True  # so that padded rows stay finite
        for i, (piece, count) in enumerate(zip(pieces, counts, strict=True)):
            inputs[0, i, :count], inputs[1, i, :count] = piece.tokens, piece.positions
            sees[i, 0, :count, : piece.base] = True
            sees[i, 0, :count, piece.base : piece.reach] = piece.sees
        tokens, positions = torch.from_numpy(inputs).to(device)
        state = pieces[0].states[None] if batch == 1 else torch.stack([_padded(p.states, rows) for p in pieces])
        mask = None if sees.all() else torch.from_numpy(sees).to(device)
        slots = [piece.slot for piece in pieces]
        self.cache.reserve(max(slots) + 1, reach)
        with self.active():
            embedded = self.embed(tokens)
            state = self.net.enter(embedded, state)
            q, k, v = self.net.project(embedded, state, positions)
            self.cache.write(slots, [piece.start for piece in pieces], counts, k, v)
            state = self.net.finish(state, attend(q, *self.cache.read(slots, reach), mask))
        return [states[:count] for states, count in zip(state, counts, strict=True)]

    def distributions(
        self, states: Sequence[Tensor], temperatures: Sequence[float], width: int
    ) -> list[list[QRow]]:  # fmt: skip
        """One product with the head and one transfer for the whole batch."""
        if not states:
            return []
        each = [value for value, rows in zip(temperatures, states, strict=True) for _ in rows]
        with self.active():
            logits = self.net.logits(torch.cat(list(states)))
        found = iter(head_distributions(logits, each, self.net.ids, width))
        return [[next(found) for _ in rows] for rows in states]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Query heads that share a key head become rows of one problem: [B, Hq, R, D]."""
    batch, heads, rows, dim = q.shape
    group = heads // k.shape[1]
    folded = q.reshape(batch, k.shape[1], group * rows, dim)
    wide = mask.repeat(1, 1, group, 1) if mask is not None else None
    # on CUDA the libraries may plan anew for every length of text, which takes longer than the products
    attention = softmax_attention if folded.is_cuda else scaled_dot_product_attention
    return attention(folded, k, v, attn_mask=wide).reshape(batch, heads, rows, dim)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> Tensor:
    scores = (q @ k.transpose(2, 3)).float() * q.shape[-1] ** -0.5
    scores = scores if attn_mask is None else scores.masked_fill(~attn_mask, -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v


def _padded(states: Tensor, rows: int) -> Tensor:
    return pad(states, (0, 0, 0, rows - len(states)))
