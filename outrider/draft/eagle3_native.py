"""EAGLE-3's layer for one sequence on the CPU: a level of a tree in two compiled calls, weights in eight bits.

The same function as `Eagle3Layer`, up to the rounding of weights and activations to whole numbers (`native.linear`);
weights that were stored in eight bits are not rounded again. Batches, other devices and other precisions stay with
torch: `made_for` says for which networks it can be had. Cost: the weights are read once a level, on as many threads as
it is given; some tens of microseconds of Python.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.compiled import compiled
from outrider.draft.eagle3_layer import Eagle3Layer, turns
from outrider.draft.top_rows import largest
from outrider.native.linear import multiply, pack, quantize, share
from outrider.native.numbers import exp, fma, gate, norm, rotate, softmax
from outrider.native.team import Team, barrier
from outrider.native.vectors import FLOATS, GROUP, dot_tile
from outrider.tree import QRow

Floats = NDArray[np.float32]
MOST = 64  # rows of one call
_ZERO = np.float32(0)
_dots_1, _dots_4 = dot_tile(1), dot_tile(4)


class Matrix(NamedTuple):
    values: NDArray[np.int8]
    scales: Floats


class Weights(NamedTuple):
    fuse: Matrix
    qkv: Matrix  # queries, keys and values below each other
    out: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix
    into_head: Matrix  # of a head through `rank` numbers, else empty
    head: Matrix
    of_embedding: Floats  # norms
    of_state: Floats
    before_mlp: Floats
    before_head: Floats


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    eps: float
    rank: int  # of the head; 0: one matrix
    normed: bool  # the normed state flows past attention


class Rows(NamedTuple):
    """Rows as products read them."""

    q: NDArray[np.int16]
    scales: Floats


class Work(NamedTuple):
    """Room for what a call computes on its way, MOST rows of each."""

    joined: Floats  # [.., 2 d] embedding and state, normed
    qkv: Floats
    attended: Floats
    state: Floats  # behind attention
    normed: Floats
    gates: Floats
    ups: Floats
    added: Floats
    ranked: Floats  # [.., rank]
    logits: Floats
    wide: Rows  # of features
    both: Rows  # of `joined`
    across: Rows  # of `attended`
    narrow: Rows  # of `normed`
    inner: Rows  # of `gates`
    few: Rows  # of `ranked`


def made_for(net: Any, team: Team) -> NativeLayer | None:
    """None where torch has to run this network."""
    if type(net) is not Eagle3Layer or net.shape.head_dim % FLOATS:
        return None
    if any(w.device.type != "cpu" or w.dtype != torch.float32 for w in net.parameters()):
        return None
    return NativeLayer(net, team)


class NativeLayer:
    """What `eagle3.LoneLayer` says; calls from several threads take turns."""

    most = MOST

    def __init__(self, net: Eagle3Layer, team: Team) -> None:
        shape, layer = net.shape, net.midlayer
        attention, mlp = layer.self_attn, layer.mlp
        self._shape = Shape(shape.heads, shape.kv_heads, shape.head_dim, shape.eps, shape.rank, shape.normed)
        self._turns = turns(torch.ones(1), shape)[0].numpy()  # radians a position
        joint = torch.cat([part.weight for part in (attention.q_proj, attention.k_proj, attention.v_proj)])
        norms = (layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm, net.norm)
        matrices: Any = (net.fc.weight, joint, attention.o_proj.weight, mlp.gate_proj.weight, mlp.up_proj.weight,
                         mlp.down_proj.weight, *_head(net))  # fmt: skip
        arrays: list[Any] = [_matrix(weight) for weight in matrices]
        self._weights = Weights(*arrays, *(own.weight.detach().numpy().copy() for own in norms))
        hidden, inner, across = shape.hidden, shape.intermediate, shape.heads * shape.head_dim
        wide = len(shape.layers) * hidden
        room: list[Any] = [
            np.empty((MOST, size), dtype=np.float32)
            for size in (2 * hidden, len(joint), across, hidden, hidden, inner, inner, hidden, shape.rank, shape.vocab)
        ]
        self._work = Work(*room, *(_rows(size) for size in (wide, 2 * hidden, across, hidden, inner, shape.rank)))
        self._scores = np.empty((team.threads, 0), dtype=np.float32)
        self._ids = net.ids.numpy()
        self._team = team
        self._rehearse(wide, hidden)

    def _rehearse(self, wide: int, hidden: int) -> None:
        """So that all is compiled before anybody waits for it."""
        keys = torch.zeros(self._shape.kv_heads, 1, self._shape.dim)
        state = self.fuse(torch.zeros(1, wide))
        row, sees = np.zeros(1, dtype=np.int64), np.ones((1, 1), dtype=bool)
        self.laws(self.forward(torch.zeros(1, hidden), state, row, sees, 0, 0, keys, keys.clone()), 1.0, 1)

    def fuse(self, features: Tensor) -> Tensor:
        out = np.empty((len(features), self._work.state.shape[1]), dtype=np.float32)
        for first in range(0, len(features), MOST):
            own = np.ascontiguousarray(features[first : first + MOST].numpy())
            self._team.run(_fuse, self._weights.fuse, own, self._work.wide, out[first : first + MOST])
        return torch.from_numpy(out)

    def forward(
        self, embedded: Tensor, state: Tensor, positions: NDArray[np.int64], sees: NDArray[np.bool_], base: int,
        start: int, keys: Tensor, values: Tensor,
    ) -> Tensor:  # fmt: skip
        out = np.empty((len(positions), self._work.state.shape[1]), dtype=np.float32)
        if self._scores.shape[1] < keys.shape[1]:
            self._scores = np.empty((self._team.threads, keys.shape[1]), dtype=np.float32)
        angles = positions[:, None].astype(np.float32) * self._turns
        rows = (np.ascontiguousarray(own.numpy()) for own in (embedded, state))
        self._team.run(_forward, self._weights, self._shape, self._work, self._scores, *rows, angles,
                       np.ascontiguousarray(sees), base, start, keys.numpy(), values.numpy(), out)  # fmt: skip
        return torch.from_numpy(out)

    def laws(self, states: Tensor, heat: float, width: int) -> list[QRow]:
        places = np.empty((len(states), width), dtype=np.int32)
        probs = np.empty((len(states), width))
        for first in range(0, len(states), MOST):
            part = slice(first, first + MOST)
            self._team.run(_laws, self._weights, self._shape, self._work, np.ascontiguousarray(states[part].numpy()),
                           heat, places[part], probs[part])  # fmt: skip
        ids = self._ids[places]
        return [QRow(i, p) if p[-1] > 0 else QRow(i[p > 0], p[p > 0]) for i, p in zip(ids, probs, strict=True)]


def _head(net: Eagle3Layer) -> tuple[Tensor, Tensor]:
    """What makes few numbers of a state, if anything, and what reads them."""
    if net.shape.rank:
        return net.lm_head[0].weight, net.lm_head[1].weight
    return torch.zeros(0, net.shape.hidden), net.lm_head.weight


def _matrix(weight: Tensor) -> Matrix:
    packed = pack(weight.detach().numpy())
    return Matrix(packed.values, packed.scales)


def _rows(size: int) -> Rows:
    return Rows(np.empty((MOST, -(-size // GROUP) * GROUP), dtype=np.int16), np.empty(MOST, dtype=np.float32))


@compiled
def _times(
    me: int, threads: int, sync: NDArray[np.int64], matrix: Matrix, x: Floats, rows: Rows, out: Floats
) -> tuple[int, int]:  # fmt: skip
    """out = x times the matrix: my columns of it, [low, high), are there at the end; whose rows x are is ready."""
    count = len(x)
    quantize(x, rows.q, rows.scales, count * me // threads, count * (me + 1) // threads)
    barrier(sync, threads)
    low, high = share(out.shape[1], me, threads)
    multiply(matrix.values, matrix.scales, rows.q[:count], rows.scales, out, low, high)
    return low, high


@compiled
def _fuse(
    me: int, threads: int, sync: NDArray[np.int64], matrix: Matrix, features: Floats, rows: Rows, out: Floats
) -> None:  # fmt: skip
    _times(me, threads, sync, matrix, features, rows, out)


@compiled
def _forward(
    me: int, threads: int, sync: NDArray[np.int64], weights: Weights, shape: Shape, work: Work, scores: Floats,
    embedded: Floats, state: Floats, angles: Floats, sees: NDArray[np.bool_], base: int, start: int, keys: Floats,
    values: Floats, out: Floats,
) -> None:  # fmt: skip
    """Changes state: keys and values [kv heads, room, D] of these rows stand from row `start` on.

    Every thread does its share of the rows between products, and of the columns in them.
    """
    rows, hidden = state.shape
    first, last = rows * me // threads, rows * (me + 1) // threads
    eps, joined, qkv = shape.eps, work.joined[:rows], work.qkv[:rows]
    for r in range(first, last):
        norm(embedded[r], weights.of_embedding, eps, joined[r, :hidden])
        norm(state[r], weights.of_state, eps, joined[r, hidden:])
    _times(me, threads, sync, weights.qkv, joined, work.both, qkv)
    barrier(sync, threads)
    for r in range(first, last):
        _turn(qkv[r], angles[r], shape, keys, values, start + r)
    barrier(sync, threads)
    attended, group, dim = work.attended[:rows], shape.heads // shape.kv_heads, shape.dim
    items = rows * shape.heads
    for item in range(items * me // threads, items * (me + 1) // threads):
        head, r = divmod(item, rows)
        part = slice(head * dim, (head + 1) * dim)
        _attend(qkv[r, part], keys[head // group], values[head // group], base, sees[r], scores[me], attended[r, part])
    barrier(sync, threads)
    added, behind, normed = work.added[:rows], work.state[:rows], work.normed[:rows]
    _times(me, threads, sync, weights.out, attended, work.across, added)
    barrier(sync, threads)
    for r in range(first, last):
        past = joined[r, hidden:] if shape.normed else state[r]
        for i in range(hidden):
            behind[r, i] = past[i] + added[r, i]
        norm(behind[r], weights.before_mlp, eps, normed[r])
    gates, ups = work.gates[:rows], work.ups[:rows]
    low, high = _times(me, threads, sync, weights.gate, normed, work.narrow, gates)
    multiply(weights.up.values, weights.up.scales, work.narrow.q[:rows], work.narrow.scales, ups, low, high)
    for r in range(rows):
        gate(gates[r, low:high], ups[r, low:high])
    barrier(sync, threads)
    low, high = _times(me, threads, sync, weights.down, gates, work.inner, out)
    for r in range(rows):
        for i in range(low, high):
            out[r, i] += behind[r, i]


@compiled
def _turn(row: Floats, angles: Floats, shape: Shape, keys: Floats, values: Floats, place: int) -> None:
    """Queries and keys of one row to their position; keys and values are stored."""
    dim, half = shape.dim, shape.dim // 2
    cos, sin = np.empty(dim, np.float32), np.empty(dim, np.float32)
    for i in range(half):
        cos[i] = cos[half + i] = np.cos(angles[i])
        sin[i] = sin[half + i] = np.sin(angles[i])
    scale = np.float32(dim**-0.5)
    for head in range(shape.heads + 2 * shape.kv_heads):
        own = row[head * dim : (head + 1) * dim]
        if head < shape.heads:
            rotate(own, cos, sin)
            for i in range(dim):
                own[i] *= scale
        elif head < shape.heads + shape.kv_heads:
            rotate(own, cos, sin)
            keys[head - shape.heads, place] = own
        else:
            values[head - shape.heads - shape.kv_heads, place] = own


@compiled
def _attend(
    query: Floats, keys: Floats, values: Floats, base: int, sees: NDArray[np.bool_], scores: Floats, out: Floats
) -> None:
    """One head of one row: sees the first `base` keys, and `sees` from there on."""
    reach = base + len(sees)
    for j in range(0, reach // 4 * 4, 4):
        _dots_4((keys, query, scores), (j,))
    for j in range(reach // 4 * 4, reach):
        _dots_1((keys, query, scores), (j,))
    for j in range(len(sees)):
        if not sees[j]:
            scores[base + j] = -np.inf
    softmax(scores[:reach])
    out[:] = _ZERO
    whole = reach // 4 * 4
    for j in range(0, whole, 4):
        a, b, c, d = scores[j], scores[j + 1], scores[j + 2], scores[j + 3]
        for i in range(len(out)):
            s = fma(b, values[j + 1, i], fma(a, values[j, i], out[i]))
            out[i] = fma(d, values[j + 3, i], fma(c, values[j + 2, i], s))
    for j in range(whole, reach):
        for i in range(len(out)):
            out[i] = fma(scores[j], values[j, i], out[i])


@compiled
def _laws(
    me: int, threads: int, sync: NDArray[np.int64], weights: Weights, shape: Shape, work: Work, states: Floats,
    heat: float, places: NDArray[np.int32], probs: NDArray[np.float64],
) -> None:  # fmt: skip
    """Of each state the likeliest draft ids, likeliest first, and how likely they are at this temperature."""
    rows = len(states)
    first, last = rows * me // threads, rows * (me + 1) // threads
    normed, logits = work.normed[:rows], work.logits[:rows]
    for r in range(first, last):
        norm(states[r], weights.before_head, shape.eps, normed[r])
    if shape.rank:
        ranked = work.ranked[:rows]
        _times(me, threads, sync, weights.into_head, normed, work.narrow, ranked)
        barrier(sync, threads)
        _times(me, threads, sync, weights.head, ranked, work.few, logits)
    else:
        _times(me, threads, sync, weights.head, normed, work.narrow, logits)
    barrier(sync, threads)
    if first == last:
        return
    ids, tops = largest(logits[first:last], places.shape[1])
    cold = np.float32(1 / heat)
    for r in range(first, last):
        places[r] = ids[r - first]
        row, top = logits[r], tops[r - first, 0]
        for i in range(len(row)):
            row[i] = exp((row[i] - top) * cold)
        total = _sum(row)
        for i in range(places.shape[1]):
            probs[r, i] = row[places[r, i]] / total


@compiled
def _sum(row: Floats) -> Any:
    """In sixteen sums that become two vectors."""
    sums = np.zeros(16, np.float32)
    whole = len(row) // 16 * 16
    for i in range(0, whole, 16):
        for j in range(16):
            sums[j] += row[i + j]
    total = np.float64(0)
    for j in range(16):
        total += sums[j]
    for i in range(whole, len(row)):
        total += row[i]
    return total
