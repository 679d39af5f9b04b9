"""NativeBackend: Llama-like models on the CPU, a whole pass as one compiled call on all threads.

Weights of 8 and 4 bits are multiplied as whole numbers instead of being turned into float32 first, which counts on
processors without AVX-512. A row's result is the same to the last bit in any tree, batch and prefill, in every
precision. With int8 or int4 weights the model is another one, and "the same output" means that of plain decoding in the
same precision. Checked at load against the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.errors import InputError
from outrider.core.numeric.llvm import LINE
from outrider.core.numeric.torch_threads import torch_threads
from outrider.core.protocols import Target
from outrider.core.records import Needs, Scores, Traits
from outrider.runtime.backend import Bounds
from outrider.runtime.blocks.allocator import Allocator
from outrider.runtime.flight import Block
from outrider.runtime.native.cache import SIZE, NativeCache
from outrider.runtime.native.held import PIECE, Held
from outrider.runtime.native.kernels.attention import MAX_QUERIES
from outrider.runtime.native.kernels.products import Linear, PreparedRows
from outrider.runtime.native.kernels.step import Batch, Outputs, Work, step
from outrider.runtime.native.kernels.team import Team
from outrider.runtime.native.model import (
    BITS,
    as_held,
    held_of,
    products,
    read_by,
    recognise,
    rows_of,
    weights_of,
    windows,
)
from outrider.runtime.selftest import self_check
from outrider.runtime.support import context_limit, refuse_unsupported
from outrider.runtime.thresholds import moved_near
from outrider.runtime.weights import check_same

_NO_VECTORS = np.zeros((0, 0), dtype=np.float32)
ROUNDED = 1e-2  # of the largest logit: how far rounding activations may move one at load


class NativeBackend:
    max_rows = None
    prompt_rows = 64
    block_size, reserves = SIZE, False
    cache: NativeCache

    def __init__(self, model: Any, *, precision: str = "float32", held: Held | None = None) -> None:
        """`held` is what was kept of a model that has passed the check; the model itself is not needed then."""
        if held is None:
            from outrider.runtime.probe import probe  # with the model's library, which is there already

            refuse_unsupported(model)
            facts = probe(model)
            sizes = recognise(model, facts)
            held = held_of(model, weights_of(model, BITS[precision]), sizes, facts)
        self.model, self.precision, self.held = model, precision, held
        self._sizes, self._weights = held.sizes, held.weights
        self.device, self.vocab_size = torch.device("cpu"), held.vocabulary
        self._shapes = held.shapes
        self.token_bytes = sum(shape.bytes for shape in self._shapes)
        self._team = Team(torch.get_num_threads())
        self._rotary = np.zeros((2, 0, self._sizes.dim), dtype=np.float32)  # cosines and sines by position
        self.traits = Traits(
            "native", precision, self._weight_bytes(), even=True, other_threads=True, same_bits=True, mixes=True,
            side_rows=True,
        )  # fmt: skip

    def _weight_bytes(self) -> int:
        """What a step of greedy decoding reads of the weights, in the form that they are held in."""
        screen = self._weights.screen
        read = self._weights._replace(head=screen.linear) if len(screen.margins) else self._weights
        return sum(part.values.nbytes + part.scales.nbytes for part in products(read))

    def embed(self, tokens: Tensor) -> Tensor:
        """What the model reads for these tokens, [..., hidden]."""
        return rows_of(self._weights.embedding, tokens, len(self._weights.last))

    def slot_bytes(self, rows: int) -> int:
        return 0

    def positions(self) -> tuple[int, str]:
        return self.held.limit if self.model is None else context_limit(self.model.config)

    def allocate(self, bounds: Bounds) -> tuple[NativeCache, Allocator]:
        self.cache = NativeCache(self._shapes, bounds.slots, bounds.capacity, bounds.bytes)
        self._context = bounds.context  # positions that the model's rotary rule is asked for
        self._work = self._room(1)
        return self.cache, self.cache.slots

    def check(self, target: Target, self_test: bool | None) -> None:
        """In any case: that the parts are used in the usual way cannot be seen from outside."""
        if self.model is None:  # it has been passed
            return
        with as_held(self.model, self._weights):
            self_check(self, target, None if self.precision == "float32" else ROUNDED)

    def refresh(self, model: Any) -> None:
        if self.model is not None:  # else it was never needed: the weights came from a file
            check_same(model, self.model)
        made = weights_of(model, BITS[self.precision])
        if [each.values.shape for each in products(made)] != [each.values.shape for each in products(self._weights)]:
            raise InputError("the model's weights have other shapes than before; load it again")
        self.model, self._weights, self.held = model, made, replace(self.held, weights=made)

    @contextmanager
    def thresholds_near(self, context: int) -> Iterator[list[str]]:
        weights, rotary, before = self._weights, self._rotary, self._context
        with moved_near(self.model, context) as moved:
            try:
                self._weights, self._rotary = weights._replace(windows=windows(self.model)), rotary[:, :0]
                self._context = min(before, self.positions()[0])
                yield moved
            finally:
                self._weights, self._rotary, self._context = weights, rotary, before

    def prepare(self, contexts: Sequence[int], needs: Needs) -> None:
        """Nothing is made beforehand."""

    def _room(self, rows: int) -> Work:
        """Arrays for steps of so many rows."""
        weights, sizes, team = self._weights, self._sizes, self._team.threads
        hidden, inner, dim = len(weights.last), self.held.inner, sizes.dim

        def floats(*shape: int) -> NDArray[np.float32]:
            return np.zeros(shape, dtype=np.float32)

        def prepared(linear: Linear) -> PreparedRows:
            kind, width, groups = read_by(linear)
            return PreparedRows(
                np.zeros((team, rows, width), dtype=kind), floats(team, rows), floats(team, rows, groups)
            )

        return Work(
            floats(rows, hidden), floats(rows, hidden), floats(rows, (sizes.heads + 2 * sizes.kv_heads) * dim),
            floats(rows, sizes.heads * dim), floats(rows, inner), floats(rows, inner), floats(team, MAX_QUERIES, dim),
            floats(team, MAX_QUERIES, self.cache.capacity + LINE // 4), floats(team, rows, hidden),
            prepared(weights.qkv), prepared(weights.out), prepared(weights.down), prepared(weights.screen.linear),
            floats(team, rows),
        )  # fmt: skip

    def _rotary_at(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Changes state: [2, R, D], from a table by the model's own rule that grows with the longest text.

        In pieces that are always the same: a cosine may depend on its place in the array by a bit.
        """
        last = min(int(positions.max()), self._context - 1)
        while last >= (known := self._rotary.shape[1]):
            places = torch.arange(known, min(known + PIECE, self._context))
            with torch_threads(1):
                piece = np.stack([table.numpy() for table in self.held.rotary(places)])
            self._rotary = np.concatenate([self._rotary, piece], axis=1)
        return self._rotary.take(positions, axis=1)  # contiguous, as compiled code expects

    def run(self, blocks: Sequence[Block], needs: Needs) -> list[Scores]:
        """Blocks that are scored come first in the pass, so that the vocabulary is multiplied by no other rows."""
        if len({b.scored(needs) for b in blocks}) == 1:
            return self._run(blocks, needs)
        order = sorted(range(len(blocks)), key=lambda i: not blocks[i].scored(needs))
        scores = self._run([blocks[i] for i in order], needs)
        return [scores[order.index(i)] for i in range(len(blocks))]

    def _run(self, blocks: Sequence[Block], needs: Needs) -> list[Scores]:
        hidden = {layer: layer % self.held.hidden for layer in needs.hidden}
        places = {number: place for place, number in enumerate(dict.fromkeys(hidden.values()))}
        batch, rows = self._batch(blocks, places), sum(b.rows for b in blocks)
        scored = sum(b.rows for b in blocks if b.scored(needs))
        if rows > len(self._work.x):
            self._work = self._room(1 << (rows - 1).bit_length())
        width = len(self._weights.last)
        team = self._team.threads if scored and needs.rounded and len(self._weights.screen.margins) else 0
        outputs = Outputs(
            np.empty((scored, self.vocab_size), dtype=np.float32),
            np.empty((len(places), rows, width), dtype=np.float32),
            np.empty((team, scored), dtype=np.float32), np.empty((team, scored), dtype=np.int64),
        )  # fmt: skip
        self._team.run(step, self._weights, self._sizes, self.cache.store, batch, self._work, outputs)
        chosen = outputs.which[outputs.best.argmax(0), np.arange(scored)].tolist() if team else None
        scores, begin = [], 0
        for b in blocks:
            part, begin = slice(begin, begin + b.rows), begin + b.rows
            logits = b.scored(needs)
            scores.append(
                Scores(
                    torch.from_numpy(outputs.logits[part]) if logits else None,
                    {layer: torch.from_numpy(outputs.hidden[places[at], part]) for layer, at in hidden.items()},
                    chosen[part] if chosen and logits else None,
                )
            )
        return scores

    def _read(
        self, blocks: Sequence[Block], tokens: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """What each row reads: a token, or where that is below 0 the vector -1, -2, ... of those given as well."""
        beside = [b.vectors for b in blocks if b.vectors is not None]
        of_side = np.zeros(len(tokens), dtype=np.bool_)
        if beside:
            ends = np.cumsum([b.rows for b in blocks])
            for b, end in zip(blocks, ends, strict=True):
                of_side[end - (0 if b.vectors is None else len(b.vectors)) : end] = True
        known = tokens[~of_side]
        if len(known) and (known.min() < 0 or known.max() >= self.vocab_size):  # compiled code would not notice
            raise InputError(f"a token is not one of the model's {self.vocab_size}")
        if not beside:
            return tokens, _NO_VECTORS
        tokens[of_side] = -1 - np.arange(of_side.sum())
        vectors = torch.cat(beside).detach().float().numpy()
        if vectors.shape[1] != len(self._weights.last):
            raise InputError(f"a side row has {vectors.shape[1]} numbers; the model reads {len(self._weights.last)}")
        return tokens, np.ascontiguousarray(vectors)

    def _batch(self, blocks: Sequence[Block], places: dict[int, int]) -> Batch:
        counts, tokens = [b.rows for b in blocks], np.concatenate([b.tokens[b.done :] for b in blocks])
        tokens, vectors = self._read(blocks, tokens)
        sees = np.zeros((sum(counts), max(len(b.tokens) for b in blocks)), dtype=np.bool_)
        begin = 0
        for b in blocks:
            sees[begin : begin + b.rows, : len(b.tokens)] = b.sees
            begin += b.rows
        taken = np.full(self.held.hidden, -1, dtype=np.int64)
        for layer, place in places.items():
            taken[layer] = place
        lengths = np.repeat([b.length for b in blocks], counts)
        cos, sin = self._rotary_at(np.concatenate([b.length + b.depths[b.done :] for b in blocks]))
        return Batch(
            tokens, vectors, np.repeat([b.slot for b in blocks], counts), lengths,
            np.concatenate([np.arange(b.length + b.done, b.reach) for b in blocks]), sees, cos, sin, taken,
        )  # fmt: skip
