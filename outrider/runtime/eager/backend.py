"""EagerBackend: runs any causal language model that transformers loads, layer by layer, without editing its code.

The model and its configuration stay the caller's: our attention is switched on for the duration of a forward and off
again, so the caller's own `generate` works before and after (not during, from another thread). Exact: a row's logits
are those of an independent forward over its own path, up to floating-point summation order. Cost: one forward a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast

from outrider.core.protocols import Target
from outrider.core.records import Needs, Scores, Traits
from outrider.runtime.backend import Bounds
from outrider.runtime.blocks.allocator import Allocator
from outrider.runtime.blocks.kept import KeptTexts
from outrider.runtime.blocks.stretches import StretchSlots
from outrider.runtime.eager.adapter import Adapter
from outrider.runtime.eager.cache import SlotCache
from outrider.runtime.eager.hybrid import HybridSlots
from outrider.runtime.passes import Block, Pass
from outrider.runtime.recurrent.mixers import Mixers
from outrider.runtime.recurrent.recorded import Record, RecordedPasses
from outrider.runtime.recurrent.snapshots import PER_TEXT
from outrider.runtime.recurrent.states import StateStore
from outrider.runtime.selftest import self_check
from outrider.runtime.support import TESTED, context_limit, is_quantised, refuse_unsupported
from outrider.runtime.thresholds import moved_near
from outrider.runtime.weights import check_same

COPIED = 64  # positions in a copy of finished text; a state is copied at the end of such a stretch, or nowhere

COPIES = 1 << 16  # most of them: what holds more is a toy, of whose cache the bytes say little


class EagerBackend:
    max_rows = prompt_rows = None
    block_size, reserves = 1, True
    traits = Traits("eager", mixes=True, side_rows=True)
    cache: SlotCache | HybridSlots

    def __init__(self, model: Any, record: Record | None = None) -> None:
        """`record` makes recordings of passes of a model with recurrent layers; None: none are made."""
        self._record, self.recorded = record, cast("RecordedPasses | None", None)
        mixers = Mixers(model) or None
        refuse_unsupported(model, states=mixers is not None)
        self.model, self.adapter = model, Adapter(model, mixers)
        self.device, self.vocab_size = self.adapter.device, self.adapter.vocab_size
        self.token_bytes = sum(shape.bytes for shape in self.adapter.shapes.values())
        if self.adapter.mixers is not None:
            self.traits = replace(self.traits, mixes=False, side_rows=False)  # states follow paths of candidates
        if experts := self.adapter.experts:
            self.traits = replace(self.traits, experts=experts.total, active_experts=experts.last)

    def slot_bytes(self, rows: int) -> int:
        states = self.adapter.states
        return (1 + PER_TEXT) * states.state_bytes + rows * states.row_bytes

    def positions(self) -> tuple[int, str]:
        limit, reason = context_limit(self.model.config)
        if self.adapter.positions is not None and self.adapter.positions < limit:
            return self.adapter.positions, "the model's table of positions ends there"
        return limit, reason

    def thresholds_near(self, context: int) -> AbstractContextManager[list[str]]:
        return moved_near(self.model, context)

    def allocate(self, bounds: Bounds) -> tuple[SlotCache | HybridSlots, Allocator]:
        shapes, states = self.adapter.shapes, self.adapter.states
        rows = SlotCache([*shapes.values()], bounds.slots, bounds.capacity)
        tokens = bounds.slots * rows.capacity
        left = max(0, bounds.bytes - tokens * self.token_bytes - bounds.slots * self.slot_bytes(bounds.rows))
        kept = KeptTexts(min(COPIES, left // max(1, COPIED * self.token_bytes + states.state_bytes)), COPIED)
        if self.adapter.mixers is None:
            self.cache = rows
            return rows, StretchSlots(rows, bounds.slots, tokens, kept)
        layers = {layer: place for place, layer in enumerate(shapes)}
        room = bounds.rows + 1
        hybrid = self.cache = HybridSlots(rows, layers, StateStore(bounds.slots, COPIED, room))
        if record := self._record:
            adapter = self.adapter
            self.recorded = RecordedPasses(adapter, hybrid, room, adapter.dtype, self.device, record)
            hybrid.states.replay = self.recorded.keep
        return hybrid, StretchSlots(hybrid, bounds.slots, tokens, kept, hybrid)

    def check(self, target: Target, self_test: bool | None) -> None:
        states = self.adapter.mixers is not None  # found by names, which another version of transformers may change
        tested = self.adapter.model_type in TESTED and not states and not is_quantised(self.model)
        if self_test or (self_test is None and not tested):
            self_check(self, target)

    def refresh(self, model: Any) -> None:
        check_same(model, self.model)
        self.adapter.repack()

    def prepare(self, contexts: Sequence[int], needs: Needs) -> None:
        """Nothing is made beforehand."""

    def run(self, blocks: Sequence[Block], needs: Needs) -> list[Scores]:
        if not _mostly_padding(blocks):
            return self._forward(blocks, needs)
        scores: dict[int, Scores] = {}
        for text in (True, False):
            part = [b for b in blocks if b.text == text]
            scores |= {b.slot: s for b, s in zip(part, self._forward(part, needs), strict=True)}
        return [scores[b.slot] for b in blocks]

    def _forward(self, blocks: Sequence[Block], needs: Needs) -> list[Scores]:
        if self.recorded is not None and (scores := self.recorded.run(blocks, needs)) is not None:
            return scores
        current = Pass(blocks, self.adapter.dtype, self.device)
        scored = max((b.rows for b in blocks if b.scored(needs)), default=0)
        out = self.adapter(current, self.cache.bind(current), logits=scored, hidden=bool(needs.hidden))
        self.cache.finish()
        return [
            Scores(
                out.logits[i, : b.rows] if b.scored(needs) else None,
                {layer: out.hidden_states[layer][i, : b.rows] for layer in needs.hidden},
            )
            for i, b in enumerate(blocks)
        ]


def _mostly_padding(blocks: Sequence[Block]) -> bool:
    """Whether text and trees differ so much in width that two forwards cost less than one of equal rows."""
    if len({b.text for b in blocks}) < 2:
        return False
    return max(b.rows for b in blocks) * len(blocks) > 2 * sum(b.rows for b in blocks)
