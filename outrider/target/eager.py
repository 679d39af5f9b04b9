"""TransformersTarget: runs any causal language model that transformers loads, layer by layer, without editing its code.

The model and its configuration stay the caller's: our attention is switched on for the duration of a forward and off
again, so the caller's own `generate` works before and after (not during, from another thread). Exact: a row's logits
are those of an independent forward over its own path, up to floating-point summation order. Cost: one forward a step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.errors import InputError, OutriderError
from outrider.protocols import Chunk, Needs, Scores, Traits
from outrider.target.adapter import Adapter
from outrider.target.cache import SlotCache
from outrider.target.passes import Block, Pass, chain_block
from outrider.target.selftest import self_check
from outrider.target.support import TESTED, context_limit, refuse_unsupported
from outrider.target.thresholds import moved_near
from outrider.tree import TokenTree

log = logging.getLogger(__name__)


class TransformersTarget:
    runtime = "eager"
    tested = TESTED  # types of models that need no check at load
    precision = ""  # of the weights; empty: the dtype that the model has
    even = False  # whether a step costs the same whatever ran before it
    own_threads = False  # whether they are other than torch's

    def __init__(
        self,
        model: Any,
        *,
        max_slots: int = 8,
        max_context: int | None = None,  # None: as far as the model goes
        cache_bytes: int = 4 << 30,
        max_rows: int = 256,
        prefill_chunk: int = 512,  # rows of one prefill forward, all slots together
        self_test: bool | None = None,  # None: for architectures that our tests do not cover
    ) -> None:
        if min(max_slots, max_rows, prefill_chunk) < 1 or (max_context is not None and max_context < 1):
            raise InputError("max_slots, max_context, max_rows and prefill_chunk must be at least 1")
        refuse_unsupported(model)
        if model.training:
            raise InputError("the model is in training mode, where dropout is random; call model.eval() first")
        self.model, self.max_rows, self.prefill_chunk = model, max_rows, prefill_chunk
        self._adapter = self._adapt(model)
        self.vocab_size = self._adapter.vocab_size
        self.max_context, slots = self._bound(max_slots, max_context, cache_bytes)
        self._cache = self._allocate(slots)
        self._free = list(range(slots))
        self._lengths = [0] * slots
        self._touched = [0] * slots  # rows of the cache that may hold something
        if self_test or (self_test is None and self._adapter.model_type not in self.tested):
            self_check(self)

    # What a runtime that keeps these slots and steps brings of its own: these two, and `_run`

    def _adapt(self, model: Any) -> Any:
        return Adapter(model)

    def _allocate(self, slots: int) -> Any:
        return SlotCache(self._adapter.shapes, slots, self.max_context + self.max_rows)

    @contextmanager
    def thresholds_near(self, *, masks_only: bool = False) -> Iterator[list[str]]:
        """For a check: the model, and what this runtime took from it, with its late thresholds moved near."""
        before = self.max_context
        with moved_near(self.model, before, masks_only=masks_only) as moved:
            try:
                self.max_context = min(before, context_limit(self.model.config)[0])
                yield moved
            finally:
                self.max_context = before

    def _bound(self, max_slots: int, max_context: int | None, cache_bytes: int) -> tuple[int, int]:
        """Context and slots within `cache_bytes`: fewer slots first, then less context."""
        limit, reason = context_limit(self.model.config)
        if self._adapter.positions is not None and self._adapter.positions < limit:
            limit, reason = self._adapter.positions, "the model's table of positions ends there"
        context = limit if max_context is None else min(max_context, limit)
        if max_context is not None and max_context > limit:
            log.warning("max_context %d is cut to %d: %s", max_context, limit, reason)
        token = sum(shape.bytes for shape in self._adapter.shapes)
        rows = cache_bytes // token - self.max_rows - 1  # rows of one slot that the bytes allow
        if rows < 1:
            raise InputError(
                f"cache_bytes {cache_bytes} hold no token at {token} bytes each and {self.max_rows} rows in flight; "
                "raise cache_bytes or lower max_rows"
            )
        if rows < context:
            log.warning("the context is cut from %d to %d tokens: cache_bytes allow no more", context, rows)
            context = rows
        slots = min(max_slots, cache_bytes // (token * (context + self.max_rows + 1)))
        if slots < max_slots:
            log.info("%d slots of %d: cache_bytes allow no more at %d tokens each", slots, max_slots, context)
        return context, slots

    @property
    def traits(self) -> Traits:
        return Traits(
            self.runtime, self.precision or None, self.weight_bytes, len(self._lengths), self.even, self.own_threads
        )

    @property
    def weight_bytes(self) -> int | None:
        """What a step of greedy decoding reads of the weights, where that is known."""
        return None

    def prepare(self, contexts: Sequence[int], needs: Needs) -> None:
        """Nothing is made beforehand."""

    # Slots

    @property
    def device(self) -> torch.device:
        return self._adapter.device

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def slots(self) -> int:
        return self._cache.slots

    @property
    def cache_bytes(self) -> int:
        return self._cache.bytes

    def length(self, slot: int) -> int:
        return self._lengths[slot]

    def acquire(self) -> int:
        if not self._free:
            raise OutriderError(f"all {self.slots} slots are in use; release one or raise max_slots or cache_bytes")
        return self._free.pop(0)

    @torch.inference_mode()
    def release(self, slot: int) -> None:
        if slot in self._free or not 0 <= slot < self.slots:
            raise OutriderError(f"slot {slot} is not in use; it was released already or never acquired")
        self._cache.wipe(slot, self._touched[slot])
        self._lengths[slot] = self._touched[slot] = 0
        self._free.append(slot)
        self._free.sort()

    @torch.inference_mode()
    def fork(self, slot: int) -> int:
        """A new slot with the same committed prefix; what is in flight stays behind."""
        twin, length = self.acquire(), self._lengths[slot]
        self._cache.copy(slot, twin, length)
        self._lengths[twin] = self._touched[twin] = length
        return twin

    # Steps

    def prefill(
        self, slots: Sequence[int], prompts: Sequence[Sequence[int]], needs: Needs
    ) -> Iterator[list[Chunk]]:  # fmt: skip
        """Append prompts to what the slots hold, all but the last token of each; must be exhausted."""
        for slot, prompt in zip(slots, prompts, strict=True):
            if len(prompt) == 0:
                raise InputError("the prompt is empty; give at least one token")
            if self._lengths[slot] + len(prompt) > self.max_context:
                raise InputError(
                    f"the prompt of {self._lengths[slot] + len(prompt)} tokens is longer than the context of "
                    f"{self.max_context}; shorten it or raise max_context"
                )
        left = [(s, np.asarray(p[:-1], dtype=np.int64)) for s, p in zip(slots, prompts, strict=True) if len(p) > 1]
        return self._chunks(left, needs)

    def _chunks(self, left: list[tuple[int, NDArray[np.int64]]], needs: Needs) -> Iterator[list[Chunk]]:
        while left:
            width = max(1, self.prefill_chunk // len(left))
            blocks = [chain_block(slot, self._lengths[slot], tokens[:width]) for slot, tokens in left]
            scores = self._forward(blocks, needs, logits=needs.logits)
            for b in blocks:
                self._lengths[b.slot] += b.rows
            left = [(slot, tokens[width:]) for slot, tokens in left if len(tokens) > width]
            yield [Chunk(b.slot, b.length, b.tokens.tolist(), s) for b, s in zip(blocks, scores, strict=True)]

    def verify(
        self, slots: Sequence[int], trees: Sequence[TokenTree], needs: Needs, done: Sequence[int] | None = None
    ) -> list[Scores]:  # fmt: skip
        blocks = []
        for i, (slot, tree) in enumerate(zip(slots, trees, strict=True)):
            length, skip = self._lengths[slot], done[i] if done else 0
            if len(tree) > self.max_rows or length + tree.depth >= self.max_context:
                raise InputError(
                    f"a tree of {len(tree)} rows and depth {tree.depth} behind {length} tokens passes max_rows "
                    f"{self.max_rows} or max_context {self.max_context}; draft less"
                )
            blocks.append(Block(slot, length, tree.tokens, tree.depths, tree.ancestor_mask()[skip:], skip))
        return self._forward(blocks, needs, logits=True)

    @torch.inference_mode()
    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        moves: list[tuple[int, int, int]] = []
        for slot, path in zip(slots, paths, strict=True):
            length = self._lengths[slot]
            moves += [(slot, length + node, length + to) for to, node in enumerate(path, 1) if node != to]
            self._lengths[slot] = length + 1 + len(path)
        if moves:
            self._cache.move(*zip(*moves, strict=True))

    # The forward

    @torch.inference_mode()
    def _forward(self, blocks: Sequence[Block], needs: Needs, logits: bool) -> list[Scores]:
        for b in blocks:
            self._touched[b.slot] = max(self._touched[b.slot], b.reach)
        return self._run(blocks, needs, logits)

    def _run(self, blocks: Sequence[Block], needs: Needs, logits: bool) -> list[Scores]:
        current = Pass(blocks, self._adapter.dtype, self._adapter.device)
        out = self._adapter(current, self._cache.bind(current), logits=logits, hidden=bool(needs.hidden))
        return [
            Scores(
                out.logits[i, : b.rows] if logits else None,
                {layer: out.hidden_states[layer][i, : b.rows] for layer in needs.hidden},
            )
            for i, b in enumerate(blocks)
        ]
