"""Whole proposals of one trained layer without the host: recorded once by size, then replayed.

The tree of EAGLE-2 (arXiv 2406.16858) with static shapes: the accepted rows run into the layer's cache, then level by
level the best `beam` nodes are expanded, and at the end the likeliest nodes of all levels are chosen, all on the
device; one small tensor goes in, one transfer brings tokens, parents and values. Lossless: point masses, the trees of
`grow/topk.py`. Changes the driver's cache only. Cost: one forward of the layer a level at its full beam, and some tens
of small kernels; a second to record each size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.layer_driver import PassStates, Wanted
from outrider.core.numeric.compiled import compiled
from outrider.core.tree import TokenTree, fixed
from outrider.models.networks.eagle3 import rotary_angles
from outrider.runtime.cuda.reference import MAX_NODES, WORD
from outrider.runtime.layers.plain import PlainDriver

TEXT_ROWS = 16  # of text that one recording runs
BATCHES = (1, 4, 16, 64)  # sequences; what is lacking is padding
LEAST_KEPT = 64  # candidates that come back
ROOM = TEXT_ROWS + MAX_NODES + 1  # rows of the cache behind the text; the last is written to by padding


class Kernels(Protocol):
    """What a runtime that records brings along."""

    Layout: Callable[..., Any]  # whose rows stand where: see `runtime/cuda/reference.py`

    def tree_attention(
        self, query: Tensor, keys: Tensor, values: Tensor, layout: Any, scaling: float, *,
        rotary: tuple[Tensor, Tensor] | None,
    ) -> Tensor: ...  # fmt: skip
    def store_rows(
        self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, places: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
    ) -> None: ...  # fmt: skip
    def top(self, logits: Tensor, count: int, temperature: Tensor | None) -> Tensor: ...


Forward = Callable[[], Tensor]
SCALARS = 6  # numbers of each sequence: see `Inputs`


class Inputs:
    """What changes from proposal to proposal, at a fixed place on the device; one for each size of batch."""

    def __init__(self, batch: int, layers: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self._host = torch.zeros((SCALARS + 2 * TEXT_ROWS) * batch, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.zeros_like(self._host, device=device)
        self._alone, self._each = _halves(self._host.numpy(), batch)  # [SCALARS, batch], [2, batch, TEXT_ROWS]
        alone, each = _halves(self._device, batch)
        self.slots, self.lengths, self.missed, self.counts, self.depths = alone[:-1]
        self.temperature = alone[-1].view(torch.float64)  # a temperature; as bits, to go over with the rest
        self.tokens, self._rows = each[0], each[1].reshape(-1)
        self.given = [torch.zeros((batch * TEXT_ROWS, hidden), dtype=dtype, device=device) for _ in range(layers)]

    def fill(self, wanted: Sequence[Wanted]) -> None:
        self._host.zero_()
        temperature = self._alone[-1].view(np.float64)
        temperature[:] = 1.0
        facts = [(part.slot, part.length, part.missed, len(part.tokens), part.depth) for part in wanted]
        self._alone[:-1, : len(wanted)] = np.array(facts).T
        temperature[: len(wanted)] = [part.temperature for part in wanted]
        passes: dict[PassStates, int] = {}  # and where the rows of each begin behind those of the others
        behind = 0
        for i, part in enumerate(wanted):
            self._each[0, i, : len(part.tokens)] = part.tokens
            rows = list[int]()
            for features in part.waiting:
                if features.states not in passes:
                    passes[features.states] = behind
                    behind += len(features.states.layers[0])
                first = passes[features.states] + features.first
                rows += [first + row for row in features.rows]
            self._each[1, i, : len(rows)] = rows
        self._device.copy_(self._host, non_blocking=True)
        each = [states.layers for states in passes]
        for given, *parts in zip(self.given, *each, strict=True):
            torch.index_select(torch.cat(parts) if len(parts) > 1 else parts[0], 0, self._rows, out=given)

    def features(self) -> Tensor:
        """[batch, TEXT_ROWS, layers * d]"""
        return torch.cat(self.given, -1).unflatten(0, (-1, TEXT_ROWS))


class Recording:
    """What `TreeDriver` says: the proposals of one network, recorded by batch, depth and number of candidates."""

    text_rows, largest_batch = TEXT_ROWS, BATCHES[-1]

    def __init__(
        self, driver: PlainDriver, ops: Kernels, *, beam: int, branch: int,
        active: Callable[[], AbstractContextManager[None]], record: Callable[[Forward], Forward] | None,
    ) -> None:  # fmt: skip
        """`active` surrounds the forward while it is recorded; without `record` it runs anew each time."""
        self.driver, self.ops, self.active, self.record = driver, ops, active, record
        self.net, self.cache = driver.net, driver.cache
        self.beam, self.branch = beam, min(branch, driver.traits.vocab)
        self._inputs: dict[int, Inputs] = {}
        self._made: dict[tuple[int, int, int], tuple[_Proposal, Forward]] = {}  # a replay reads what its forward holds
        self._keys: Tensor | None = None  # those that were recorded with

    @torch.inference_mode()
    def propose(self, wanted: Sequence[Wanted], nodes: int, deepest: int) -> Proposed:
        """At least `nodes` candidates of each slot; no slot wants more than `deepest` levels."""
        batch = next(size for size in BATCHES if size >= len(wanted))
        depth = max(part.depth for part in wanted)
        depth, keep = min(depth + depth % 2, deepest), max(LEAST_KEPT, 1 << (nodes - 1).bit_length())
        self.cache.reserve(max(part.slot for part in wanted) + 1, max(part.length for part in wanted) + ROOM)
        inputs = self._inputs_of(batch)
        inputs.fill(wanted)
        key = (batch, depth, keep)
        if key not in self._made:
            for size in self._depths(deepest):  # at once, not each in the middle of a text
                self._make(batch, size, keep)
            self._make(*key)
        return Proposed(self._made[key][1]().cpu().numpy(), first_of_level(self.beam, self.branch, depth))

    @torch.inference_mode()
    def prepare(self, batch: int, deepest: int) -> None:
        """Changes state: what proposals for up to so many slots replay, the usual number of candidates taken."""
        self.cache.reserve(batch, ROOM)
        for size in BATCHES[: 1 + sum(size < batch for size in BATCHES)]:
            for depth in self._depths(deepest):
                self._inputs_of(size)
                self._make(size, depth, LEAST_KEPT)

    def _inputs_of(self, batch: int) -> Inputs:
        if self._keys is not self.cache.whole[0]:  # what was recorded reads another place
            self._keys, self._made = self.cache.whole[0], {}
        if batch not in self._inputs:
            traits = self.driver.traits
            self._inputs[batch] = Inputs(batch, len(traits.layers), traits.hidden, traits.dtype, traits.device)
        return self._inputs[batch]

    @staticmethod
    def _depths(deepest: int) -> list[int]:
        return sorted({*range(2, deepest, 2), deepest})

    def _make(self, batch: int, depth: int, keep: int) -> None:
        if (batch, depth, keep) not in self._made:
            forward = _Proposal(self, self._inputs[batch], batch, depth, keep)
            self._made[batch, depth, keep] = forward, self.record(forward) if self.record is not None else forward


def expanded(beam: int, branch: int, depth: int) -> list[int]:
    """Nodes that are run at each level but the last."""
    sizes: list[int] = []
    for _ in range(1, depth):
        sizes.append(min(beam, branch * (sizes[-1] if sizes else 1)))
    return sizes


def first_of_level(beam: int, branch: int, depth: int) -> NDArray[np.int64]:
    """The number of the first candidate of each level; last, how many there are."""
    return np.cumsum([0, *(branch * rows for rows in (1, *expanded(beam, branch, depth)))])


class _Proposal:
    """The forward of one size: static shapes only, nothing asks the device for a value."""

    def __init__(self, owner: Recording, inputs: Inputs, batch: int, depth: int, keep: int) -> None:
        self.owner, self.inputs, self.batch, self.depth, self.keep = owner, inputs, batch, depth, keep
        self.keys, self.values = owner.cache.whole
        self.sizes = expanded(owner.beam, owner.branch, depth)
        self.first = first_of_level(owner.beam, owner.branch, depth).tolist()
        nodes, device = sum(self.sizes), owner.driver.traits.device
        self.text, self.levels = torch.arange(TEXT_ROWS, device=device), torch.arange(depth, device=device)
        self.nodes = torch.arange(nodes, device=device)
        self.above = torch.tensor([i for i, size in enumerate(self.sizes) for _ in range(size)], device=device)
        self.flying = [torch.full((batch,), end, device=device) for end in np.cumsum(self.sizes).tolist()]
        # rows of each sequence stand behind those of the one before, as many of each
        self.begins = {
            rows: torch.arange(0, (batch + 1) * rows, rows, device=device) for rows in {TEXT_ROWS, *self.sizes}
        }
        self.counts = {rows: torch.full((batch,), rows, device=device) for rows in self.begins}
        self.trees = torch.zeros((batch,), dtype=torch.int64, device=device)  # masks by words for all of them
        self.chain = words([(1 << row + 1) - 1 for row in range(TEXT_ROWS)]).to(device)  # [TEXT_ROWS, 2]
        self.itself = words([1 << node for node in range(nodes)]).to(device)  # [nodes, 2]

    def __call__(self) -> Tensor:
        with self.owner.active():
            return self._grow()

    def _grow(self) -> Tensor:
        """[4, batch, keep]: number, token and parent's number of the likeliest candidates, and their values' bits."""
        owner, given, branch = self.owner, self.inputs, self.owner.branch
        length = given.lengths + given.counts  # rows of text, once those that wait have run
        states, turn = self._read_text(length)
        wanted = (given.depths[:, None] > self.levels).double()  # [B, depth]
        places = torch.where((given.counts > 0)[:, None], length[:, None] + self.nodes, self.keys.shape[2] - 1)
        stored = torch.stack([given.slots[:, None].expand_as(places), places])  # [2, B, nodes]
        positions = (length + given.missed)[:, None] + self.above
        temperature = given.temperature.float()[:, None]
        value = wanted[:, :1]  # of the nodes that were run last; at first the root
        number = torch.full((self.batch, 1), -1, device=owner.driver.traits.device)  # as candidates; -1: the root
        words = torch.zeros((self.batch, 1, 2), dtype=torch.int64, device=owner.driver.traits.device)
        levels: list[tuple[Tensor, Tensor, Tensor]] = []
        begun = 0  # nodes that were run
        for level in range(1, self.depth + 1):
            rows = states.shape[1]
            found = owner.ops.top(owner.net.logits(states), branch, temperature.expand(-1, rows).flatten())
            tokens = owner.net.ids[found[0].flatten(1).long()]
            values = (value[..., None] * found[1].view(torch.float32).double().exp()).flatten(1)
            levels.append((tokens, number[..., None].expand(-1, -1, branch).flatten(1), values))
            if level == self.depth:
                break
            size = self.sizes[level - 1]
            best = values.sort(dim=1, descending=True, stable=True)
            chosen, value = best.indices[:, :size], best.values[:, :size] * wanted[:, level, None]
            parent, number = chosen // branch, self.first[level - 1] + chosen
            here = slice(begun, begun + size)
            begun += size
            words = picked_rows(words, parent) | self.itself[here]
            flying, position = self.flying[level - 1], positions[:, here].contiguous()
            layout = self._layout(length, flying, position, words)
            at = TEXT_ROWS + level - 1
            turned = turn[:, :, at, None].expand(-1, -1, size, -1)
            below = tokens.gather(1, chosen)
            states = self._run(below, picked_rows(states, parent), layout, stored[:, :, here], turned)
        tokens, parents, values = (torch.cat(part, 1) for part in zip(*levels, strict=True))
        best = values.sort(dim=1, descending=True, stable=True)  # of equals the first, which is the parent
        order = best.indices[:, : self.keep]
        picked = [order, tokens.gather(1, order), parents.gather(1, order)]
        return torch.stack([*picked, best.values[:, : self.keep].contiguous().view(torch.int64)])

    def _layout(self, lengths: Tensor, nodes: Tensor, positions: Tensor, words: Tensor) -> Any:
        """Of [B, R] rows, all sequences having as many."""
        rows = positions.shape[1]
        whose = (self.begins[rows], self.counts[rows], self.trees)
        slots = self.inputs.slots
        return self.owner.ops.Layout(slots, lengths, nodes, *whose, positions.flatten(), words.flatten(0, 1))

    def _read_text(self, length: Tensor) -> tuple[Tensor, Tensor]:
        """Run the rows that wait: the state after the last of them [B, 1, d], and rotations for text and levels
        [2, B, rows, d]."""
        owner, given = self.owner, self.inputs
        real = self.text < given.counts[:, None]  # [B, TEXT_ROWS]
        rows = given.lengths[:, None] + self.text
        positions, deeper = rows + given.missed[:, None], (length + given.missed)[:, None] + self.levels
        angles = rotary_angles(torch.cat([positions, deeper], 1), owner.net.shape).repeat(1, 1, 2)
        turn = torch.stack([angles.cos(), angles.sin()])
        layout = self._layout(given.lengths, given.counts, positions, torch.where(real[..., None], self.chain, 0))
        places = torch.where(real, rows, self.keys.shape[2] - 1)
        stored = torch.stack([given.slots[:, None].expand_as(places), places])
        state = owner.net.fuse(given.features())
        states = self._run(given.tokens, state, layout, stored, turn[:, :, :TEXT_ROWS])
        return picked_rows(states, (given.counts - 1).clamp(min=0)[:, None]), turn

    def _run(self, tokens: Tensor, state: Tensor, layout: Any, stored: Tensor, turn: Tensor) -> Tensor:
        """The layer over [B, R] rows; `stored`: their slots and places there [2, B, R], `turn`: their rotations."""
        owner, (batch, rows) = self.owner, tokens.shape
        embedded = owner.driver.embed(tokens)
        state = owner.net.enter(embedded, state)
        q, k, v = owner.net.project(embedded, state, None)
        q, k, v = (x.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2) for x in (q, k, v))  # [1, H, B * R, d]
        slots, places = stored.flatten(1)
        cos, sin = turn.flatten(1, 2)[:, None]
        owner.ops.store_rows(k, v, self.keys, self.values, slots, places, (cos, sin))
        scale = owner.net.shape.head_dim**-0.5
        attended = owner.ops.tree_attention(q, self.keys, self.values, layout, scale, rotary=(cos, sin))
        return owner.net.finish(state, attended.view(batch, rows, *attended.shape[2:]).transpose(1, 2))


@dataclass(frozen=True, slots=True)
class Proposed:
    """What one proposal brought to the host: `TreesFound` of several slots."""

    best: NDArray[np.int64]  # [4, batch, keep], likeliest first
    first: NDArray[np.int64]  # number of the first candidate of each level

    def tree(self, i: int, pending: int, nodes: int, origin: str) -> TokenTree:
        """The likeliest `nodes` of slot i, level by level and likeliest first within one."""
        numbers, tokens, parents, bits = self.best[:, i, :nodes]
        made = _arranged(numbers, tokens, parents, bits.view(np.float64), self.first, pending)
        return fixed(made[0], made[1], origin, made[2])


@compiled
def _arranged(numbers, tokens, parents, values, first, pending):  # type: ignore[no-untyped-def]
    """Tokens, parents and values of these candidates, likeliest first as given, level by level."""
    count = 0
    while count < len(values) and values[count] > 0.0:  # what has no value is no candidate
        count += 1
    place = np.zeros(first[-1] + 1, np.int64)  # of each candidate among those that stay; 0: the root
    out_tokens, out_parents = np.empty(count + 1, np.int64), np.empty(count + 1, np.int64)
    weights = np.empty(count + 1, np.float64)
    out_tokens[0], out_parents[0], weights[0], made = pending, -1, 1.0, 1
    for level in range(len(first) - 1):
        for i in range(count):
            if first[level] <= numbers[i] < first[level + 1]:
                place[numbers[i]] = made
                out_tokens[made], weights[made] = tokens[i], values[i]
                out_parents[made] = place[parents[i]] if parents[i] >= 0 else 0
                made += 1
    return out_tokens, out_parents, weights


def fits(beam: int, branch: int, depth: int) -> bool:
    """Whether such trees can be recorded."""
    return sum(expanded(beam, branch, depth)) <= MAX_NODES


def _halves(flat: Any, batch: int) -> tuple[Any, Any]:
    """Six numbers and two rows of text for each sequence, an array or a tensor each."""
    alone = SCALARS * batch
    return flat[:alone].reshape(SCALARS, batch), flat[alone:].reshape(2, batch, TEXT_ROWS)


def picked_rows(x: Tensor, rows: Tensor) -> Tensor:
    """[B, n, d] at [B, m] -> [B, m, d]."""
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))


def words(masks: Sequence[int]) -> Tensor:
    """Bit masks as two signed 64-bit words each."""
    parts = [[mask & ((1 << WORD) - 1), mask >> WORD] for mask in masks]
    return torch.from_numpy(np.array(parts, dtype=np.uint64).reshape(-1, 2).view(np.int64).copy())
