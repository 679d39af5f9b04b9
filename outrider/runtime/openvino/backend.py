"""OpenVINOBackend: runs a converted model on the CPU, one inference a pass.

A row's result is the same to the last bit in any tree, batch and prefill, behind prefixes of any length, where the
plugin's products add in one order for any number of rows, as with AVX-512; the trait `same_bits` says whether they did
when it was tried at load. int8 activations (precisions int8 and int4) need that, because they round a last bit into a
visible difference. Where nothing is rounded (float32, and any precision on processors without products of int8) and
products do not, a row alone may differ from the same row among others as float32 sums do. With int8 or int4 weights the
model is another one, and "the same output" means that of plain decoding in the same precision.
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

from outrider.core.protocols import Target
from outrider.core.records import NO_NEEDS, Needs, Scores, Traits
from outrider.core.tree import fixed
from outrider.runtime.backend import Bounds
from outrider.runtime.blocks.allocator import Allocator
from outrider.runtime.blocks.kept import KeptTexts
from outrider.runtime.blocks.stretches import StretchSlots
from outrider.runtime.openvino.cache import Layout, RowCache, stride, within_a_block
from outrider.runtime.openvino.convert import BLOCK, PRECISIONS, CacheTensors, multiplied_bytes
from outrider.runtime.openvino.fixed import MAX_GRAPHS, ROWS, FixedShapes, StepShape
from outrider.runtime.openvino.request import Request, shaped
from outrider.runtime.openvino.rows import Steady, padded
from outrider.runtime.packed import available, saturates
from outrider.runtime.passes import Block, text_block, tree_block
from outrider.runtime.probe import probe
from outrider.runtime.progress import tracked
from outrider.runtime.selftest import self_check
from outrider.runtime.support import TESTED_GRAPHS, context_limit, refuse_unsupported
from outrider.runtime.thresholds import moved_near
from outrider.runtime.weights import check_same

log = logging.getLogger("outrider")
SUMS = 1e-3  # of the largest logit: what float32 sums in another order stay far below
KEPT = 4  # of what the cache may take: one part of so many is for copies of finished texts
TRIED = 8  # rows at load: a few may have the same bits by chance, where activations are rounded


class OpenVINOBackend:
    block_size, reserves = BLOCK, False
    max_rows = 256  # behind a block they are no more terms than the plugin adds in order
    prompt_rows = BLOCK  # so that they count in one block or two
    cache: RowCache

    def __init__(self, model: Any, graph: Any, *, precision: str = "float32", profile: bool = False) -> None:
        """`graph` is an `openvino.Model` made of `model` by `convert`; `profile` counts time by operation."""
        refuse_unsupported(model)
        self.model, self.precision, self._profile = model, precision, profile
        self._facts = probe(model)
        self.device, self.vocab_size = self._facts.device, self._facts.vocab_size
        self.token_bytes = sum(shape.bytes for shape in self._facts.shapes)
        self._tensors = CacheTensors(self._facts.shapes)
        self._graph, self._weight_bytes = graph, multiplied_bytes(graph)
        self._trims = any("keep" in port.get_names() for port in graph.inputs)
        self._compile(frozenset())
        self._steady = Steady()
        self._least = 2  # rows of a pass: a single one may go through another kernel, which rounds differently
        self._same_bits = False  # of a step of as few rows as are run and any other
        self._version = -1  # of the cache that was read last

    @property
    def traits(self) -> Traits:
        return Traits(
            "openvino", self.precision, self._weight_bytes, other_threads=True, width=self.width,
            same_bits=self._same_bits,
        )  # fmt: skip

    def width(self, rows: int) -> int:
        """Rows that a step of one sequence runs for so many, padding included."""
        rows = max(self._least, rows)
        shape = self._fixed.find(rows, self.cache.capacity) if self._facts.windowless else None
        return shape[0] if shape is not None else padded(rows)

    def slot_bytes(self, rows: int) -> int:
        return 0

    def positions(self) -> tuple[int, str]:
        return context_limit(self.model.config)

    def allocate(self, bounds: Bounds) -> tuple[RowCache, Allocator]:
        self._bounds, self.cache = bounds, RowCache(self._tensors, bounds.slots)
        tokens = bounds.bytes // self.token_bytes
        kept = tokens // KEPT if bounds.capacity < tokens - tokens // KEPT else 0  # a whole text must run
        return self.cache, StretchSlots(self.cache, bounds.slots, tokens - kept, KeptTexts(kept // BLOCK, BLOCK))

    # The check at load

    def check(self, target: Target, self_test: bool | None) -> None:
        if self_test or (self_test is None and self._facts.model_type not in TESTED_GRAPHS):
            self_check(self, target)
        self._least = self._fewest_rows()

    def refresh(self, model: Any) -> None:
        """A graph holds its weights: it is made, checked and compiled anew."""
        from outrider.runtime.conversions import openvino_graph

        check_same(model, self.model)
        self._graph = openvino_graph(model, self.precision, keep=False)
        self._fixed.close()
        self._compile(self._hidden)
        self._version = -1

    @contextmanager
    def thresholds_near(self, context: int) -> Iterator[list[str]]:
        """Masks are made beside the graph; all else is in it as it was."""
        facts = self._facts
        with moved_near(self.model, context, masks_only=True) as moved:
            try:
                if moved:
                    self._facts = replace(facts, rules=probe(self.model).rules)
                yield moved
            finally:
                self._facts = facts

    @torch.inference_mode()
    def _fewest_rows(self) -> int:
        """1 where a row alone is the same as among others but for the order of sums, on this machine, for this model.

        Says so where not even two rows help and rounded activations make such differences visible.
        """
        bounds = self._bounds
        room = min(bounds.context, bounds.rows) - 1
        if room < 1:
            return 2
        # The plugin rounds activations only where the processor has products of int8 that add in 32 bits.
        rounds = PRECISIONS[self.precision].group > 0 and not saturates()
        tokens = np.arange(min(TRIED, room)) % self.vocab_size
        length = min(3 * BLOCK - 2, bounds.context - len(tokens) - 1)  # so that the rows pass the end of a block
        whole = tree_block(0, length, fixed(tokens, np.arange(len(tokens)) - 1))
        for self._least in (1, 2):
            try:
                self.cache.fill(0, length)
                together = self.run([whole], NO_NEEDS)[0].logits
                assert together is not None
                moved = (self._one_by_one(length, tokens) - together).abs().max()
            finally:
                self.cache.wipe(0)
            self._same_bits = bool(moved == 0)
            if self._same_bits or (not rounds and moved <= SUMS * together.abs().max()):
                return self._least
        if rounds:
            log.warning("precision %s: sums of a wide step come out in another order on this processor, so a text may "
                        "part from plain decoding; int8-weights rounds less", self.precision)  # fmt: skip
        return 2

    def _one_by_one(self, length: int, tokens: NDArray[np.int64]) -> torch.Tensor:
        """Changes state: the scores of a text in slot 0, a pass for each token."""
        rows = []
        for at in range(len(tokens)):
            self._steady.forget()  # a single row runs alone, whatever ran before it
            rows += self.run([text_block(0, length + at, tokens[at : at + 1])], Needs(logits=True))
        return torch.cat([scores.logits for scores in rows if scores.logits is not None])

    # Graphs

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

        def make(shape: StepShape) -> Request:
            return Request(shaped(self._graph, hidden, self._fixed_inputs(*shape)), settings)

        self._fixed = FixedShapes(make, seconds, self._room_for_another)

    def _fixed_inputs(self, rows: int, blocks: int) -> dict[str, tuple[int, ...]]:
        """The shape of every input in a step of one sequence that stays within a block of text."""
        tensors = self._tensors
        shapes: dict[str, tuple[int, ...]] = {"input_ids": (1, rows), "position_ids": (1, rows)}
        for i in range(len(self._facts.rules)):
            shapes[f"mask.{i}"], shapes[f"own.{i}"] = (1, blocks, 1, 1, 1, BLOCK), (1, 1, 1, 1, rows, BLOCK + rows)
        for t in range(len(tensors)):
            shapes[f"past.{t}"], shapes[f"recent.{t}"] = (1, blocks, *tensors.block(t)), (1, *tensors.recent(t))
        return shapes | ({"keep": (rows,)} if self._trims else {})

    def _room_for_another(self) -> bool:
        """A graph holds the weights once more; most of what is free stays free."""
        return sum(w.nbytes for w in self.model.parameters()) < available() // 8

    def prepare(self, contexts: Sequence[int], needs: Needs) -> None:
        """Compile steps of single sequences of so many tokens now, usual lengths first; a bar shows how far it is."""
        self._bring(needs)
        usual = Counter(stride(min(length, self._bounds.context) // BLOCK) for length in contexts).most_common()
        wanted = [(rows, blocks) for blocks, _ in usual for rows in ROWS if rows <= self._bounds.rows][:MAX_GRAPHS]
        for shape in tracked(wanted if self._facts.windowless else [], "compiling steps"):
            self._fixed.make_now(shape)
            self._try(*shape)

    @torch.inference_mode()
    def _try(self, rows: int, blocks: int) -> None:
        """Changes state: the first step of a fixed shape now, on noise, instead of in the middle of a text."""
        length = min(blocks * BLOCK, self._bounds.context - rows - 1)
        if not self.cache.empty or length < 1 or self._fixed.find(rows, blocks) != (rows, blocks):
            return
        nodes = np.arange(rows)
        try:
            self.cache.fill(0, length)
            self.run([tree_block(0, length, fixed(nodes % self.vocab_size, (nodes + 1) // 2 - 1))], NO_NEEDS)
        finally:
            self.cache.wipe(0)

    def _bring(self, needs: Needs) -> dict[int, int]:
        """Changes state: graphs give these hidden states from now on. By layer as asked for, the output's number."""
        hidden = {layer: layer % self._facts.hidden for layer in needs.hidden}
        if not self._hidden.issuperset(hidden.values()):
            self._fixed.close()
            self._compile(self._hidden | set(hidden.values()))
        return hidden

    # The pass

    def run(self, blocks: Sequence[Block], needs: Needs) -> list[Scores]:
        hidden, logits = self._bring(needs), any(b.scored(needs) for b in blocks)
        for b in blocks:
            self.cache.settle(b.slot, b.length)
        scores: dict[int, Scores] = {}
        for first, members in self._neighbours(blocks):
            request = self._infer(first, [blocks[i] for i in members], logits)
            for place, i in enumerate(members):
                rows = blocks[i].rows
                scores[i] = Scores(
                    _kept(request.out("logits"), place, rows) if logits else None,
                    {layer: _kept(request.out(f"hidden.{number}"), place, rows) for layer, number in hidden.items()},
                )
        return [scores[i] for i in range(len(blocks))]

    def _neighbours(self, blocks: Sequence[Block]) -> Iterator[tuple[int, list[int]]]:
        """Blocks whose slots lie in neighbouring rows of the cache go through the model together."""
        rows = [self.cache.row(b.slot) for b in blocks]
        if len(rows) == 1:
            yield rows[0], [0]
            return
        order = np.argsort(rows)
        breaks = np.flatnonzero(np.diff(np.array(rows)[order]) != 1) + 1
        for run in np.split(order, breaks):
            yield rows[run[0]], run.tolist()

    def _infer(self, first: int, blocks: Sequence[Block], logits: bool) -> Request:
        """Changes state: runs the blocks and keeps their keys and values; gives what holds the outputs."""
        rows, cache = max(self._least, *(b.rows for b in blocks)), self.cache
        alone = logits and self._facts.windowless and _fixed_shape(blocks)
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

    def _compared(self, shape: StepShape, first: int, blocks: Sequence[Block]) -> Request:
        """Changes state: the first step of a fixed shape once more in the graph of any shape, which is believed."""
        outputs = ["logits", *(f"hidden.{i}" for i in self._hidden)]
        outputs += [f"new.{g}" for g in range(self.cache.groups)]
        there = [self._fixed.request(shape).out(name).copy() for name in outputs]
        request = self._inferred(self._any, shape[0], first, blocks, True)
        here = [request.out(name) for name in outputs]
        same = all(np.array_equal(a, b) for a, b in zip(there, here, strict=True))
        self._fixed.checked(shape, same)
        return request

    def _inferred(self, request: Request, rows: int, first: int, blocks: Sequence[Block], logits: bool) -> Request:
        """Changes state: one inference, padded to so many rows."""
        cache, done = self.cache, max(b.done for b in blocks)
        width = BLOCK + (padded(done) if done else 0)
        layout = Layout(blocks, rows, cache.capacity, width, self._facts.rules)
        if self._version != cache.version:  # nobody keeps an old cache alive
            self._fixed.release(but=request)
            self._version = cache.version
        request.bind((cache.version, first, len(blocks)), lambda: cache.views(first, len(blocks)))
        if done:
            request.bind(None, lambda: cache.extended(first, blocks, width))
        inputs: dict[str, NDArray[Any]] = {"input_ids": layout.input_ids, "position_ids": layout.positions}
        inputs |= {f"mask.{i}": mask for i, mask in enumerate(layout.masks)}
        inputs |= {f"own.{i}": mask for i, mask in enumerate(layout.tail_masks)}
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
