"""CudaBackend: the same transformers models on CUDA, whole passes recorded and replayed as one graph each.

A pass of up to 1024 rows of up to 64 sequences, trees of up to 128 nodes and stretches of text side by side, is one
CUDA graph: accepted paths of the last step moved, forward, likeliest tokens. The rows stand one behind another
(`packing`); sizes in between are padded, and padding reads nothing. What changes from pass to pass is one small tensor
that is copied in; one synchronisation fetches what was chosen. Which sizes are recorded, and when, is said in `sizes`;
wider trees, and trees deeper than a window, run eagerly on the same cache. Exact: logits are those of independent
forwards up to summation order. Cost: some tenths of a second to record each size; memory for the graphs is bounded by
`graph_bytes`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from outrider.core.errors import InputError, UnsupportedModel
from outrider.core.protocols import Target
from outrider.core.records import NO_NEEDS, Needs, Piece, Scores, Traits
from outrider.core.tree import fixed, root
from outrider.models.quiet import first_line
from outrider.runtime.attention import switched
from outrider.runtime.backend import Bounds
from outrider.runtime.blocks.allocator import Allocator
from outrider.runtime.blocks.stretches import StretchSlots
from outrider.runtime.cuda import reference
from outrider.runtime.cuda.cache import DeferredCache
from outrider.runtime.cuda.fusion import Fusion, real
from outrider.runtime.cuda.packing import ROWS, Packed, cover, pack, passes, smallest
from outrider.runtime.cuda.reference import MAX_NODES
from outrider.runtime.cuda.same_bits.choice import ANY, SAME, has_same_bits, ordered
from outrider.runtime.cuda.sizes import kept as kept_sizes
from outrider.runtime.cuda.sizes.recordings import FIRST_S, Recordings, Size
from outrider.runtime.cuda.step import MOVES, NAME, Outputs, Shelf, Step, StepCache, running
from outrider.runtime.eager.backend import EagerBackend
from outrider.runtime.passes import Block, Pass, text_block
from outrider.runtime.progress import tracked
from outrider.runtime.selftest import TOLERANCE

log = logging.getLogger(__name__)
ACTIVATIONS = 16  # widths of the model that a row takes in a layer, about
TREE_ROWS = 64  # of a sequence, at most, for which passes are recorded beforehand


def kernels(bits: str = SAME) -> Any:
    """The Triton kernels, made when they are first asked for; see `same_bits` for their order of summation."""
    if find_spec("triton") is None:
        raise InputError("the runtime graphs needs triton; pip install triton, or use the runtime eager")
    from outrider.runtime.cuda import kernels as rows
    from outrider.runtime.cuda import projection
    from outrider.runtime.cuda.hopper_product import gated
    from outrider.runtime.cuda.race import pick
    from outrider.runtime.cuda.top import top
    from outrider.runtime.cuda.tree_attention import tree_attention

    ops = SimpleNamespace(
        tree_attention=tree_attention, streams=projection.streams, project=projection.project, parts=projection.parts,
        gated=gated, top=top, rms_norm=rows.rms_norm, add_norm=rows.add_norm, gate=rows.gate,
        likeliest=rows.likeliest, pick=pick, store_rows=rows.store_rows, move_rows=rows.move_rows,
    )  # fmt: skip
    return ordered(ops) if bits == SAME else ops


class CudaBackend:
    """Holds an eager backend, which runs on the same cache whatever is not recorded."""

    max_rows: int | None = None
    prompt_rows = 512  # beside as many rows of trees in the largest pass
    block_size, reserves = 1, True
    # What ran before a recording leaves nothing behind. Side rows run eagerly, on the same cache.
    traits = Traits("graphs", even=True, mixes=True, side_rows=True, races=True)
    cache: DeferredCache

    def __init__(
        self,
        model: Any,
        *,
        fuse: bool = True,  # norms, projections, gates and rotary embeddings on kernels of our own
        capture: bool | None = None,  # None: where there is CUDA; False runs the same step without a graph
        graph_bytes: int = 4 << 30,  # GPU memory that graphs may take together
        warm_up: bool = True,  # record the buckets of one sequence now, with a progress bar, not at their first use
        bits: str = SAME,  # of a row in any pass; "any": sums in whatever order is fastest
        ops: Any = None,  # kernels, or their reference; None: what the device can run
    ) -> None:
        self._eager = EagerBackend(model)
        self.model, self.device, self.vocab_size = model, self._eager.device, self._eager.vocab_size
        self.token_bytes = self._eager.token_bytes
        on_gpu = self.device.type == "cuda"
        self.capture = on_gpu if capture is None else capture
        self.graph_bytes, self._used = graph_bytes, 0
        self._ops = ops if ops is not None else kernels(bits) if on_gpu else reference
        if hasattr(self._ops, "missed"):
            self.max_rows = MAX_NODES  # wider trees run eagerly, in another order
        self._work: list[Callable[[], None]] = []  # of the host, for while the next pass runs
        self.traits = replace(self.traits, pick=self._ops.pick, meanwhile=self._work.append, spare=self._spare)
        self._pool: Any = torch.cuda.graph_pool_handle() if self.capture else None
        self._fuse, self._warm_up = fuse, warm_up
        self._fusion: Callable[[], AbstractContextManager[None]] = nullcontext
        self._kept = kept_sizes.place(model, self.device) if self.capture else None
        known = kept_sizes.read(self._kept) if self._kept else {}
        self.recordings: Recordings[Step] = Recordings(self._make, self._record, known=known)
        self._shelf = Shelf()
        self._windows: set[int] = set()
        self._width = self.model.get_input_embeddings().weight.shape[1]
        self._places: list[int] = []  # where its weights lie
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
        try:
            self._serve(self._ops)
            self._compare(target)
            same = self._fuse and has_same_bits(self._ops, self.model, target)
        except UnsupportedModel:
            if not self._by_position:
                raise
            same = False
        if self._by_position and not same:  # what one order costs buys nothing here
            self._serve(kernels(ANY))
            self._compare(target)
        self.traits = replace(self.traits, same_bits=same)
        if self._warm_up:
            sizes = [Size(bucket) for bucket in cover(1, min(self._bounds.rows, TREE_ROWS), 0)]
            for size in tracked(sizes, "recording steps"):
                self.recordings.record(size)

    def _serve(self, ops: Any) -> None:
        """Changes state: these kernels are what steps run on."""
        self._ops, self._ready = ops, False
        self._by_position = hasattr(ops, "missed")  # attention puts candidates where they will stand as text
        self.recordings = Recordings(self._make, self._record, known=self.recordings.wanted)
        if self._fuse:
            self._fusion = Fusion(self.model, ops, self._probe).active
        self._places = self._weight_places()  # after those of a group were joined
        self._record_smallest()

    @torch.inference_mode()
    def _probe(self) -> object:
        """A forward of two tokens in slot 0."""
        current, rows = Pass([_two_tokens()], self._eager.adapter.dtype, self.device), self.cache.rows
        out = self._eager.adapter(current, rows.bind(current), logits=current.rows, hidden=False)
        rows.wipe(0)
        return out

    @torch.inference_mode()
    def _record_smallest(self) -> None:
        """The smallest pass of several rows, run once: refuses a model whose code cannot be recorded."""
        try:
            blocks, needs = [_two_tokens()], Needs(logits=True)
            packed = pack(blocks, needs, smallest(blocks, needs))
            size = Size(packed.bucket)
            self.recordings.record(size)
            step = self.recordings.at(size)
            if self.capture and not step.graph:
                raise UnsupportedModel("no graph could be recorded")
            self.cache.rows.touch(packed.blocks)
            step.fill(packed, [[]])
            step.run(packed)
        except Exception as error:
            name = type(self.model).__name__
            why = str(error) if isinstance(error, UnsupportedModel) else first_line(error, typed=True)
            raise UnsupportedModel(f"{name} cannot be recorded as a graph ({why}); use the runtime eager") from error
        finally:
            self.cache.rows.wipe(0)

    def _compare(self, target: Target) -> None:
        """Passes against the eager runtime: two texts together, then a tree behind each, where there are two slots."""
        tree = fixed(np.arange(1, 8) % self.vocab_size, np.array([-1, 0, 0, 1, 2, 2, 4]))
        trees = [tree.keep(range(min(len(tree), target.max_rows))), root(1)][: target.free_slots]
        texts = [[3 % self.vocab_size, 0], [0, 5 % self.vocab_size, 1]][: len(trees)]
        found = []
        for self._ready in (False, True):  # each on a cache that holds nothing of the other
            slots = [target.acquire() for _ in texts]
            try:
                target.run([Piece(slot, text) for slot, text in zip(slots, texts, strict=True)], NO_NEEDS)
                pieces = [Piece(slot, tree=tree) for slot, tree in zip(slots, trees, strict=True)]
                found.append([scores.logits.float() for scores in target.run(pieces, NO_NEEDS)])  # type: ignore[union-attr]
            finally:
                for slot in slots:
                    target.release(slot)
        eager, packed = (torch.cat(logits) for logits in found)
        worst = float((eager - packed).abs().max() / eager.abs().max())
        if not worst <= TOLERANCE.get(self.model.dtype, 1e-1):
            name = type(self.model).__name__
            raise UnsupportedModel(
                f"{name} comes out differently as a graph ({worst:.1e} of the largest logit); use the runtime eager"
            )

    def prepare(self, contexts: Sequence[int], needs: Needs) -> None:
        """Record passes of any number of sequences that bring these, some now and the rest between steps, not each in
        the middle of a text; where contexts are named, all of them now. Any length fits."""
        sizes = cover(self._bounds.slots, min(self._bounds.rows, TREE_ROWS), self.prompt_rows)
        self.recordings.first([Size.of(bucket, needs) for bucket in sizes], None if contexts else FIRST_S)
        self._keep_sizes()

    def _spare(self, idle: bool) -> bool:
        """Changes state: records a size that passes would like to have, if it is time; whether there is more."""
        if not self.capture:
            return False
        before = self._used
        more = self.recordings.spare(idle)
        if self._used != before:
            self._keep_sizes()
        return more

    def _keep_sizes(self) -> None:
        if self._kept is not None:
            kept_sizes.write(self._kept, self.recordings.wanted)

    def refresh(self, model: Any) -> None:
        """Recordings read the weights where they lie: where they have stayed in their places nothing is made anew."""
        self._eager.refresh(model)
        if self._places == self._weight_places():
            return
        self.recordings = Recordings(self._make, self._record, known=self.recordings.wanted)
        self._shelf, self._used = Shelf(), 0
        if self.capture:
            self._pool = torch.cuda.graph_pool_handle()
        if self._fuse:
            self._fusion = Fusion(self.model, self._ops, self._probe).active
        self._places = self._weight_places()
        if self._warm_up:
            self.prepare((), NO_NEEDS)

    def _weight_places(self) -> list[int]:
        return [weight.data_ptr() for weight in self.model.parameters()]

    # The pass

    def run(self, blocks: Sequence[Block], needs: Needs) -> list[Scores]:
        scores: dict[int, Scores] = {}
        if apart := [b for b in blocks if not self._fits(b)]:
            self._do_work()
            self.cache.settle([b.slot for b in apart])
            scores |= zip((b.slot for b in apart), self._eager.run(apart, needs), strict=True)
        for part in passes([b for b in blocks if b.slot not in scores]):
            scores |= self._run(part, needs)
        return [scores[b.slot] for b in blocks]

    @torch.inference_mode(False)
    def _do_work(self) -> None:
        work, self._work[:] = [*self._work], []
        for one in work:
            one()

    def _fits(self, block: Block) -> bool:
        """Whether a recorded pass can hold these rows."""
        if not self._ready or block.rows > ROWS[-1] or block.side is not None:
            return False
        if block.text:
            return True
        if (
            self._windows and not self._by_position and int(block.depths.max()) >= min(self._windows)
        ):  # of a tree, windows look at the prefix only
            return False
        return len(block.tokens) <= MAX_NODES

    def _run(self, blocks: Sequence[Block], needs: Needs) -> dict[int, Scores]:
        """By slot."""
        scored = any(b.scored(needs) for b in blocks)
        wanted = Size.of(smallest(blocks, needs), needs if scored else Needs(hidden=needs.hidden))
        size = self.recordings.find(wanted)
        return self._run_in(self.recordings.at(size), pack(blocks, needs, size.bucket))

    def _run_in(self, step: Step, packed: Packed) -> dict[int, Scores]:
        cache, slots = self.cache, [b.slot for b in packed.blocks]
        cache.rows.touch(packed.blocks)
        cache.settle([slot for slot in slots if len(cache.waiting.get(slot, ())) > MOVES])
        moves, step.moved = [cache.take(slot) for slot in slots], False
        try:
            step.fill(packed, moves)
            return dict(zip(slots, step.run(packed, self._do_work), strict=True))
        except BaseException:
            if not step.moved:  # whoever tries again finds the cache as it was
                cache.waiting |= {slot: pairs for slot, pairs in zip(slots, moves, strict=True) if pairs}
            raise

    def _make(self, size: Size) -> Step:
        step = Step(self.cache.rows, self._ops, size.bucket, self.device, size.top)
        step.replay = self._forward_of(step, size.hidden)
        return step

    @torch.inference_mode()
    def _record(self, step: Step) -> None:
        """Changes the step, once: it is a graph from now on, unless there is too little memory for it."""
        step.tried, before = True, step.replay
        if not self.capture:
            return
        rows, scored = step.bucket.rows, step.bucket.scored
        expected = 8 * (scored * self.vocab_size + ACTIVATIONS * rows * self._width)
        free, why = torch.cuda.mem_get_info(self.device)[0], "too little GPU memory"
        if expected <= min(free, self.graph_bytes - self._used):
            try:
                step.record(lambda: self._shelf.put(before()), self._pool)
                self._used += max(0, free - torch.cuda.mem_get_info(self.device)[0])
                return
            except torch.OutOfMemoryError:
                pass
            except Exception as error:
                if not self._ready:
                    raise
                why = str(error)
        log.warning("passes of %d rows of %d sequences run without a graph: %s", rows, step.bucket.sequences, why)

    def _forward_of(self, step: Step, hidden: tuple[int, ...]) -> Callable[[], Outputs]:
        cache, scored, adapter = StepCache(self.cache.rows, step), step.bucket.scored, self._eager.adapter
        options: dict[str, Any] = {"output_hidden_states": True} if hidden else {}
        if scored < step.bucket.rows and adapter.can_trim:
            options["logits_to_keep"] = scored

        def forward() -> Outputs:
            step.move()
            with running(step), switched(adapter.configs, NAME), self._fusion():
                out = self.model(
                    input_ids=step.ids, position_ids=step.positions, past_key_values=cache, use_cache=True,
                    return_dict=True, **options,
                )  # fmt: skip
                step.store()
                logits = real(out.logits)[0, -scored:]
                states = {layer: real(out.hidden_states[layer])[0] for layer in hidden}
            self._windows |= set(step.windows.values())
            if step.top:
                return Outputs(logits, self._ops.top(logits, step.top), states)
            raced = self._ops.pick(logits, step.temperatures, step.keys).int()
            return Outputs(logits, torch.stack([self._ops.likeliest(logits).int(), raced])[..., None], states)

        return forward


def _two_tokens() -> Block:
    return text_block(0, 0, np.zeros(2, dtype=np.int64))
