"""One recorded step: its inputs as one small tensor, what runs on them, and what the model sees while it is recorded.

The model finds our attention and mask functions in transformers' registries, and a cache that is all slots at once;
where rows are read and written stands in tensors, so that a recording serves every step of its size.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from outrider.core.errors import UnsupportedModel
from outrider.core.records import Scores, TopRows
from outrider.runtime.cuda.fusion import real, unrotated
from outrider.runtime.cuda.reference import MAX_NODES, WORD, Fresh, Layout
from outrider.runtime.eager.cache import SlotCache
from outrider.runtime.passes import Block

NAME = "outrider-graphed"  # of our attention and mask functions in transformers' registries
MOVES = 32  # accepted nodes of one sequence that a step can move; longer paths are moved before it


class Outputs:
    """What one step leaves behind; the next replay writes over it."""

    def __init__(self, logits: Tensor, chosen: Tensor, hidden: dict[int, Tensor]) -> None:
        self.logits, self.hidden = logits, hidden  # [B, R, V], [B, R, d]
        self.chosen = chosen  # what the host is told: [1, B, R, 1] likeliest tokens, or [2, B, R, top] by `ops.top`


class Step:
    """The inputs of one bucket as one tensor, and what runs on them."""

    def __init__(self, cache: SlotCache, ops: Any, batch: int, rows: int, device: torch.device, top: int = 0) -> None:
        self.cache, self.ops, self.batch, self.rows, self.top = cache, ops, batch, rows, top
        self.stored = {id(tensor) for layer in range(len(cache)) for tensor in cache.layer(layer)}
        self.windows: dict[int, int] = {}  # id of the mask that a layer type gets -> its window
        self._masks: list[Tensor] = []  # keeps those ids alive
        self._waiting: tuple[Tensor, Tensor, Tensor, Tensor] | None = None  # a layer's rows, its cache: not stored yet
        grid, alone = (batch, rows), (batch,)
        shapes: dict[str, tuple[int, ...]] = {
            "ids": grid, "positions": grid, "places": grid, "words": (batch, rows, MAX_NODES // WORD),
            "slots": alone, "lengths": alone, "nodes": alone, "sources": (batch, MOVES), "targets": (batch, MOVES),
        }  # fmt: skip
        total = sum(int(np.prod(shape)) for shape in shapes.values())
        host = torch.zeros(total, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._host, self._device = host, torch.zeros(total, dtype=torch.int64, device=device)
        self._fields: dict[str, np.ndarray[Any, np.dtype[np.int64]]] = {}
        views: dict[str, Tensor] = {}
        at = 0
        for name, shape in shapes.items():
            size = int(np.prod(shape))
            self._fields[name] = host.numpy()[at : at + size].reshape(shape)
            views[name] = self._device[at : at + size].view(shape)
            at += size
        self.ids, self.positions, self.places = views["ids"], views["positions"], views["places"]
        self.sources, self.targets = views["sources"], views["targets"]
        self.layout = Layout(views["slots"], views["lengths"], views["nodes"], self.positions, views["words"])
        told = (2, batch, rows, top) if top else (1, batch, rows, 1)
        self._chosen = torch.zeros(told, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._told = torch.cuda.Event() if device.type == "cuda" else None  # what the host is told has arrived
        self.replay: Callable[[], Outputs]
        self._fields["places"][:] = cache.capacity - 1
        self._fields["sources"][:], self._fields["targets"][:] = -1, -1
        self._blank = host.numpy().copy()  # a step of padding: reads nothing, writes to the bin

    def fill(self, blocks: Sequence[Block], moves: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Write a step's inputs on the host; what is padding reads nothing and writes to the bin."""
        f = self._fields
        self._host.numpy()[:] = self._blank
        for i, b in enumerate(blocks):
            n = b.rows
            f["ids"][i, :n], f["positions"][i, :n] = b.tokens[b.done :], b.depths[b.done :]
            if n < self.rows:
                f["ids"][i, n:] = b.tokens[0]
            f["positions"][i] += b.length
            f["places"][i, :n] = np.arange(b.length + b.done, b.reach)
            packed = np.packbits(b.sees, axis=1, bitorder="little")
            f["words"][i, :n].view(np.uint8)[:, : packed.shape[1]] = packed
            f["slots"][i], f["lengths"][i], f["nodes"][i] = b.slot, b.length, len(b.tokens)
        for i, rows in enumerate(moves):
            for j, (source, target) in enumerate(rows):
                f["sources"][i, j], f["targets"][i, j] = source, target

    def move(self) -> None:
        """Keep the accepted paths of the last step."""
        for block in self.cache.blocks:
            for tensor in block:
                self.ops.move_rows(tensor, self.layout.slots, self.sources, self.targets)

    def run(self, blocks: Sequence[Block], meanwhile: Callable[[], None] = lambda: None) -> list[Scores]:
        """Changes state: one step on what was filled in. Scores are copies: the next step of this bucket writes over
        its own. They are asked for while the device is busy, and nobody waits until they are made."""
        count, rows = len(blocks), max(b.rows for b in blocks)
        self._device.copy_(self._host, non_blocking=True)
        out = self.replay()
        self._chosen.copy_(out.chosen, non_blocking=True)
        if self._told is not None:
            self._told.record(torch.cuda.current_stream(self._device.device))
        whole = out.logits[:count, :rows].clone().flatten(0, 1)
        hidden = {layer: states[:count, :rows].clone().unbind(0) for layer, states in out.hidden.items()}
        meanwhile()
        if self._told is not None:
            self._told.synchronize()  # the only one of a step
        chosen = self._chosen.numpy()[:, :count, :rows].copy()
        likeliest = chosen[0, :, :, 0].tolist()
        return [
            Scores(
                whole[i * rows : i * rows + b.rows], {layer: states[i][: b.rows] for layer, states in hidden.items()},
                tuple(likeliest[i][: b.rows]),
                TopRows(chosen[0, i, : b.rows], chosen[1, i, : b.rows].view(np.float32)) if self.top else None,
                (whole, i * rows),
            )
            for i, b in enumerate(blocks)
        ]  # fmt: skip

    def record(self, forward: Callable[[], Outputs], pool: Any) -> None:
        self._device.copy_(self._host, non_blocking=True)
        self.replay = recorded(forward, self._device.device, pool)

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
                return Fresh(key, value, self.places)
        self.store()
        return None

    def store(self) -> None:
        if self._waiting is not None:
            key, rotary = unrotated(self._waiting[0])
            _, value, keys, values = self._waiting
            self.ops.store_rows(key, real(value), keys, values, self.layout.slots, self.places, rotary)
            self._waiting = None

    def mask(self, rule: Callable[..., Tensor], size: int | None) -> Tensor | None:
        """What a layer type gets as its mask: nothing, or a mark that stands for its window."""
        if rule is causal_mask_function:
            return None
        if size is None or not _is_window(rule, size):
            raise UnsupportedModel("its attention has a mask besides windows, which cannot be recorded")
        mark = torch.zeros((), device=self._device.device)
        self._masks.append(mark)
        self.windows[id(mark)] = size
        return mark


def recorded(forward: Callable[[], Any], device: torch.device, pool: Any) -> Callable[[], Any]:
    """A replay of `forward`: it is run twice, so that kernels are compiled and libraries have their workspace, then
    captured. What it returns stays where it is, and the next replay writes over it.

    The second run forbids what asks the device for a value: a capture that meets it fails and leaves torch's random
    generator unusable, a forbidden question does not.
    """
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
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
