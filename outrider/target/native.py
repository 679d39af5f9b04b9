"""NativeTarget: Llama-like models on the CPU, a whole step as one compiled call on all threads.

Slots, prefill, trees and commits are those of the eager runtime. Weights of 8 and 4 bits are multiplied as whole
numbers instead of being turned into float32 first, which counts on processors without AVX-512. A row's result is the
same to the last bit in any tree, batch and prefill, in every precision. With int8 or int4 weights the model is another
one, and "the same output" means that of plain decoding in the same precision. Checked at load against the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.errors import InputError
from outrider.native.attention import MOST
from outrider.native.building import LINE
from outrider.native.products import Linear, Rows
from outrider.native.step import Batch, Outputs, Work, step
from outrider.native.team import Team
from outrider.native.torch_threads import torch_threads
from outrider.protocols import Needs, Scores
from outrider.target.eager import TransformersTarget
from outrider.target.native_cache import NativeCache
from outrider.target.native_model import BITS, as_held, read_by, recognise, weights_of, windows
from outrider.target.openvino_convert import GraphTraits, traits
from outrider.target.passes import Block
from outrider.target.selftest import self_check

CHUNK = 64  # rows of a prefill
TURNS = 512  # positions whose turns are worked out together
ROUNDED = 1e-2  # of the largest logit: how far rounding activations may move one at load


class NativeTarget(TransformersTarget):
    runtime = "native"
    own_threads = True  # other than torch's
    even = True  # a step costs the same whatever ran before it

    def __init__(self, model: Any, *, precision: str = "float32", **limits: Any) -> None:
        self.precision = precision
        limits["prefill_chunk"] = min(limits.get("prefill_chunk", CHUNK), CHUNK)
        super().__init__(model, **limits, self_test=False)
        self._weights = weights_of(model, BITS[precision])
        self._team = Team(torch.get_num_threads())
        self._work = self._room(1)
        self._turns = np.zeros((2, 0, self._shape.dim), dtype=np.float32)  # cosines and sines by position
        with as_held(model, self._weights):
            self_check(self, None if precision == "float32" else ROUNDED)

    @contextmanager
    def thresholds_near(self, *, masks_only: bool = False) -> Iterator[list[str]]:
        weights, turns = self._weights, self._turns
        with super().thresholds_near(masks_only=masks_only) as moved:
            try:
                self._weights, self._turns = weights._replace(windows=windows(self.model)), turns[:, :0]
                yield moved
            finally:
                self._weights, self._turns = weights, turns

    @property
    def weight_bytes(self) -> int:
        """What a step of greedy decoding reads of the weights, in the form that they are held in."""
        screen = self._weights.screen
        read = self._weights._replace(head=screen.linear) if len(screen.margins) else self._weights
        linears = [own for own in read if isinstance(own, Linear)]
        return sum(own.values.nbytes + own.scales.nbytes for own in linears)

    def _adapt(self, model: Any) -> GraphTraits:
        known = traits(model)
        self._shape = recognise(model, known)
        return known

    def _allocate(self, slots: int) -> NativeCache:
        return NativeCache(self._adapter.shapes, slots, self.max_context + self.max_rows)

    def _room(self, rows: int) -> Work:
        """Arrays for steps of so many rows."""
        weights, shape, team = self._weights, self._shape, self._team.threads
        hidden, inner, dim = weights.embedding.shape[1], self.model.model.layers[0].mlp.up_proj.out_features, shape.dim

        def floats(*sizes: int) -> NDArray[np.float32]:
            return np.zeros(sizes, dtype=np.float32)

        def made(linear: Linear) -> Rows:
            kind, width, groups = read_by(linear)
            return Rows(np.zeros((team, rows, width), dtype=kind), floats(team, rows), floats(team, rows, groups))

        return Work(
            floats(rows, hidden), floats(rows, hidden), floats(rows, (shape.heads + 2 * shape.kv_heads) * dim),
            floats(rows, shape.heads * dim), floats(rows, inner), floats(rows, inner),
            floats(team, MOST, dim), floats(team, MOST, self._cache.capacity + LINE // 4), floats(team, rows, hidden),
            made(weights.qkv), made(weights.out), made(weights.down), made(weights.screen.linear), floats(team, rows),
        )  # fmt: skip

    def _turned(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Changes state: [2, R, D], from a table by the model's own rule that grows with the longest text.

        In pieces that are always the same: a cosine may depend on its place in the array by a bit.
        """
        last = min(int(positions.max()), self.max_context - 1)
        while last >= (known := self._turns.shape[1]):
            places = torch.arange(known, min(known + TURNS, self.max_context))
            with torch_threads(1):
                both = self.model.model.rotary_emb(torch.zeros(1), places[None])
            self._turns = np.concatenate([self._turns, np.stack([own[0].numpy() for own in both])], axis=1)
        return self._turns.take(positions, axis=1)  # contiguous, as compiled code expects

    def _run(self, blocks: Sequence[Block], needs: Needs, logits: bool) -> list[Scores]:
        hidden = {layer: layer % self._adapter.hidden for layer in needs.hidden}
        places = {own: place for place, own in enumerate(dict.fromkeys(hidden.values()))}
        batch, rows = self._batch(blocks, places), sum(b.rows for b in blocks)
        if rows > len(self._work.x):
            self._work = self._room(1 << (rows - 1).bit_length())
        width = self._weights.embedding.shape[1]
        team = self._team.threads if logits and needs.rounded and len(self._weights.screen.margins) else 0
        outputs = Outputs(np.empty((rows if logits else 0, self.vocab_size), dtype=np.float32),
                          np.empty((len(places), rows, width), dtype=np.float32),
                          np.empty((team, rows), dtype=np.float32), np.empty((team, rows), dtype=np.int64))  # fmt: skip
        self._team.run(step, self._weights, self._shape, self._cache.store, batch, self._work, outputs)
        chosen = outputs.which[outputs.best.argmax(0), np.arange(rows)].tolist() if team else None
        scores, begin = [], 0
        for b in blocks:
            own, begin = slice(begin, begin + b.rows), begin + b.rows
            scores.append(
                Scores(
                    torch.from_numpy(outputs.logits[own]) if logits else None,
                    {layer: torch.from_numpy(outputs.hidden[places[at], own]) for layer, at in hidden.items()},
                    chosen[own] if chosen else None,
                )
            )
        return scores

    def _batch(self, blocks: Sequence[Block], places: dict[int, int]) -> Batch:
        counts, tokens = [b.rows for b in blocks], np.concatenate([b.tokens[b.done :] for b in blocks])
        if tokens.min() < 0 or tokens.max() >= len(self._weights.embedding):  # compiled code would not notice
            raise InputError(f"a token is not one of the model's {len(self._weights.embedding)}")
        sees = np.zeros((sum(counts), max(len(b.tokens) for b in blocks)), dtype=np.bool_)
        begin = 0
        for b in blocks:
            sees[begin : begin + b.rows, : len(b.tokens)] = b.sees
            begin += b.rows
        taken = np.full(self._adapter.hidden, -1, dtype=np.int64)
        for layer, place in places.items():
            taken[layer] = place
        lengths = np.repeat([b.length for b in blocks], counts)
        cos, sin = self._turned(np.concatenate([b.length + b.depths[b.done :] for b in blocks]))
        return Batch(
            tokens, np.repeat([b.slot for b in blocks], counts), lengths,
            np.concatenate([np.arange(b.length + b.done, b.reach) for b in blocks]), sees, cos, sin, taken,
        )  # fmt: skip
