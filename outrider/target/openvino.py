"""OpenVINOTarget: runs a converted model on the CPU; slots, prefill, trees and commits are those of the eager runtime.

A row's result is the same to the last bit in any tree, batch and prefill, behind prefixes of any length; int8
activations (precisions int8 and int4) need that, because they round a last bit into a visible difference. Checked at
load, because it rests on the order in which the plugin's products add. With int8 or int4 weights the model is another
one, and "the same output" means that of plain decoding in the same precision. Cost: one inference a step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.protocols import Needs, Scores
from outrider.target.eager import TransformersTarget
from outrider.target.openvino_cache import Layout, RowCache
from outrider.target.openvino_convert import BLOCK, PRECISIONS, Traits, traits
from outrider.target.openvino_rows import Steady, padded
from outrider.target.passes import Block
from outrider.tree import fixed

log = logging.getLogger("outrider")
MOST_ROWS = 256  # behind a block they are no more terms than the plugin adds in order
CHUNK = BLOCK  # rows of a prefill: a block's worth, so that they count in one or two


class OpenVINOTarget(TransformersTarget):
    runtime = "openvino"

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
        super().__init__(model, **limits)
        self._least = self._fewest_rows()

    def _fewest_rows(self) -> int:
        """1 where a row alone is the same to the last bit as among others, on this machine and for this model.

        Says so where not even two rows help and rounded activations make such differences visible.
        """
        room = min(self.max_context, self.max_rows) - 1
        if self.slots < 1 or room < 1:
            return 2
        rows, slot = min(4, room), self.acquire()
        tree = fixed(np.arange(rows) % self.vocab_size, np.arange(rows) - 1)
        length = min(3 * BLOCK - 2, self.max_context - rows - 1)  # so that the rows pass the end of a block
        try:
            for least in (1, 2):
                self._least = least
                self._cache.fill(slot, length)
                self._lengths[slot] = self._touched[slot] = length
                wide = self.verify([slot], [tree], Needs())[0].logits
                alone = []
                for token in tree.tokens:
                    self._steady.forget()
                    alone += self.verify([slot], [fixed(np.array([token]), np.array([-1]))], Needs())
                    self.commit([slot], [[]])
                if wide is not None and torch.equal(wide, torch.cat([s.logits for s in alone if s.logits is not None])):
                    return least
                self._cache.wipe(slot, length)
        finally:
            self._lengths[slot] = 0
            self.release(slot)
        if PRECISIONS[self.precision].group:
            log.warning("precision %s: sums of a wide step come out in another order on this processor, so a text may "
                        "part from plain decoding; int8-weights rounds less", self.precision)  # fmt: skip
        return 2

    def _adapt(self, model: Any) -> Traits:
        return traits(model)

    def _allocate(self, slots: int) -> RowCache:
        return RowCache(self._adapter, slots)

    def _compile(self, hidden: frozenset[int]) -> None:
        """Changes state: the graph with these hidden states as outputs; the others would cost time."""
        import openvino as ov

        graph, wanted = self._graph.clone(), {f"hidden.{i}" for i in hidden}
        for result in graph.get_results():
            names = result.get_output_tensor(0).get_names()
            if any(name.startswith("hidden.") for name in names) and not names & wanted:
                graph.remove_result(result)
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "INFERENCE_PRECISION_HINT": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(PRECISIONS[self.precision].group),
            "PERF_COUNT": self._profile,
        }
        self._request = ov.Core().compile_model(graph, "CPU", settings).create_infer_request()
        self._hidden, self._bound_to = hidden, (-1, -1, -1)
        self._inputs: dict[str, NDArray[Any]] = {}

    def _run(self, blocks: Sequence[Block], needs: Needs, logits: bool) -> list[Scores]:
        hidden = {layer: layer % self._adapter.hidden for layer in needs.hidden}
        if not self._hidden.issuperset(hidden.values()):
            self._compile(self._hidden | set(hidden.values()))
        for b in blocks:
            self._cache.settle(b.slot, b.length)
        scores: dict[int, Scores] = {}
        for first, members in self._neighbours(blocks):
            out = self._infer(first, [blocks[i] for i in members], logits)
            for place, i in enumerate(members):
                rows = blocks[i].rows
                scores[i] = Scores(
                    _kept(out("logits"), place, rows) if logits else None,
                    {layer: _kept(out(f"hidden.{own}"), place, rows) for layer, own in hidden.items()},
                )
        return [scores[i] for i in range(len(blocks))]

    def _neighbours(self, blocks: Sequence[Block]) -> Iterator[tuple[int, list[int]]]:
        """Blocks whose slots lie in neighbouring rows of the cache go through the model together."""
        rows = [self._cache.row(b.slot) for b in blocks]
        order = np.argsort(rows)
        breaks = np.flatnonzero(np.diff(np.array(rows)[order]) != 1) + 1
        for run in np.split(order, breaks):
            yield rows[run[0]], run.tolist()

    def _infer(self, first: int, blocks: Sequence[Block], logits: bool) -> Any:
        """Changes state: runs the blocks and keeps their keys and values; gives a way to read an output by name."""
        rows = max(self._least, self._steady.rows(max(b.rows for b in blocks)))
        cache, request = self._cache, self._request
        done = max(b.done for b in blocks)
        width = BLOCK + (padded(done) if done else 0)
        layout = Layout(blocks, rows, cache.capacity, width, self._adapter.rules)
        if self._bound_to != (bound := (cache.version, first, len(blocks))):
            self._bind(cache.views(first, len(blocks)))
            self._bound_to = bound
        if done:
            self._bind(cache.extended(first, blocks, width))
            self._bound_to = (-1, -1, -1)
        inputs: dict[str, NDArray[Any]] = {"input_ids": layout.input_ids, "position_ids": layout.positions}
        inputs |= {f"mask.{i}": mask for i, mask in enumerate(layout.masks)}
        inputs |= {f"own.{i}": mask for i, mask in enumerate(layout.own_masks)}
        if self._trims:
            inputs["keep"] = np.arange(rows if logits else 1)
        self._feed(inputs)
        request.infer()

        def out(name: str) -> NDArray[np.float32]:
            return request.get_tensor(name).data

        cache.write(blocks, [out(f"new.{g}") for g in range(len(self._adapter.groups))])
        return out

    def _feed(self, inputs: dict[str, NDArray[Any]]) -> None:
        """Changes state: values go into arrays that the request holds; handing it new ones costs a millisecond."""
        import openvino as ov

        for name, array in inputs.items():
            held = self._inputs.get(name)
            if held is not None and held.shape == array.shape:
                held[...] = array
            else:
                self._inputs[name] = held = array.copy()
                self._request.set_tensor(name, ov.Tensor(held, shared_memory=True))

    def _bind(self, arrays: dict[str, NDArray[np.float32]]) -> None:
        """Changes state: the request reads these arrays where they lie, so they must outlive it."""
        import openvino as ov

        self._held = arrays
        for name, array in arrays.items():
            self._request.set_tensor(name, ov.Tensor(array, shared_memory=True))


def _kept(output: NDArray[np.float32], place: int, rows: int) -> torch.Tensor:
    """A copy: the next inference writes over the original."""
    return torch.from_numpy(output[place, :rows].copy())
