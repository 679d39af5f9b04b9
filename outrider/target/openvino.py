"""OpenVINOTarget: runs a converted model on the CPU; slots, prefill, trees and commits are those of the eager runtime.

A row's result is the same to the last bit in any tree, batch and prefill, behind prefixes of any length, where the
plugin's products add in one order for any number of rows, as with AVX-512; `same_bits` says whether they did when it
was tried at load. int8 activations (precisions int8 and int4) need that, because they round a last bit into a visible
difference. Where nothing is rounded (float32, and any precision on processors without products of int8) and products
do not, a row alone may differ from the same row among others as float32 sums do. With int8 or int4 weights the model
is another one, and "the same output" means that of plain decoding in the same precision. Cost: one inference a step.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.protocols import NO_NEEDS, Needs, Scores, Traits
from outrider.target.eager import TransformersTarget
from outrider.target.openvino_cache import Layout, RowCache, stride, within_a_block
from outrider.target.openvino_convert import BLOCK, PRECISIONS, GraphTraits, multiplied_bytes, traits
from outrider.target.openvino_fixed import MOST, ROWS, FixedShapes, Shape
from outrider.target.openvino_request import Request, shaped
from outrider.target.openvino_rows import Steady, padded
from outrider.target.packed import available, saturates
from outrider.target.passes import Block
from outrider.target.progress import tracked
from outrider.target.support import TESTED_GRAPHS
from outrider.tree import fixed

log = logging.getLogger("outrider")
MOST_ROWS = 256  # behind a block they are no more terms than the plugin adds in order
SUMS = 1e-3  # of the largest logit: what float32 sums in another order stay far below
TRIED = 8  # rows at load: a few may have the same bits by chance, where activations are rounded
CHUNK = BLOCK  # rows of a prefill: a block's worth, so that they count in one or two


class OpenVINOTarget(TransformersTarget):
    runtime = "openvino"
    own_threads = True  # other than torch's
    tested = TESTED_GRAPHS

    def __init__(
        self, model: Any, graph: Any, *, precision: str = "float32", profile: bool = False, **limits: Any
    ) -> None:
        """`graph` is an `openvino.Model` made of `model` by `openvino_convert`; `profile` counts time by operation."""
        self.precision, self._profile = precision, profile
        self._graph = graph
        self._trims = any("keep" in port.get_names() for port in graph.inputs)
        self._compile(frozenset())
        for name, most in (("max_rows", MOST_ROWS), ("prefill_chunk", CHUNK)):
            limits[name] = min(limits.get(name, most), most)
        self._steady = Steady()
        self._least = 2  # rows of a pass: a single one may go through another kernel, which rounds differently
        self.same_bits = False  # of a step of as few rows as are run and any other
        self._version = -1  # of the cache that was read last
        super().__init__(model, **limits)
        self._least = self._fewest_rows()

    @property
    def weight_bytes(self) -> int:
        """What a step reads of the weights, in the form that the graph holds them in."""
        return multiplied_bytes(self._graph)

    def _fewest_rows(self) -> int:
        """1 where a row alone is the same as among others but for the order of sums, on this machine, for this model.

        Says so where not even two rows help and rounded activations make such differences visible.
        """
        room = min(self.max_context, self.max_rows) - 1
        if self.slots < 1 or room < 1:
            return 2
        # The plugin rounds activations only where the processor has products of int8 that add in 32 bits.
        rounds = PRECISIONS[self.precision].group > 0 and not saturates()
        rows, slot = min(TRIED, room), self.acquire()
        tree = fixed(np.arange(rows) % self.vocab_size, np.arange(rows) - 1)
        length = min(3 * BLOCK - 2, self.max_context - rows - 1)  # so that the rows pass the end of a block
        try:
            for least in (1, 2):
                self._least = least
                self._hold_noise(slot, length)
                wide = self.verify([slot], [tree], Needs())[0].logits
                assert wide is not None
                alone = []
                for token in tree.tokens:
                    self._steady.forget()
                    alone += self.verify([slot], [fixed(np.array([token]), np.array([-1]))], Needs())
                    self.commit([slot], [[]])
                moved = (torch.cat([s.logits for s in alone if s.logits is not None]) - wide).abs().max()
                self.same_bits = bool(moved == 0)
                if self.same_bits or (not rounds and moved <= SUMS * wide.abs().max()):
                    return least
                self._cache.wipe(slot, length)
        finally:
            self._lengths[slot] = 0
            self.release(slot)
        if rounds:
            log.warning("precision %s: sums of a wide step come out in another order on this processor, so a text may "
                        "part from plain decoding; int8-weights rounds less", self.precision)  # fmt: skip
        return 2

    def _adapt(self, model: Any) -> GraphTraits:
        return traits(model)

    @contextmanager
    def thresholds_near(self, *, masks_only: bool = True) -> Iterator[list[str]]:
        """Masks are made beside the graph; all else is in it as it was."""
        before = self._adapter
        with super().thresholds_near(masks_only=masks_only) as moved:
            try:
                if moved:
                    self._adapter = replace(before, rules=traits(self.model).rules)
                yield moved
            finally:
                self._adapter = before

    def _allocate(self, slots: int) -> RowCache:
        return RowCache(self._adapter, slots)

    def _compile(self, hidden: frozenset[int]) -> None:
        """Changes state: the graph with these hidden states as outputs."""
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "INFERENCE_PRECISION_HINT": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(PRECISIONS[self.precision].group),
            "PERF_COUNT": self._profile,
        }
        begun = time.perf_counter()
        self._any, self._hidden = Request(shaped(self._graph, hidden), settings), hidden
        seconds = time.perf_counter() - begun

        def make(shape: Shape) -> Request:
            return Request(shaped(self._graph, hidden, self._fixed_inputs(*shape)), settings)

        self._fixed = FixedShapes(make, seconds, self._room_for_another)

    def _fixed_inputs(self, rows: int, blocks: int) -> dict[str, tuple[int, ...]]:
        """The shape of every input in a step of one sequence that stays within a block of text."""
        known: GraphTraits = self._adapter
        shapes: dict[str, tuple[int, ...]] = {"input_ids": (1, rows), "position_ids": (1, rows)}
        for i in range(len(known.rules)):
            shapes[f"mask.{i}"], shapes[f"own.{i}"] = (1, blocks, 1, 1, 1, BLOCK), (1, 1, 1, 1, rows, BLOCK + rows)
        for t in range(2 * len(known.shapes)):
            shapes[f"past.{t}"], shapes[f"recent.{t}"] = (1, blocks, *known.block(t)), (1, *known.recent(t))
        return shapes | ({"keep": (rows,)} if self._trims else {})

    def _room_for_another(self) -> bool:
        """A graph holds the weights once more; most of what is free stays free."""
        return sum(w.nbytes for w in self.model.parameters()) < available() // 8

    def prepare(self, contexts: Sequence[int], needs: Needs = NO_NEEDS) -> None:
        """Compile steps of single sequences of so many tokens now, usual lengths first; a bar shows how far it is."""
        self._bring(needs)
        usual = Counter(stride(min(length, self.max_context) // BLOCK) for length in contexts).most_common()
        wanted = [(rows, blocks) for blocks, _ in usual for rows in ROWS if rows <= self.max_rows][:MOST]
        for shape in tracked(wanted if self._adapter.windowless else [], "compiling steps"):
            self._fixed.make_now(shape)
            self._try(*shape)

    def _try(self, rows: int, blocks: int) -> None:
        """Changes state: the first step of a fixed shape now, on noise, instead of in the middle of a text."""
        length = min(blocks * BLOCK, self.max_context - rows - 1)
        if self.free_slots < self.slots or length < 1 or self._fixed.find(rows, blocks) != (rows, blocks):
            return
        nodes, slot = np.arange(rows), self.acquire()
        try:
            self._hold_noise(slot, length)
            self.verify([slot], [fixed(nodes % self.vocab_size, (nodes + 1) // 2 - 1)], NO_NEEDS)
        finally:
            self._lengths[slot] = 0
            self.release(slot)

    def _hold_noise(self, slot: int, length: int) -> None:
        """Changes state: a free slot holds a made-up text."""
        self._cache.fill(slot, length)
        self._lengths[slot] = self._touched[slot] = length

    @property
    def traits(self) -> Traits:
        return replace(super().traits, width=self.width)

    def width(self, rows: int) -> int:
        """Rows that a step of one sequence runs for so many, padding included."""
        rows = max(self._least, rows)
        shape = self._fixed.find(rows, self._cache.capacity) if self._adapter.windowless else None
        return shape[0] if shape is not None else padded(rows)

    def _bring(self, needs: Needs) -> dict[int, int]:
        """Changes state: graphs give these hidden states from now on. By layer as asked for, the output's number."""
        hidden = {layer: layer % self._adapter.hidden for layer in needs.hidden}
        if not self._hidden.issuperset(hidden.values()):
            self._fixed.close()
            self._compile(self._hidden | set(hidden.values()))
        return hidden

    def _run(self, blocks: Sequence[Block], needs: Needs, logits: bool) -> list[Scores]:
        hidden = self._bring(needs)
        for b in blocks:
            self._cache.settle(b.slot, b.length)
        scores: dict[int, Scores] = {}
        for first, members in self._neighbours(blocks):
            request = self._infer(first, [blocks[i] for i in members], logits)
            for place, i in enumerate(members):
                rows = blocks[i].rows
                scores[i] = Scores(
                    _kept(request.out("logits"), place, rows) if logits else None,
                    {layer: _kept(request.out(f"hidden.{own}"), place, rows) for layer, own in hidden.items()},
                )
        return [scores[i] for i in range(len(blocks))]

    def _neighbours(self, blocks: Sequence[Block]) -> Iterator[tuple[int, list[int]]]:
        """Blocks whose slots lie in neighbouring rows of the cache go through the model together."""
        rows = [self._cache.row(b.slot) for b in blocks]
        if len(rows) == 1:
            yield rows[0], [0]
            return
        order = np.argsort(rows)
        breaks = np.flatnonzero(np.diff(np.array(rows)[order]) != 1) + 1
        for run in np.split(order, breaks):
            yield rows[run[0]], run.tolist()

    def _infer(self, first: int, blocks: Sequence[Block], logits: bool) -> Request:
        """Changes state: runs the blocks and keeps their keys and values; gives what holds the outputs."""
        rows, cache = max(self._least, *(b.rows for b in blocks)), self._cache
        alone = logits and self._adapter.windowless and _fixed_shape(blocks)
        shape = self._fixed.find(rows, cache.capacity) if alone else None
        begun = time.perf_counter()
        if shape is None:
            request = self._inferred(self._any, max(self._least, self._steady.rows(rows)), first, blocks, logits)
        else:
            request = self._inferred(self._fixed.request(shape), shape[0], first, blocks, logits)
        if alone:
            self._fixed.missed(rows, cache.capacity, time.perf_counter() - begun)
        if shape is not None and self._fixed.unchecked(shape):
            request = self._compared(shape, first, blocks)
        cache.write(blocks, [request.out(f"new.{g}") for g in range(cache.groups)])
        return request

    def _compared(self, shape: Shape, first: int, blocks: Sequence[Block]) -> Request:
        """Changes state: the first step of a fixed shape once more in the graph of any shape, which is believed."""
        outputs = ["logits", *(f"hidden.{i}" for i in self._hidden)]
        outputs += [f"new.{g}" for g in range(self._cache.groups)]
        own = self._fixed.request(shape)
        there = [own.out(name).copy() for name in outputs]
        request = self._inferred(self._any, shape[0], first, blocks, True)
        here = [request.out(name) for name in outputs]
        same = all(np.array_equal(a, b) for a, b in zip(there, here, strict=True))
        self._fixed.checked(shape, same)
        return request

    def _inferred(self, request: Request, rows: int, first: int, blocks: Sequence[Block], logits: bool) -> Request:
        """Changes state: one inference, padded to so many rows."""
        cache, done = self._cache, max(b.done for b in blocks)
        width = BLOCK + (padded(done) if done else 0)
        layout = Layout(blocks, rows, cache.capacity, width, self._adapter.rules)
        if self._version != cache.version:  # nobody keeps an old cache alive
            self._fixed.release(but=request)
            self._version = cache.version
        request.bind((cache.version, first, len(blocks)), lambda: cache.views(first, len(blocks)))
        if done:
            request.bind(None, lambda: cache.extended(first, blocks, width))
        inputs: dict[str, NDArray[Any]] = {"input_ids": layout.input_ids, "position_ids": layout.positions}
        inputs |= {f"mask.{i}": mask for i, mask in enumerate(layout.masks)}
        inputs |= {f"own.{i}": mask for i, mask in enumerate(layout.own_masks)}
        if self._trims:
            inputs["keep"] = np.arange(rows if logits else 1)
        request.feed(inputs)
        request.infer()
        return request


def _fixed_shape(blocks: Sequence[Block]) -> bool:
    """One sequence, whose rows all count in the unfinished block of text."""
    return len(blocks) == 1 and not blocks[0].done and within_a_block(blocks[0])


def _kept(output: NDArray[np.float32], place: int, rows: int) -> torch.Tensor:
    """A copy: the next inference writes over the original."""
    return torch.from_numpy(output[place, :rows].copy())
