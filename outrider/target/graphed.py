"""GraphedTarget: the same transformers models on CUDA, a whole step recorded once and replayed as one graph.

A step of up to 128 nodes a sequence (accepted paths of the last step moved, forward, likeliest tokens) is one CUDA
graph for each bucket of rows x batch; sizes in between are padded, padding writes to the bin row of the cache. What
changes from step to step is one small tensor that is copied in; one synchronisation fetches what was chosen. Prefill
and what fits no bucket run eagerly on the same cache. Exact: logits are those of independent forwards up to summation
order. Cost: seconds to record each bucket once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from outrider.errors import InputError, UnsupportedModel
from outrider.protocols import NO_NEEDS, Needs, Scores
from outrider.target import graphed_reference as reference
from outrider.target.adapter import switched
from outrider.target.eager import TransformersTarget
from outrider.target.graphed_fusion import Fusion, real
from outrider.target.graphed_reference import MAX_NODES
from outrider.target.graphed_step import MOVES, NAME, Outputs, Step, StepCache, running
from outrider.target.passes import Block, Pass, chain_block
from outrider.target.progress import tracked
from outrider.target.selftest import TOLERANCE
from outrider.target.support import first_line
from outrider.tree import fixed

log = logging.getLogger(__name__)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
BATCHES = (1, 2, 4, 8, 16, 32)


def kernels() -> Any:
    """The Triton kernels, made when they are first asked for."""
    if find_spec("triton") is None:
        raise InputError("the runtime graphs needs triton; pip install triton, or use the runtime eager")
    from outrider.target import graphed_kernels, graphed_projection, graphed_top, hopper_product, tree_attention

    return SimpleNamespace(
        tree_attention=tree_attention.tree_attention, streams=graphed_projection.streams,
        project=graphed_projection.project, parts=graphed_projection.parts, rms_norm=graphed_kernels.rms_norm,
        gate=graphed_kernels.gate, gated=hopper_product.gated, store_rows=graphed_kernels.store_rows,
        move_rows=graphed_kernels.move_rows, top=graphed_top.top, add_norm=graphed_kernels.add_norm,
        likeliest=graphed_kernels.likeliest,
    )  # fmt: skip


class GraphedTarget(TransformersTarget):
    runtime = "graphs"
    even = True  # a step is a recording: what ran before it leaves nothing behind

    def __init__(
        self,
        model: Any,
        *,
        fuse: bool = True,  # norms, projections, gates and rotary turns on kernels of our own
        capture: bool | None = None,  # None: where there is CUDA; False runs the same step without a graph
        graph_bytes: int = 4 << 30,  # GPU memory that graphs may take together
        warm_up: bool = True,  # record the buckets of one sequence now, with a progress bar, not at their first use
        ops: Any = None,  # kernels, or their reference; None: what the device can run
        **limits: Any,
    ) -> None:
        self._steps: dict[tuple[int, int, tuple[int, ...], int], Step | None] = {}
        self._waiting: dict[int, list[tuple[int, int]]] = {}  # slot -> rows of the cache to move, from and to
        self._windows: set[int] = set()
        self._ready = False
        super().__init__(model, **limits)
        on_gpu = self.device.type == "cuda"
        self.capture = on_gpu if capture is None else capture
        self.graph_bytes, self._used = graph_bytes, 0
        self._ops = ops if ops is not None else kernels() if on_gpu else reference
        self._pool: Any = torch.cuda.graph_pool_handle() if self.capture else None
        if self._adapter.own_attention:
            raise UnsupportedModel(
                f"{type(model).__name__} has attention code of its own, which cannot be recorded; use the runtime eager"
            )
        if by_storage := {s.what for s in self._adapter.stand_ins}:
            raise UnsupportedModel(
                f"{type(model).__name__} takes positions from storage order ({', '.join(sorted(by_storage))}), which "
                "cannot be recorded; use the runtime eager"
            )
        self._fusion = Fusion(model, self._ops, self._probe) if fuse else None
        self._check()
        self._compare()
        if warm_up:
            self.prepare(())

    @torch.inference_mode()
    def _probe(self) -> object:
        """A forward of two tokens into the bin row of slot 0."""
        current = Pass([chain_block(0, 0, np.zeros(2, dtype=np.int64))], self._adapter.dtype, self.device)
        out = self._adapter(current, self._cache.bind(current), logits=True, hidden=False)
        self._cache.wipe(0, 2)
        return out

    @torch.inference_mode()
    def _check(self) -> None:
        """The smallest step, run once: refuses a model whose code cannot be recorded."""
        try:
            step = self._step(1, 2, ())
            if step is None:
                raise UnsupportedModel("no graph could be recorded")
            two = [chain_block(0, 0, np.zeros(2, dtype=np.int64))]
            step.fill(two, [[]])
            step.run(two)
        except Exception as error:
            name = type(self.model).__name__
            first = str(error) if isinstance(error, UnsupportedModel) else first_line(error)
            raise UnsupportedModel(f"{name} cannot be recorded as a graph ({first}); use the runtime eager") from error
        finally:
            self._cache.wipe(0, 2)

    def _compare(self) -> None:
        """Kernels, graph and fusion against the eager runtime, on a small tree: nothing runs that was not checked."""
        tree = fixed(np.arange(1, 8) % self.vocab_size, np.array([-1, 0, 0, 1, 2, 2, 4]))
        rows = []
        for self._ready in (False, True):  # each on a cache that holds nothing of the other
            slot = self.acquire()
            try:
                for _ in self.prefill([slot], [[3 % self.vocab_size, *range(2)]], Needs()):
                    pass
                rows.append(self.verify([slot], [tree], Needs())[0].logits)
            finally:
                self.release(slot)
        eager, own = rows
        assert eager is not None and own is not None
        worst = float((eager.float() - own.float()).abs().max() / eager.float().abs().max())
        if not worst <= TOLERANCE.get(self.model.dtype, 1e-1):
            name = type(self.model).__name__
            raise UnsupportedModel(
                f"{name} comes out differently as a graph ({worst:.1e} of the largest logit); use the runtime eager"
            )

    def prepare(self, contexts: Sequence[int], needs: Needs = NO_NEEDS) -> None:
        """Record the steps of one sequence that bring these now, not each in the middle of a text; any length fits."""
        sizes = [r for r in ROWS[:-1] if r <= self.max_rows and (1, r, needs.hidden, needs.top) not in self._steps]
        for rows in tracked(sizes, "recording steps"):
            self._step(1, rows, needs.hidden, needs.top)

    # Slots

    @torch.inference_mode()
    def release(self, slot: int) -> None:
        self._waiting.pop(slot, None)
        super().release(slot)

    @torch.inference_mode()
    def fork(self, slot: int) -> int:
        self._settle([slot])
        return super().fork(slot)

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Nothing runs now: the next step of these slots moves the rows before it does anything else."""
        for slot, path in zip(slots, paths, strict=True):
            if slot in self._waiting:  # two commits without a step between them
                self._settle([slot])
            length = self._lengths[slot]
            moves = [(length + node, length + to) for to, node in enumerate(path, 1) if node != to]
            if moves:
                self._waiting[slot] = moves
            self._lengths[slot] = length + 1 + len(path)

    @torch.inference_mode()
    def _settle(self, slots: Sequence[int]) -> None:
        """Changes state: do what commits of these slots left to the next step."""
        moves = [(slot, *move) for slot in slots for move in self._waiting.pop(slot, ())]
        if moves:
            self._cache.move(*zip(*moves, strict=True))

    # The step

    def _run(self, blocks: Sequence[Block], needs: Needs, logits: bool) -> list[Scores]:
        step = self._bucket(blocks, needs) if logits and self._ready else None
        if step is None:
            self._settle([b.slot for b in blocks])
            return super()._run(blocks, needs, logits)
        for b in blocks:
            if len(self._waiting.get(b.slot, ())) > MOVES:
                self._settle([b.slot])
        step.fill(blocks, [self._waiting.pop(b.slot, []) for b in blocks])
        return step.run(blocks)

    def _bucket(self, blocks: Sequence[Block], needs: Needs) -> Step | None:
        """The step that holds these rows; None where they fit none."""
        nodes, rows = max(len(b.tokens) for b in blocks), max(b.rows for b in blocks)
        deepest = max(int(b.depths.max()) for b in blocks)
        if nodes > MAX_NODES or rows > ROWS[-1] or len(blocks) > BATCHES[-1]:
            return None
        if self._windows and deepest >= min(self._windows):  # the kernel's window looks at the prefix only
            return None
        return self._bucket_of(len(blocks), rows, needs.hidden, needs.top)

    def _bucket_of(self, batch: int, rows: int, hidden: tuple[int, ...] = (), top: int = 0) -> Step | None:
        size = next(size for size in BATCHES if size >= batch)
        return self._step(size, next(size for size in ROWS if size >= rows), hidden, top)

    def _step(self, batch: int, rows: int, hidden: tuple[int, ...], top: int = 0) -> Step | None:
        key = (batch, rows, hidden, top)
        if key not in self._steps:
            self._steps[key] = self._record(batch, rows, hidden, top)
        return self._steps[key]

    @torch.inference_mode()
    def _record(self, batch: int, rows: int, hidden: tuple[int, ...], top: int) -> Step | None:
        step = Step(self._cache, self._ops, batch, rows, self.device, top)
        forward = self._forward_of(step, hidden)
        if not self.capture:
            step.replay = forward
            return step
        expected = batch * rows * self.vocab_size * 8  # logits and what makes them
        free = torch.cuda.mem_get_info(self.device)[0]
        if expected > min(free, self.graph_bytes - self._used):
            log.warning("steps of %d x %d rows run without a graph: too little GPU memory", batch, rows)
            return None
        before = torch.cuda.memory_reserved(self.device)
        try:
            step.record(forward, self._pool)
        except torch.OutOfMemoryError:
            log.warning("steps of %d x %d rows run without a graph: too little GPU memory", batch, rows)
            return None
        except Exception as error:
            if not self._ready:
                raise
            log.warning("steps of %d x %d rows run without a graph: %s", batch, rows, error)
            return None
        self._used += max(0, torch.cuda.memory_reserved(self.device) - before)
        return step

    def _forward_of(self, step: Step, hidden: tuple[int, ...]) -> Callable[[], Outputs]:
        cache = StepCache(self._cache, step)

        def forward() -> Outputs:
            step.move()
            with running(step), switched(self._adapter.configs, NAME), self._fused():
                out = self.model(
                    input_ids=step.ids, position_ids=step.positions, past_key_values=cache, use_cache=True,
                    return_dict=True, **({"output_hidden_states": True} if hidden else {}),
                )  # fmt: skip
                step.store()
                logits = real(out.logits)
                states = {layer: real(out.hidden_states[layer]) for layer in hidden}
            self._windows |= set(step.windows.values())
            if step.top:
                return Outputs(logits, self._ops.top(logits, step.top), states)
            return Outputs(logits, self._ops.likeliest(logits)[None, ..., None], states)

        return forward

    @contextmanager
    def _fused(self) -> Iterator[None]:
        if self._fusion is None:
            yield
        else:
            with self._fusion.active():
                yield
