"""OpenVINOTarget: runs a converted model on the CPU; slots, prefill, trees and commits are those of the eager runtime.

Exact up to summation order, and to the last bit behind prefixes of up to 256 tokens; behind longer ones the plugin cuts
its sums into blocks. With int8 or int4 weights the model is another one, and "the same output" means that of plain
decoding in the same precision. int8 activations (precisions int8 and int4) round a last bit into a visible difference,
so there long texts may part from plain decoding at near ties. Cost: one inference a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.protocols import Needs, Scores
from outrider.target.eager import TransformersTarget
from outrider.target.openvino_cache import Layout, RowCache
from outrider.target.openvino_convert import PRECISIONS, Traits, traits
from outrider.target.passes import Block


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
        super().__init__(model, **limits)

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

    def _run(self, blocks: Sequence[Block], needs: Needs, logits: bool) -> list[Scores]:
        hidden = {layer: layer % self._adapter.hidden for layer in needs.hidden}
        if not self._hidden.issuperset(hidden.values()):
            self._compile(self._hidden | set(hidden.values()))
        self._cache.reserve(max(b.reach for b in blocks))
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
        import openvino as ov

        rows, cache, request = padded(max(b.rows for b in blocks)), self._cache, self._request
        layout = Layout(blocks, rows, cache.capacity, self._adapter.rules)
        if self._bound_to != (bound := (cache.version, first, len(blocks))):
            for tensor, view in cache.views(first, len(blocks)).items():
                request.set_tensor(f"past.{tensor}", ov.Tensor(view, shared_memory=True))
            self._bound_to = bound
        inputs: dict[str, NDArray[Any]] = {"input_ids": layout.input_ids, "position_ids": layout.positions}
        inputs |= {f"mask.{i}": mask for i, mask in enumerate(layout.masks)}
        if self._trims:
            inputs["keep"] = np.arange(rows if logits else 1)
        request.infer(inputs, share_inputs=True)

        def out(name: str) -> NDArray[np.float32]:
            return request.get_tensor(name).data

        cache.write(first, blocks, [out(f"new.{g}") for g in range(len(self._adapter.groups))])
        return out


def padded(rows: int) -> int:
    """Rows of a forward: few different numbers, because the plugin makes code for every new one.

    At least two: a single row goes through another kernel, which rounds differently.
    """
    rows, step = max(2, rows), 1
    while rows > 8 * step:
        step *= 2
    return -(-rows // step) * step


def _kept(output: NDArray[np.float32], place: int, rows: int) -> torch.Tensor:
    """A copy: the next inference writes over the original."""
    return torch.from_numpy(output[place, :rows].copy())
