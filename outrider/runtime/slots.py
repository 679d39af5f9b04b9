"""SlotTarget: the target that every runtime shares. Slots, their lengths, and what fits; a backend runs the rows.

A sequence holds a slot from `acquire` or `fork` to `release`. Text that runs is committed at once; of a tree only what
`commit` keeps. Exact as far as the backend is: a row sees its slot's committed text, its ancestors and itself. Cost on
the host: some microseconds a piece, most of them for the mask of its tree.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.core.errors import InputError, OutriderError
from outrider.core.records import NO_NEEDS, Needs, Piece, Scores, Traits
from outrider.runtime.backend import Backend, Bounds
from outrider.runtime.blocks.texts import as_tokens
from outrider.runtime.flight import Block, side_block, text_block, tree_block
from outrider.runtime.packed import available

log = logging.getLogger(__name__)
FIXED_BYTES = 4 << 30  # of a cache that sets aside a whole context for every slot
GPU_SHARE = 0.5  # of the memory that a GPU has free: drafters, recordings and what passes compute need some, too
FREE_SHARE = 0.7  # of the memory that is free: what a cache of blocks may grow to


class SlotTarget:
    def __init__(
        self,
        backend: Backend,
        *,
        max_slots: int = 8,
        max_context: int | None = None,  # None: as far as the model goes
        cache_bytes: int | None = None,  # None: as `default_bytes` says
        max_rows: int = 256,
        prompt_rows: int = 512,  # rows of text in one pass, all slots together
        self_test: bool | None = None,  # None: for architectures that our tests do not cover
    ) -> None:
        if min(max_slots, max_rows, prompt_rows) < 1 or (max_context is not None and max_context < 1):
            raise InputError("max_slots, max_context, max_rows and prompt_rows must be at least 1")
        self.backend, self.device, self.vocab_size = backend, backend.device, backend.vocab_size
        size = default_bytes(backend) if cache_bytes is None else cache_bytes
        bounds = bounded(backend, max_slots, max_context, size, min(max_rows, backend.max_rows or max_rows))
        self.slots, self.max_context, self.max_rows = bounds.slots, bounds.context, bounds.rows
        self._prompt_rows = min(prompt_rows, backend.prompt_rows or prompt_rows)
        self._cache, self._texts = backend.allocate(bounds)
        self._used: set[int] = set()
        self._trees: dict[int, NDArray[np.int64]] = {}  # tokens of what ran since the last commit, by slot
        log.info("%s", stated(bounds))
        self.traits = self._stated()
        backend.check(self, self_test)
        self.traits = self._stated()  # some of them the check has found out

    def _stated(self) -> Traits:
        return replace(self.backend.traits, slots=self.slots, prompt_rows=self._prompt_rows)

    def prepare(self, contexts: Sequence[int], needs: Needs) -> None:
        """Changes state: make ready now what steps of single texts of so many tokens would meet later."""
        self.backend.prepare(contexts, needs)

    def refresh(self, model: Any) -> None:
        """Changes state: runs the weights that the model has now, which were changed in place.

        Texts that ran with the old ones are not found again.
        """
        if self._used:
            raise OutriderError(f"{len(self._used)} slots are in use; weights change between texts: release them first")
        self.backend.refresh(model)
        self._texts.forget()

    # Slots

    @property
    def free_slots(self) -> int:
        return self._texts.free_slots

    @property
    def cache_bytes(self) -> int:
        return self._cache.bytes

    def length(self, slot: int) -> int:
        return self._texts.length(slot)

    def fits(self, rows: Mapping[int, int]) -> bool:
        """Whether each of these slots can take so many more rows, all of them together."""
        return self._texts.fits({slot: self.length(slot) + count for slot, count in rows.items()})

    @torch.inference_mode()
    def acquire(self, tokens: Sequence[int] = (), salt: str = "") -> int:
        """A slot that holds what is found of the beginning of these tokens."""
        return self._given(self._texts.acquire(as_tokens(tokens), salt))

    def _given(self, slot: int | None) -> int:
        if slot is None:
            raise OutriderError(f"all {self.slots} slots are in use; release one or raise max_slots or cache_bytes")
        self._used.add(slot)
        return slot

    @torch.inference_mode()
    def release(self, slot: int) -> None:
        if slot not in self._used:
            raise OutriderError(f"slot {slot} is not in use; it was released already or never acquired")
        self._used.remove(slot)
        self._trees.pop(slot, None)
        self._texts.release(slot)

    @torch.inference_mode()
    def fork(self, slot: int, length: int | None = None) -> int:
        """A new slot with the same first tokens, by default all that are committed; what is in flight stays behind."""
        tokens = self._texts.tokens(slot)[:length]
        twin = self._given(self._texts.fork(slot, len(tokens)))
        self._run_again(twin, tokens)
        return twin

    @torch.inference_mode()
    def truncate(self, slot: int, length: int) -> None:
        """Changes state: what stands behind the first `length` tokens is forgotten."""
        if length < self.length(slot):
            tokens = self._texts.tokens(slot)[:length]
            self._texts.truncate(slot, length)
            self._run_again(slot, tokens)

    def _run_again(self, slot: int, tokens: NDArray[np.int64]) -> None:
        """Changes state: a slot holds all of these tokens, where a cache of states has gone back further than asked."""
        for begin in range(self.length(slot), len(tokens), self._prompt_rows):
            self.run([Piece(slot, tokens[begin : begin + self._prompt_rows].tolist())], NO_NEEDS)

    @torch.inference_mode()
    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Changes state: the pending token and the path of each slot's tree are text, the rest of it is forgotten."""
        self._cache.keep(slots, [self.length(slot) for slot in slots], paths)
        for slot, path in zip(slots, paths, strict=True):
            tokens = self._trees.pop(slot)
            self._texts.append(slot, as_tokens(tokens[[0, *path]] if path else tokens[:1]))

    # Passes

    def run(self, pieces: Sequence[Piece], needs: Needs) -> list[Scores]:
        """Changes state: text and trees of several slots, each of which has one piece, in one pass where they may mix.

        Text is committed; its logits are given only where `needs` asks for them.
        """
        blocks = [self._block(piece) for piece in pieces]
        self._texts.reserve({b.slot: b.reach for b in blocks})
        text = [b for b in blocks if b.text]
        if not text or len(text) == len(blocks) or self.traits.mixes:
            scores = self._pass(blocks, needs)
        else:
            parts = (text, [b for b in blocks if not b.text])
            by_slot = {b.slot: s for part in parts for b, s in zip(part, self._pass(part, needs), strict=True)}
            scores = [by_slot[b.slot] for b in blocks]
        for b in blocks:
            if b.text:
                self._texts.append(b.slot, as_tokens(b.tokens))
            else:
                self._trees[b.slot] = b.tokens[: b.nodes]  # side rows cannot be committed
        return [s if b.side is None else _parted(b, s) for b, s in zip(blocks, scores, strict=True)]

    def _block(self, piece: Piece) -> Block:
        """The rows of a piece, refused where they do not fit."""
        length, tree = self.length(piece.slot), piece.tree
        if tree is None:
            whole = length + len(piece.tokens) + 1  # a token behind the text is pending
            if len(piece.tokens) == 0:
                raise InputError(f"the text for slot {piece.slot} is empty; give at least one token")
            if whole > self.max_context:
                raise InputError(
                    f"a text of {whole} tokens is longer than the context of {self.max_context}; shorten it or raise "
                    "max_context"
                )
            return text_block(piece.slot, length, np.asarray(piece.tokens, dtype=np.int64))
        side = piece.side
        depth = tree.depth if side is None else max(tree.depth, int(side.depths(tree).max(initial=0)))
        if piece.rows > self.max_rows or length + depth >= self.max_context:
            raise InputError(
                f"a tree of {piece.rows} rows and depth {depth} behind {length} tokens passes max_rows "
                f"{self.max_rows} or max_context {self.max_context}; draft less"
            )
        if side is None:
            return tree_block(piece.slot, length, tree, piece.done, piece.race)
        if not self.traits.side_rows:
            raise InputError(
                f"the runtime {self.traits.runtime} does not run rows of a drafter's vectors for this model; use the "
                "runtime native or eager"
            )
        return side_block(piece.slot, length, tree, piece.done, side, self.vocab_size)

    @torch.inference_mode()
    def _pass(self, blocks: Sequence[Block], needs: Needs) -> list[Scores]:
        return self.backend.run(blocks, needs)


def _parted(block: Block, scores: Scores) -> Scores:
    """Those of the side rows apart from those of the tree."""
    at = max(0, block.nodes - block.done)
    logits, states, likeliest = scores.logits, scores.hidden, scores.likeliest
    beside = Scores(
        None if logits is None else logits[at:],
        {layer: rows[at:] for layer, rows in states.items()},
        None if likeliest is None else likeliest[at:],
    )
    return replace(
        scores, logits=None if logits is None else logits[:at], side=beside,
        hidden={layer: rows[:at] for layer, rows in states.items()},
        likeliest=None if likeliest is None else likeliest[:at],
    )  # fmt: skip


def default_bytes(backend: Backend) -> int:
    """Of a cache: where a text takes what it uses, most of the memory that is free; half of what a GPU has free."""
    if backend.device.type == "cuda":
        return int(GPU_SHARE * torch.cuda.mem_get_info(backend.device)[0])
    return FIXED_BYTES if backend.reserves else int(FREE_SHARE * available())


def stated(bounds: Bounds) -> str:
    many = f"up to {bounds.slots} sequences of at most {bounds.context} tokens"
    return f"the cache holds {many}, in {bounds.bytes / 2**30:.1f} GiB at most"


def bounded(backend: Backend, slots: int, context: int | None, cache_bytes: int, rows: int) -> Bounds:
    """What of this fits into the model's positions and into `cache_bytes`: fewer slots first, then less context.

    Where a text takes what it uses it is enough that the longest one fits.
    """
    limit, reason = backend.positions()
    if context is not None and context > limit:
        log.warning("max_context %d is cut to %d: %s", context, limit, reason)
    context = limit if context is None else min(context, limit)
    size, token, fixed = backend.block_size, max(1, backend.token_bytes), backend.slot_bytes(rows)
    fitting = (cache_bytes - fixed) // (token * size) * size - rows - 1  # tokens of one slot that the bytes allow
    if fitting < 1:
        raise InputError(
            f"cache_bytes {cache_bytes} hold no token at {token} bytes each, {rows} rows in flight and {fixed} bytes "
            "of states; "
            "raise cache_bytes or lower max_rows"
        )
    if fitting < context:
        log.warning("the context is cut from %d to %d tokens: cache_bytes allow no more", context, fitting)
        context = fitting
    if not backend.reserves:
        return Bounds(slots, context, rows, cache_bytes)
    most = cache_bytes // (token * (context + rows + 1) + fixed)
    if most < slots:
        log.info("%d slots of %d: cache_bytes allow no more at %d tokens each", most, slots, context)
    return Bounds(min(slots, most), context, rows, cache_bytes)
