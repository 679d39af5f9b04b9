"""One recorded pass: its inputs as one small tensor, what runs on them, and what the model sees while it is recorded.

The model finds our attention and mask functions in transformers' registries, and a cache that is all slots at once;
where rows are read and written stands in tensors, so that a recording serves every step of its size.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from outrider.core.errors import UnsupportedModel
from outrider.core.records import HiddenRows, Scores, TopRows
from outrider.runtime.cuda.fusion import real, unrotated
from outrider.runtime.cuda.packing import Bucket, Packed
from outrider.runtime.cuda.reference import MAX_NODES, WORD, Fresh, Layout
from outrider.runtime.eager.cache import SlotCache

NAME = "outrider-graphed"  # of our attention and mask functions in transformers' registries
MOVES = 32  # accepted nodes of one sequence that a step can move; longer paths are moved before it


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a pass leaves behind; the next one may write over it."""

    logits: Tensor  # [S, V] of the last rows
    # What the host is told of them: [2, S, 1] likeliest tokens and those of the races, or [2, S, top] by `ops.top`.
    chosen: Tensor
    hidden: dict[int, Tensor]  # layer -> [T, d]


class Shelf:
    """Where recorded passes leave what is large: one place for all of them, not one in each recording."""

    def __init__(self, small: int = 8 << 20) -> None:
        self.small = small  # bytes that may stay where they were made
        self._places: dict[tuple[str, torch.dtype, int], Tensor] = {}

    @property
    def bytes(self) -> int:
        return sum(place.nbytes for place in self._places.values())

    def put(self, out: Outputs) -> Outputs:
        hidden = {layer: self._put(f"hidden {layer}", states) for layer, states in out.hidden.items()}
        return Outputs(self._put("logits", out.logits), out.chosen, hidden)

    def _put(self, name: str, x: Tensor) -> Tensor:
        if x.nbytes <= self.small:
            return x
        key = (name, x.dtype, x.shape[1])
        place = self._places.get(key)
        if place is None or len(place) < len(x):  # earlier recordings go on writing to a smaller one
            rows = max(256, 1 << (len(x) - 1).bit_length())
            place = self._places[key] = torch.empty((rows, x.shape[1]), dtype=x.dtype, device=x.device)
        return place[: len(x)].copy_(x)


class Step:
    """The inputs of the passes of one size as one tensor, and what runs on them."""

    def __init__(self, cache: SlotCache, ops: Any, bucket: Bucket, device: torch.device, top: int = 0) -> None:
        self.cache, self.ops, self.bucket, self.top = cache, ops, bucket, top
        self.uses = 0  # passes that ran
        self.tried = self.graph = False  # whether it was to be recorded, and is
        self.moved = False  # whether the accepted paths that were filled in have been kept
        self.stored = {id(tensor) for layer in range(len(cache)) for tensor in cache.layer(layer)}
        self._marks: dict[int, Tensor] = {}  # by window: the mask that a layer type with it gets
        self._waiting: tuple[Tensor, Tensor, Tensor, Tensor] | None = None  # a layer's rows, its cache: not stored yet
        rows, sequences = bucket.rows, bucket.sequences
        shapes: dict[str, tuple[int, ...]] = {
            **dict.fromkeys(("ids", "positions", "places", "owners"), (rows,)), "words": (rows, MAX_NODES // WORD),
            **dict.fromkeys(("slots", "lengths", "nodes", "counts", "causal"), (sequences,)),
            **dict.fromkeys(("temperatures", "keys"), (bucket.scored,)),
            "begins": (sequences + 1,), "sources": (sequences, MOVES), "targets": (sequences, MOVES),
        }  # fmt: skip
        sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
        total = sum(_aligned(size) for size in sizes.values())
        host = torch.zeros(total, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._host, self._device = host, torch.zeros(total, dtype=torch.int64, device=device)
        self._fields: dict[str, np.ndarray[Any, np.dtype[np.int64]]] = {}
        views: dict[str, Tensor] = {}
        at = 0
        for name, shape in shapes.items():
            self._fields[name] = host.numpy()[at : at + sizes[name]].reshape(shape)
            views[name] = self._device[at : at + sizes[name]].view(shape)
            at += _aligned(sizes[name])
        self.ids, self.positions = views["ids"][None], views["positions"][None]  # [1, T], as the model takes them
        self.owners, self.places = views["owners"], views["places"]  # [T] slot of each row, and its place there
        self.sources, self.targets = views["sources"], views["targets"]
        self.layout = Layout(*(views[field.name] for field in fields(Layout)))
        self.temperatures, self.keys = views["temperatures"].view(torch.float64), views["keys"]  # [S]; 0: no race
        self._chosen = torch.zeros((2, bucket.scored, max(top, 1)), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._told = torch.cuda.Event() if device.type == "cuda" else None  # what the host is told has arrived
        self.replay: Callable[[], Outputs]
        self._fields["places"][:] = cache.capacity - 1
        self._fields["begins"][1:] = rows
        self._fields["sources"][:], self._fields["targets"][:] = -1, -1
        self._blank = host.numpy().copy()  # a pass of padding: reads nothing, writes to the bin

    def fill(self, packed: Packed, moves: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Write a pass's inputs on the host; what is padding reads nothing and writes to the bin."""
        f, blocks, where = self._fields, packed.blocks, packed.where
        self._host.numpy()[:] = self._blank
        rows = np.array([b.rows for b in blocks])
        facts = np.array([(b.slot, b.length, len(b.tokens), b.text) for b in blocks])
        f["slots"][: len(blocks)], f["lengths"][: len(blocks)], f["nodes"][: len(blocks)] = facts.T[:3]
        f["causal"][: len(blocks)], f["counts"][: len(blocks)] = facts[:, 3], rows
        f["begins"][: len(blocks)] = packed.begins
        lengths = np.repeat(facts[:, 1], rows)
        f["ids"][where] = np.concatenate([b.tokens[b.done :] for b in blocks])
        f["positions"][where] = np.concatenate([b.depths[b.done :] for b in blocks]) + lengths
        f["places"][where] = np.concatenate([np.arange(b.done, len(b.tokens)) for b in blocks]) + lengths
        f["owners"][where] = np.repeat(facts[:, 0], rows)
        sees = np.zeros((self.bucket.rows, MAX_NODES), dtype=np.bool_)
        for b, begin in zip(blocks, packed.begins, strict=True):
            if not b.text:
                sees[begin : begin + b.rows, : len(b.tokens)] = b.sees
        f["words"][:] = np.packbits(sees, axis=1, bitorder="little").view(np.int64)
        first = self.bucket.scored - self.bucket.rows  # among the rows with logits
        temperatures = f["temperatures"].view(np.float64)
        for b, begin in zip(blocks, packed.begins, strict=True):
            if b.race is not None:
                temperatures[begin + first : begin + first + b.rows] = b.race.temperature
                f["keys"][begin + first : begin + first + b.rows] = b.race.keys.view(np.int64)
        for i, pairs in enumerate(moves):
            for j, (source, target) in enumerate(pairs):
                f["sources"][i, j], f["targets"][i, j] = source, target

    def move(self) -> None:
        """Keep the accepted paths of the last step."""
        for block in self.cache.blocks:
            for tensor in block:
                self.ops.move_rows(tensor, self.layout.slots, self.sources, self.targets)
        self.moved = True

    def run(self, packed: Packed, meanwhile: Callable[[], None] = lambda: None) -> list[Scores]:
        """Changes state: one pass over what was filled in. Scores are parts of one copy: the next pass of this size
        writes over its own. They are asked for while the device is busy, and nobody waits until they are made."""
        self.uses += 1
        blocks, begins, texts = packed.blocks, packed.begins, packed.texts
        self._device.copy_(self._host, non_blocking=True)
        out = self.replay()
        self.moved = True
        self._chosen.copy_(out.chosen, non_blocking=True)
        if self._told is not None:
            self._told.record(torch.cuda.current_stream(self._device.device))
        scored = [b.rows for b in blocks[texts:]]
        first = (begins[texts] if scored else 0) + self.bucket.scored - self.bucket.rows  # among the rows with logits
        every = out.logits[first : first + sum(scored)].clone()
        logits = every.split(scored) if scored else ()
        hidden = {layer: states.clone() for layer, states in out.hidden.items()}
        meanwhile()
        if self._told is not None:
            self._told.synchronize()  # the only one of a pass; before it the inputs must not be written over
        likeliest = self._chosen[0, :, 0].tolist()
        raced = self._chosen[1, :, 0].tolist() if any(b.race is not None for b in blocks) else []
        chosen = self._chosen.numpy().copy() if self.top else None
        scores = []
        for i, (b, begin) in enumerate(zip(blocks, begins, strict=True)):
            states = HiddenRows(hidden, begin, b.rows) if hidden else {}
            if i < texts:
                scores.append(Scores(None, states))
                continue
            part = slice(begin - begins[texts] + first, begin - begins[texts] + first + b.rows)
            top = TopRows(chosen[0, part], chosen[1, part].view(np.float32)) if chosen is not None else None
            among, found = (every, begin - begins[texts]), raced[part] if b.race is not None and not self.top else None
            scores.append(Scores(logits[i - texts], states, tuple(likeliest[part]), top, among, raced=found))
        return scores

    def record(self, forward: Callable[[], Outputs], pool: Any) -> None:
        """On inputs that are all padding: what was filled in is lost."""
        self._host.numpy()[:] = self._blank
        self._device.copy_(self._host, non_blocking=True)
        self.replay = recorded(forward, self._device.device, pool, warm=self.uses > 0)
        self.graph = True

    def hold(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> None:
        """Rows that the attention over this cache stores as it reads them."""
        self.store()
        self._waiting = (key, value, keys, values)

    def fresh(self, keys: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Fresh | None:
        """What waits for this cache and is rotated like the queries; anything else is stored now."""
        if self._waiting is not None and self._waiting[2] is keys:
            key, tables = unrotated(self._waiting[0])
            if tables is rotary or (tables and rotary and tables[0] is rotary[0] and tables[1] is rotary[1]):
                value, self._waiting = real(self._waiting[1]), None
                return Fresh(key, value)
        self.store()
        return None

    def store(self) -> None:
        if self._waiting is not None:
            key, rotary = unrotated(self._waiting[0])
            _, value, keys, values = self._waiting
            self.ops.store_rows(key, real(value), keys, values, self.owners, self.places, rotary)
            self._waiting = None

    def mask(self, rule: Callable[..., Tensor], size: int | None) -> Tensor | None:
        """What a layer type gets as its mask: nothing, or a mark that stands for its window."""
        if rule is causal_mask_function:
            return None
        if size is None or not _is_window(rule, size):
            raise UnsupportedModel("its attention has a mask besides windows, which cannot be recorded")
        if size not in self._marks:
            self._marks[size] = torch.zeros((), device=self._device.device)
        return self._marks[size]

    @property
    def windows(self) -> dict[int, int]:
        """Id of the mask that a layer type gets -> its window."""
        return {id(mark): size for size, mark in self._marks.items()}


def recorded(forward: Callable[[], Any], device: torch.device, pool: Any, *, warm: bool = False) -> Callable[[], Any]:
    """A replay of `forward`: it is run twice, so that kernels are compiled and libraries have their workspace, then
    captured. What it returns stays where it is, and the next replay writes over it.

    The second run forbids what asks the device for a value: a capture that meets it fails and leaves torch's random
    generator unusable, a forbidden question does not. `warm`: it has run before, so once is enough.
    """
    side = _side(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        if not warm:
            forward()
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            forward()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with _no_collection(), torch.cuda.graph(graph, pool=pool):
        out = forward()

    def replay() -> Any:
        graph.replay()
        return out

    return replay


def _aligned(size: int) -> int:
    """Whole cache lines: kernels are compiled anew for addresses that are aligned in another way."""
    return -(-size // 16) * 16


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: what a stream has freed no other may use."""
    return torch.cuda.Stream(device)


@contextmanager
def _no_collection() -> Iterator[None]:
    """A capture does not survive that an older graph is freed meanwhile: garbage is collected before it, not in it."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class StepCache(Cache):
    """What the model sees as its cache while a step is recorded: all slots, read and written where the step says."""

    def __init__(self, cache: SlotCache, step: Step) -> None:
        super().__init__(layers=[])
        self._cache, self._step = cache, step

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._cache.layer(layer_idx)
        self._step.hold(key_states, value_states, keys, values)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


_now: list[Step] = []  # the step being recorded


@contextmanager
def running(step: Step) -> Iterator[None]:
    _now.append(step)
    try:
        yield
    finally:
        _now.pop()


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    step = _now[-1]
    if not {id(key), id(value)} <= step.stored:
        raise UnsupportedModel("its cache holds no keys and values but what they are made of, which cannot be recorded")
    query, rotary = unrotated(query)
    window = None if attention_mask is None else step.windows[id(attention_mask)]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = step.ops.tree_attention(
        query, key, value, step.layout, scale, window=window, softcap=softcap, sinks=s_aux, rotary=rotary,
        fresh=step.fresh(key, rotary),
    )  # fmt: skip
    return out, None


def _mask_of_layer_type(
    *_: Any, mask_function: Callable[..., Tensor] = causal_mask_function, local_size: int | None = None, **__: Any
) -> Tensor | None:
    return _now[-1].mask(mask_function, local_size) if _now else None


def _is_window(rule: Callable[..., Tensor], size: int) -> bool:
    """Whether a mask function of transformers hides exactly what lies `size` positions back or more."""
    zero = torch.zeros((), dtype=torch.long)
    far = torch.arange(2 * size + 2)
    try:
        return all(
            torch.equal(rule(zero, zero, torch.tensor(q), far), (far <= q) & (far > q - size))
            for q in (size - 1, size, 2 * size + 1)
        )
    except Exception:
        return False


AttentionInterface.register(NAME, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask_of_layer_type)
