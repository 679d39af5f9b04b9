"""Blocks of masks without the host: a whole proposal recorded once by size of batch, then replayed.

The accepted rows become keys and values of all layers, then the block runs through them with static shapes, and the
likeliest tokens of each place are found, all on the device; one small tensor goes in, one comes back. The same
distributions as in torch, up to rounding. Batches and texts too large for that, and everything once a proposal failed,
which is said once, take the driver in torch, on the same cache. Cost: one pass over the block a step, whatever its
length; some tenths of a second to record each size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from outrider.core.layer_driver import LayerPiece, LayerTraits, Wanted
from outrider.core.numeric.likeliest import sparse_rows
from outrider.core.tree import QRow
from outrider.models.networks.eagle3 import rotary_angles
from outrider.runtime.layers.blocks import FeatureBlocks
from outrider.runtime.layers.recorded import BATCHES, ROOM, TEXT_ROWS, Forward, Inputs, Kernels, words

log = logging.getLogger("outrider")


class RecordedBlocks:
    """What `BlockDriver` says."""

    def __init__(
        self, plain: FeatureBlocks, ops: Kernels, *, active: Callable[[], AbstractContextManager[None]],
        record: Callable[[Forward], Forward] | None,
    ) -> None:  # fmt: skip
        """`active` surrounds the pass while it is recorded; without `record` it runs anew each time."""
        self.plain, self.ops, self.active, self.record = plain, ops, active, record
        self.net, self.cache, self.embed = plain.net, plain.cache, plain.embed
        self._ids = plain.net.ids.cpu().numpy()
        self._inputs: dict[int, Inputs] = {}
        self._made: dict[tuple[int, int], tuple[_Fill, Forward]] = {}  # a replay reads what its forward holds
        self._keys: Tensor | None = None  # those that were recorded with
        self._broken = False

    @property
    def traits(self) -> LayerTraits:
        return self.plain.traits

    @property
    def deepest(self) -> int:
        return self.plain.deepest

    def fuse(self, features: Tensor) -> Tensor:
        return self.plain.fuse(features)

    def forward(self, pieces: Sequence[LayerPiece]) -> list[Tensor]:
        return self.plain.forward(pieces)

    @torch.inference_mode()
    def blocks(self, wanted: Sequence[Wanted], width: int) -> list[list[QRow]]:
        small = len(wanted) <= BATCHES[-1] and all(len(part.tokens) <= TEXT_ROWS for part in wanted)
        if small and not self._broken:
            try:
                return self._replay(wanted, width)
            except Exception as error:
                self._broken = True
                log.warning("blocks are not recorded but made kernel by kernel: %s", error)
        return self.plain.blocks(wanted, width)

    def _replay(self, wanted: Sequence[Wanted], width: int) -> list[list[QRow]]:
        batch = next(size for size in BATCHES if size >= len(wanted))
        if batch not in self._inputs:
            layers, hidden = len(self.traits.layers), self.traits.hidden
            self._inputs[batch] = Inputs(batch, layers, hidden, self.traits.dtype, self.traits.device)
        self._inputs[batch].fill(wanted)
        self.cache.reserve(max(part.slot for part in wanted) + 1, max(part.length for part in wanted) + ROOM)
        if self._keys is not self.cache.whole[0]:  # what was recorded reads another place
            self._keys, self._made = self.cache.whole[0], {}
        if (batch, width) not in self._made:
            forward = _Fill(self, self._inputs[batch], batch, width)
            self._made[batch, width] = forward, self.record(forward) if self.record is not None else forward
        found = self._made[batch, width][1]().cpu().numpy()  # [2, batch, deepest, width]
        ids, probs = self._ids[found[0]], np.exp(found[1].view(np.float32).astype(float))
        return [sparse_rows(ids[i], probs[i]) for i in range(len(wanted))]


class _Fill:
    """The pass of one size: static shapes only, nothing asks the device for a value."""

    def __init__(self, owner: RecordedBlocks, inputs: Inputs, batch: int, width: int) -> None:
        self.owner, self.inputs, self.batch, self.width = owner, inputs, batch, width
        self.keys, self.values = owner.cache.whole
        shape, device = owner.net.shape, owner.traits.device
        self.text, self.block = torch.arange(TEXT_ROWS, device=device), torch.arange(shape.block, device=device)
        self.begins = torch.arange(0, (batch + 1) * shape.block, shape.block, device=device)
        self.counts = torch.full((batch,), shape.block, device=device)
        self.trees = torch.zeros((batch,), dtype=torch.int64, device=device)
        self.words = words([(1 << shape.block) - 1] * (batch * shape.block)).to(device)  # each row sees them all
        self.masks = torch.full((batch, shape.block - 1), shape.mask, device=device)

    def __call__(self) -> Tensor:
        with self.owner.active():
            return self._fill()

    def _fill(self) -> Tensor:
        """[2, batch, depths, width]: ids of the likeliest tokens and the bits of their log-probabilities."""
        owner, given, net = self.owner, self.inputs, self.owner.net
        length, there = given.lengths + given.counts, (given.counts > 0)[:, None]
        rows, after, spare = given.lengths[:, None] + self.text, length[:, None] + self.block, self.keys.shape[2] - 1
        positions = torch.cat([rows, after], 1) + given.missed[:, None]
        angles = rotary_angles(positions, net.shape).repeat(1, 1, 2)
        cos, sin = angles.cos(), angles.sin()
        keys, values = net.context(net.fuse(given.features()), None)
        places = torch.where(self.text < given.counts[:, None], rows, spare)
        self._store(keys, values, places, (cos[:, :TEXT_ROWS], sin[:, :TEXT_ROWS]), slice(None))

        rotary = cos[:, TEXT_ROWS:].contiguous(), sin[:, TEXT_ROWS:].contiguous()
        flat = rotary[0].flatten(0, 1)[None], rotary[1].flatten(0, 1)[None]
        places, heads = torch.where(there, after, spare), net.shape.kv_heads
        layout = owner.ops.Layout(
            given.slots, length, self.counts, self.begins, self.counts, self.trees,
            positions[:, TEXT_ROWS:].flatten(), self.words,
        )  # fmt: skip

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            its = slice(layer * heads, (layer + 1) * heads)
            self._store(k, v, places, rotary, its)
            out = owner.ops.tree_attention(
                _in_one(q), self.keys[:, its], self.values[:, its], layout, net.shape.head_dim**-0.5, rotary=flat
            )
            return out.view(self.batch, -1, *out.shape[2:]).transpose(1, 2)

        pending = given.tokens.gather(1, (given.counts - 1).clamp(min=0)[:, None])
        states = net(owner.embed(torch.cat([pending, self.masks], 1)), None, attention)[:, net.first :]
        temperature = given.temperature.float()[:, None].expand(-1, owner.deepest).flatten()
        return owner.ops.top(net.logits(states), self.width, temperature)

    def _store(
        self, keys: Tensor, values: Tensor, places: Tensor, rotary: tuple[Tensor, Tensor], heads: slice
    ) -> None:  # fmt: skip
        """Unrotated rows [B, H, R, D] go to these places [B, R] of their slots."""
        # kernels read by address: a view of one number for all rows would not do
        slots, where = torch.stack([self.inputs.slots[:, None].expand_as(places), places]).flatten(1)
        flat = rotary[0].flatten(0, 1)[None], rotary[1].flatten(0, 1)[None]
        self.owner.ops.store_rows(
            _in_one(keys), _in_one(values), self.keys[:, heads], self.values[:, heads], slots, where, flat
        )


def _in_one(x: Tensor) -> Tensor:
    """[B, H, R, D] -> [1, H, B * R, D]"""
    return x.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2)
