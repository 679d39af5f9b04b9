"""One trained EAGLE-3 layer for single sequences on the CPU: a level of a tree in two compiled calls, in eight bits.

The same function as `Eagle3Layer`, up to the rounding of weights and activations to whole numbers; weights that were
stored in eight bits are not rounded again. Batches and long stretches of text go to torch (`plain`), and so do other
networks, devices and precisions: `made_for` says which can be had. A sequence that was not asked for long catches up
with its newest rows only. Cost: the weights are read once a level, on as many threads as it is given; some tens of
microseconds of Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.core.layer_driver import LayerPiece
from outrider.core.numeric.likeliest import sparse_rows
from outrider.core.tree import QRow
from outrider.models.networks.eagle3 import Eagle3Layer, rotary_angles
from outrider.runtime.layers import native_kernels
from outrider.runtime.layers.native_kernels import MAX_ROWS, Matrix, Sizes, Weights, WholeRows, Work
from outrider.runtime.layers.plain import PlainDriver
from outrider.runtime.native.kernels.linear import pack
from outrider.runtime.native.kernels.team import Team
from outrider.runtime.native.kernels.vectors import FLOATS, GROUP

CATCHES_UP = 8  # rows of text after a long rest


def made_for(plain: PlainDriver, threads: int) -> NativeDriver | None:
    """None where torch has to run this network."""
    net = plain.net
    if not isinstance(net, Eagle3Layer) or net.shape.head_dim % FLOATS:
        return None
    if any(w.device.type != "cpu" or w.dtype != torch.float32 for w in net.parameters()):
        return None
    return NativeDriver(plain, net, threads)


class NativeDriver:
    """What `LayerDriver` says; calls from several threads take turns."""

    def __init__(self, plain: PlainDriver, net: Eagle3Layer, threads: int) -> None:
        self.plain, self.net, self._threads = plain, net, threads
        self.traits = replace(plain.traits, catches_up=CATCHES_UP)
        self.layer = NativeLayer(net, Team(threads))

    def renewed(self, net: Eagle3Layer) -> NativeDriver:
        return NativeDriver(self.plain.renewed(net), net, self._threads)

    @property
    def embed(self) -> Callable[[Tensor], Tensor]:
        return self.plain.embed

    def fuse(self, features: Tensor) -> Tensor:
        return self.layer.fuse(features)

    def forward(self, pieces: Sequence[LayerPiece]) -> list[Tensor]:
        if len(pieces) != 1 or len(pieces[0].tokens) > MAX_ROWS:
            return self.plain.forward(pieces)
        (piece,), cache = pieces, self.plain.cache
        cache.reserve(piece.slot + 1, piece.reach)
        keys, values = cache.whole
        embedded = self.embed(torch.tensor(piece.tokens))
        return [self.layer.forward(embedded, piece, keys[piece.slot], values[piece.slot])]

    def distributions(
        self, states: Sequence[Tensor], temperatures: Sequence[float], width: int
    ) -> list[list[QRow]]:  # fmt: skip
        if len(states) != 1:
            return self.plain.distributions(states, temperatures, width)
        return [self.layer.distributions(states[0], temperatures[0], width)]


class NativeLayer:
    """The weights as products read them, room for what a call computes on its way, and the compiled calls."""

    def __init__(self, net: Eagle3Layer, team: Team) -> None:
        shape, layer = net.shape, net.midlayer
        attention, mlp = layer.self_attn, layer.mlp
        self._sizes = Sizes(shape.heads, shape.kv_heads, shape.head_dim, shape.eps, shape.rank, shape.normed)
        self._speeds = rotary_angles(torch.ones(1), shape)[0].numpy()  # radians a position
        joint = torch.cat([part.weight for part in (attention.q_proj, attention.k_proj, attention.v_proj)])
        norms = (layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm, net.norm)
        matrices: Any = (net.fc.weight, joint, attention.o_proj.weight, mlp.gate_proj.weight, mlp.up_proj.weight,
                         mlp.down_proj.weight, *_head(net))  # fmt: skip
        arrays: list[Any] = [_matrix(weight) for weight in matrices]
        self._weights = Weights(*arrays, *(norm.weight.detach().numpy().copy() for norm in norms))
        hidden, inner, across = shape.hidden, shape.intermediate, shape.heads * shape.head_dim
        wide = len(shape.layers) * hidden
        room: list[Any] = [
            np.empty((MAX_ROWS, size), dtype=np.float32)
            for size in (2 * hidden, len(joint), across, hidden, hidden, inner, inner, hidden, shape.rank, shape.vocab)
        ]
        self._work = Work(*room, *(_rows(size) for size in (wide, 2 * hidden, across, hidden, inner, shape.rank)))
        self._scores = np.empty((team.threads, 0), dtype=np.float32)
        self._ids = net.ids.numpy()
        self._team = team
        self._rehearse(wide, hidden)

    def _rehearse(self, wide: int, hidden: int) -> None:
        """So that all is compiled before anybody waits for it."""
        keys = torch.zeros(self._sizes.kv_heads, 1, self._sizes.dim)
        position, sees = np.zeros(1, dtype=np.int64), np.ones((1, 1), dtype=bool)
        piece = LayerPiece(0, 0, 0, position, sees, [0], self.fuse(torch.zeros(1, wide)))
        self.distributions(self.forward(torch.zeros(1, hidden), piece, keys, keys.clone()), 1.0, 1)

    def fuse(self, features: Tensor) -> Tensor:
        out = np.empty((len(features), self._work.state.shape[1]), dtype=np.float32)
        for first in range(0, len(features), MAX_ROWS):
            part = slice(first, first + MAX_ROWS)
            rows = np.ascontiguousarray(features[part].numpy())
            self._team.run(native_kernels.fuse, self._weights.fuse, rows, self._work.wide, out[part])
        return torch.from_numpy(out)

    def forward(self, embedded: Tensor, piece: LayerPiece, keys: Tensor, values: Tensor) -> Tensor:
        """Changes state: keys and values, [kv heads, room, D] of the piece's slot, get those of its rows."""
        out = np.empty((len(piece.positions), self._work.state.shape[1]), dtype=np.float32)
        if self._scores.shape[1] < keys.shape[1]:
            self._scores = np.empty((self._team.threads, keys.shape[1]), dtype=np.float32)
        angles = piece.positions[:, None].astype(np.float32) * self._speeds
        rows = (np.ascontiguousarray(given.numpy()) for given in (embedded, piece.states))
        self._team.run(
            native_kernels.forward, self._weights, self._sizes, self._work, self._scores, *rows, angles,
            np.ascontiguousarray(piece.sees), piece.base, piece.start, keys.numpy(), values.numpy(), out,
        )  # fmt: skip
        return torch.from_numpy(out)

    def distributions(self, states: Tensor, temperature: float, width: int) -> list[QRow]:
        places = np.empty((len(states), width), dtype=np.int32)
        probs = np.empty((len(states), width))
        for first in range(0, len(states), MAX_ROWS):
            part = slice(first, first + MAX_ROWS)
            self._team.run(
                native_kernels.distributions, self._weights, self._sizes, self._work,
                np.ascontiguousarray(states[part].numpy()), temperature, places[part], probs[part],
            )  # fmt: skip
        return sparse_rows(self._ids[places], probs)


def _head(net: Eagle3Layer) -> tuple[Tensor, Tensor]:
    """What makes few numbers of a state, if anything, and what reads them."""
    if net.shape.rank:
        return net.lm_head[0].weight, net.lm_head[1].weight
    return torch.zeros(0, net.shape.hidden), net.lm_head.weight


def _matrix(weight: Tensor) -> Matrix:
    packed = pack(weight.detach().numpy())
    return Matrix(packed.values, packed.scales)


def _rows(size: int) -> WholeRows:
    padded = -(-size // GROUP) * GROUP
    return WholeRows(np.empty((MAX_ROWS, padded), dtype=np.int16), np.empty(MAX_ROWS, dtype=np.float32))
