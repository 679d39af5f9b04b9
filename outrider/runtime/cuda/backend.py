"""CudaBackend: the same transformers models on CUDA, a whole step recorded once and replayed as one graph.

A step of up to 128 nodes a sequence (accepted paths of the last step moved, forward, likeliest tokens) is one CUDA
graph for each bucket of rows x batch; sizes in between are padded, padding writes to the bin row of the cache. What
changes from step to step is one small tensor that is copied in; one synchronisation fetches what was chosen. Prefill
and what fits no bucket run eagerly on the same cache. Exact: logits are those of independent forwards up to summation
order. Cost: seconds to record each bucket once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from outrider.core.errors import InputError, UnsupportedModel
from outrider.core.protocols import Target
from outrider.core.records import NO_NEEDS, Needs, Piece, Scores, Traits
from outrider.core.tree import fixed
from outrider.models.quiet import first_line
from outrider.runtime.attention import switched
from outrider.runtime.backend import Bounds
from outrider.runtime.blocks.allocator import Allocator
from outrider.runtime.blocks.stretches import StretchSlots
from outrider.runtime.cuda import reference
from outrider.runtime.cuda.cache import DeferredCache
from outrider.runtime.cuda.fusion import Fusion, real
from outrider.runtime.cuda.reference import MAX_NODES
from outrider.runtime.cuda.step import MOVES, NAME, Outputs, Step, StepCache, running
from outrider.runtime.eager.backend import EagerBackend
from outrider.runtime.passes import Block, Pass, text_block
from outrider.runtime.progress import tracked
from outrider.runtime.selftest import TOLERANCE

log = logging.getLogger(__name__)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
BATCHES = (1, 2, 4, 8, 16, 32)


def kernels() -> Any:
    """The Triton kernels, made when they are first asked for."""
    if find_spec("triton") is None:
        raise InputError("the runtime graphs needs triton; pip install triton, or use the runtime eager")
    from outrider.runtime.cuda import kernels as rows
    from outrider.runtime.cuda import projection
    from outrider.runtime.cuda.hopper_product import gated
    from outrider.runtime.cuda.top import top
    from outrider.runtime.cuda.tree_attention import tree_attention

    return SimpleNamespace(
        tree_attention=tree_attention, streams=projection.streams, project=projection.project, parts=projection.parts,
        gated=gated, top=top, rms_norm=rows.rms_norm, add_norm=rows.add_norm, gate=rows.gate,
        likeliest=rows.likeliest, store_rows=rows.store_rows, move_rows=rows.move_rows,
    )  # fmt: skip


class CudaBackend:
    """Holds an eager backend, which runs on the same cache whatever is not recorded."""

    max_rows = prompt_rows = None
    block_size, reserves = 1, True
    traits = Traits("graphs", even=True)  # a step is a recording: what ran before it leaves nothing behind
    cache: DeferredCache

    def __init__(
        self,
        model: Any,
        *,
        fuse: bool = True,  # norms, projections, gates and rotary embeddings on kernels of our own
        capture: bool | None = None,  # None: where there is CUDA; False runs the same step without a graph
        graph_bytes: int = 4 << 30,  # GPU memory that graphs may take together
        warm_up: bool = True,  # record the buckets of one sequence now, with a progress bar, not at their first use
        ops: Any = None,  # kernels, or their reference; None: what the device can run
    ) -> None:
        self._eager = EagerBackend(model)
        self.model, self.device, self.vocab_size = model, self._eager.device, self._eager.vocab_size
        self.token_bytes = self._eager.token_bytes
        on_gpu = self.device.type == "cuda"
        self.capture = on_gpu if capture is None else capture
        self.graph_bytes, self._used = graph_bytes, 0
        self._ops = ops if ops is not None else kernels() if on_gpu else reference
        self._pool: Any = torch.cuda.graph_pool_handle() if self.capture else None
        self._fuse, self._warm_up = fuse, warm_up
        self._fusion: Callable[[], AbstractContextManager[None]] = nullcontext
        self._steps: dict[tuple[int, int, tuple[int, ...], int], Step | None] = {}
        self._windows: set[int] = set()
        self._ready = False
        self._refuse_what_cannot_be_recorded()

    def _refuse_what_cannot_be_recorded(self) -> None:
        name, adapter = type(self.model).__name__, self._eager.adapter
        if adapter.mixers:
            raise UnsupportedModel(
                f"{name} has recurrent or state-space layers, whose states cannot be recorded; use the runtime eager"
            )
        if adapter.custom_attention:
            raise UnsupportedModel(
                f"{name} has attention code of its own, which cannot be recorded; use the runtime eager"
            )
        if by_storage := {s.what for s in adapter.stand_ins}:
            raise UnsupportedModel(
                f"{name} takes positions from storage order ({', '.join(sorted(by_storage))}), which cannot be "
                "recorded; use the runtime eager"
            )

    def slot_bytes(self, rows: int) -> int:
        return 0

    def positions(self) -> tuple[int, str]:
        return self._eager.positions()

    def allocate(self, bounds: Bounds) -> tuple[DeferredCache, Allocator]:
        self._bounds = bounds
        self.cache = DeferredCache(self._eager.allocate(bounds)[0])
        return self.cache, StretchSlots(self.cache, bounds.slots, bounds.slots * bounds.capacity)

    # The check at load

    def check(self, target: Target, self_test: bool | None) -> None:
        """The model eagerly, then kernels, graph and fusion against that: nothing runs that was not checked."""
        self._eager.check(target, self_test)
        if self._fuse:
            self._fusion = Fusion(self.model, self._ops, self._probe).active
        self._record_smallest()
        self._compare(target)
        if self._warm_up:
            self.prepare((), NO_NEEDS)

    @torch.inference_mode()
    def _probe(self) -> object:
        """A forward of two tokens in slot 0."""
        current, rows = Pass([_two_tokens()], self._eager.adapter.dtype, self.device), self.cache.rows
        out = self._eager.adapter(current, rows.bind(current), logits=current.rows, hidden=False)
        rows.wipe(0)
        return out

    @torch.inference_mode()
    def _record_smallest(self) -> None:
        """The smallest step, run once: refuses a model whose code cannot be recorded."""
        try:
            step = self._step(1, 2, ())
            if step is None:
                raise UnsupportedModel("no graph could be recorded")
            two = [_two_tokens()]
            self.cache.rows.touch(two)
            step.fill(two, [[]])
            step.run(two)
        except Exception as error:
            name = type(self.model).__name__
            why = str(error) if isinstance(error, UnsupportedModel) else first_line(error, typed=True)
            raise UnsupportedModel(f"{name} cannot be recorded as a graph ({why}); use the runtime eager") from error
        finally:
            self.cache.rows.wipe(0)

    def _compare(self, target: Target) -> None:
        """Steps against the eager runtime, on a small tree."""
        tree = fixed(np.arange(1, 8) % self.vocab_size, np.array([-1, 0, 0, 1, 2, 2, 4]))
        found = []
        for self._ready in (False, True):  # each on a cache that holds nothing of the other
            slot = target.acquire()
            try:
                target.run([Piece(slot, [3 % self.vocab_size, 0])], NO_NEEDS)
                found.append(target.run([Piece(slot, tree=tree)], NO_NEEDS)[0].logits)
            finally:
                target.release(slot)
        eager, recorded = found
        assert eager is not None and recorded is not None
        worst = float((eager.float() - recorded.float()).abs().max() / eager.float().abs().max())
        if not worst <= TOLERANCE.get(self.model.dtype, 1e-1):
            name = type(self.model).__name__
            raise UnsupportedModel(
                f"{name} comes out differently as a graph ({worst:.1e} of the largest logit); use the runtime eager"
            )

    def prepare(self, contexts: Sequence[int], needs: Needs) -> None:
        """Record the steps of one sequence that bring these now, not each in the middle of a text; any length fits."""
        fitting = [rows for rows in ROWS[:-1] if rows <= self._bounds.rows]
        missing = [rows for rows in fitting if (1, rows, needs.hidden, needs.top) not in self._steps]
        for rows in tracked(missing, "recording steps"):
            self._step(1, rows, needs.hidden, needs.top)

    # The step

    def run(self, blocks: Sequence[Block], needs: Needs) -> list[Scores]:
        scored = self._ready and all(b.scored(needs) for b in blocks)
        step, cache = self._bucket(blocks, needs) if scored else None, self.cache
        if step is None:
            cache.settle([b.slot for b in blocks])
            return self._eager.run(blocks, needs)
        cache.rows.touch(blocks)
        cache.settle([b.slot for b in blocks if len(cache.waiting.get(b.slot, ())) > MOVES])
        step.fill(blocks, [cache.take(b.slot) for b in blocks])
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
        step = Step(self.cache.rows, self._ops, batch, rows, self.device, top)
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
        cache = StepCache(self.cache.rows, step)

        def forward() -> Outputs:
            step.move()
            with running(step), switched(self._eager.adapter.configs, NAME), self._fusion():
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


def _two_tokens() -> Block:
    return text_block(0, 0, np.zeros(2, dtype=np.int64))
