"""StateStore: the recurrent states of all slots, and the rows in flight from which accepted paths are replayed.

A state is not overwritten before a verdict: of the rows of a tree what a recurrence needs of them is kept, and `keep`
replays the accepted path from the committed state, all slots at once, without a product with weights. Text advances the
states at the end of its pass, so that a pass that fails leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.runtime.passes import Pass
from outrider.runtime.recurrent.ancestry import Ancestry, chain
from outrider.runtime.recurrent.recurrence import Recurrence
from outrider.runtime.recurrent.snapshots import Place, Snapshots, States

SEGMENT = 64  # rows of text that run at once


@dataclass(slots=True)
class Memory:
    """Of one recurrence of one layer, in all slots."""

    recurrence: Recurrence
    state: Tensor  # [slots, ...], of committed text
    flight: list[Tensor] = field(default_factory=list)  # [slots, rows, ...]: rows since the last commit

    def store(self, rows: Sequence[Tensor], slots: Tensor, places: Tensor, room: int) -> None:
        """Changes state: rows [B, R, ...] are in flight at `places` [B, R]."""
        if not self.flight or self.flight[0].shape[1] < room:
            wider = [row.new_zeros((len(self.state), room, *row.shape[2:])) for row in rows]
            for new, old in zip(wider, self.flight, strict=False):
                new[:, : old.shape[1]] = old
            self.flight = wider
        for kept, row in zip(self.flight, rows, strict=True):
            kept[slots[:, None], places] = row

    def rows(self, slots: Tensor, places: Tensor, count: int | None = None) -> list[Tensor]:
        """[B, n, ...] of rows in flight: of their tensors the first so many, or all."""
        return [kept[slots[:, None], places] for kept in self.flight[:count]]


Replay = Callable[[Sequence[int], Sequence[int], NDArray[np.int64]], bool]  # slots, counts, paths -> whether it ran


class StateStore:
    def __init__(self, slots: int, border: int, room: int = 0) -> None:
        """States may be taken up again every `border` tokens; `room` for so many rows in flight is made at once."""
        self.slots, self.room = slots, room
        self.replay: Replay | None = None  # what a commit is tried with first
        self.memories: dict[Place, Memory] = {}  # made when a layer first runs
        self.lengths = [0] * slots  # of committed text
        self.snapshots = [Snapshots(border) for _ in range(slots)]
        self._sees: dict[int, NDArray[np.bool_]] = {}  # [n, n] of the rows in flight, by slot
        self._layout: Any = None  # a _Layout, or the same in tensors that stay where they are
        self._borders: list[list[int]] = []  # of each block of text in this pass: lengths to copy at
        self._advanced: dict[Place, Tensor] = {}  # by the text of this pass
        self._copied: dict[tuple[int, int], dict[Place, Tensor]] = {}  # likewise, by slot and length

    @property
    def state_bytes(self) -> int:
        """Of one slot."""
        return sum(memory.state.nbytes for memory in self.memories.values()) // self.slots

    @property
    def row_bytes(self) -> int:
        """That a row in flight takes."""
        flights = [kept for memory in self.memories.values() for kept in memory.flight]
        return sum(kept.nbytes // (self.slots * kept.shape[1]) for kept in flights)

    @property
    def bytes(self) -> int:
        """Of states, rows in flight and copies."""
        held = sum(len(snapshots) for snapshots in self.snapshots) * self.state_bytes
        return sum(t.nbytes for memory in self.memories.values() for t in (memory.state, *memory.flight)) + held

    # Passes

    def bind(self, current: Pass) -> None:
        """Changes state: the rows that run next are those of this pass."""
        self._layout = _Layout(current, self._sees)
        self._advanced, self._copied = {}, {}
        if self._layout.text:
            self._borders = [self.snapshots[b.slot].wanted(b.length, b.length + b.rows) for b in current.blocks]

    def bind_layout(self, layout: Any) -> None:
        """Changes state: the rows that run next are those of trees that were laid out elsewhere."""
        self._layout = layout
        self._advanced, self._copied = {}, {}

    def in_flight(self, slot: int, sees: NDArray[np.bool_]) -> None:
        """Changes state: what the rows of a tree see of each other, which has run since the last commit."""
        self._sees[slot] = sees

    def run(self, place: Place, recurrence: Recurrence, rows: Sequence[Tensor]) -> Tensor:
        """Changes state: outputs [B, R, ...] of the rows [B, R, ...] of this pass."""
        layout = self._layout
        assert layout is not None
        if place not in self.memories:
            begin = recurrence.begin(rows)
            self.memories[place] = Memory(recurrence, begin.new_zeros((self.slots, *begin.shape)))
        memory = self.memories[place]
        memory.recurrence = recurrence
        return self._text(place, memory, rows, layout) if layout.text else self._tree(memory, rows, layout)

    def _text(self, place: Place, memory: Memory, rows: Sequence[Tensor], layout: _Layout) -> Tensor:
        """Stretch by stretch; states are copied at the borders on the way."""
        state, outputs = memory.state[layout.slots], []
        for begin in range(0, layout.rows, SEGMENT):
            part = [row[:, begin : begin + SEGMENT] for row in rows]
            count = part[0].shape[1]
            outputs.append(memory.recurrence.outputs(state, part, chain(layout.batch, count, layout.device)))
            for i, block in enumerate(layout.blocks):
                for length in self._borders[i]:
                    if 0 < (upto := length - block.length - begin) <= count:
                        one = [row[i : i + 1] for row in part]
                        copy = self._advance(memory, state[i : i + 1], one, [upto])[0]
                        self._copied.setdefault((block.slot, length), {})[place] = copy
            state = self._advance(memory, state, part, [min(max(b.rows - begin, 0), count) for b in layout.blocks])
        self._advanced[place] = state
        return torch.cat(outputs, 1)

    def _tree(self, memory: Memory, rows: Sequence[Tensor], layout: _Layout) -> Tensor:
        memory.store(rows, layout.slots, layout.places, max(layout.room, self.room))
        if layout.extends:
            rows = memory.rows(layout.slots, layout.all_places)
        outputs = memory.recurrence.outputs(memory.state[layout.slots], rows, layout.ancestry)
        return outputs[layout.line, layout.fresh] if layout.extends else outputs

    def _advance(self, memory: Memory, state: Tensor, rows: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
        behind = torch.tensor(counts, device=state.device)
        return memory.recurrence.advance(state, rows[: memory.recurrence.kept], behind)

    def finish(self) -> None:
        """Changes state: the pass has run; its text is committed."""
        layout = self._layout
        if layout is None or not layout.text:
            return
        for place, state in self._advanced.items():
            self.memories[place].state[layout.slots] = state
        for (slot, length), states in self._copied.items():
            self.snapshots[slot].put(length, states)
        for block in layout.blocks:
            self.lengths[block.slot] = block.length + block.rows
        self._layout = None

    def keep(self, slots: Sequence[int], lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Changes state: the states go on by node 0 and the accepted path of each slot."""
        if not slots:
            return
        counts = [1 + len(path) for path in paths]
        index = np.zeros((len(slots), max(counts)), dtype=np.int64)  # behind its path: any row of its own
        for i, path in enumerate(paths):
            index[i, 1 : counts[i]] = path
        grown = list(zip(slots, lengths, counts, strict=True))
        borders = [self.snapshots[slot].wanted(length, length + count) for slot, length, count in grown]
        if any(borders) or self.replay is None or not self.replay(slots, counts, index):
            self._replay(slots, lengths, counts, index, borders)
        for slot, length, count in grown:
            self.lengths[slot] = length + count
            self._sees.pop(slot, None)

    def _replay(
        self, slots: Sequence[int], lengths: Sequence[int], counts: Sequence[int], index: NDArray[np.int64],
        borders: Sequence[Sequence[int]],
    ) -> None:  # fmt: skip
        """Changes state: the states go on, and are copied at borders on the way."""
        copied: dict[tuple[int, int], dict[Place, Tensor]] = {}
        for place, memory in self.memories.items():
            device = memory.state.device
            which, places = torch.tensor(slots, device=device), torch.from_numpy(index).to(device)
            rows, state = memory.rows(which, places, memory.recurrence.kept), memory.state[which]
            for i, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
                for border in borders[i]:
                    one = [row[i : i + 1] for row in rows]
                    copy = self._advance(memory, state[i : i + 1], one, [border - length])[0]
                    copied.setdefault((slot, border), {})[place] = copy
            memory.state[which] = self._advance(memory, state, rows, counts)
        for (slot, border), states in copied.items():
            self.snapshots[slot].put(border, states)

    # Beginnings of texts

    def last(self, slot: int, length: int) -> int:
        """The longest beginning of at most `length` tokens whose states are there."""
        return self.lengths[slot] if length >= self.lengths[slot] else self.snapshots[slot].last(length)

    def states_at(self, slot: int, length: int) -> States | None:
        """Copies of the states behind so many tokens of a slot, where they are there."""
        if length == self.lengths[slot]:
            return {place: memory.state[slot].clone() for place, memory in self.memories.items()}
        return self.snapshots[slot].get(length)

    def restore(self, slot: int, length: int, states: States | None) -> None:
        """Changes state: a slot holds `length` tokens and these states; None: those of no text."""
        for place, memory in self.memories.items():
            memory.state[slot] = 0 if states is None else states[place]
        self.lengths[slot] = length
        self._sees.pop(slot, None)

    def put(self, slot: int, begin: int, end: int, states: States) -> None:
        """Changes state: a slot that held `begin` tokens holds `end`."""
        self.restore(slot, end, states)
        if end in self.snapshots[slot].wanted(begin, end):
            self.snapshots[slot].put(end, states)

    def copy(self, source: int, target: int, length: int) -> None:
        """Changes state: the first `length` tokens of one slot become those of another; `last` knows that they can."""
        self.restore(target, length, self.states_at(source, length) if length else None)
        self.snapshots[target].update(self.snapshots[source], length)

    def cut(self, slot: int, length: int) -> None:
        """Changes state: back to the states behind so many tokens; `last` knows that they are there."""
        if length != self.lengths[slot]:
            self.restore(slot, length, self.states_at(slot, length) if length else None)
        self.snapshots[slot].cut(length)


class _Layout:
    """Where the rows of one pass are."""

    def __init__(self, current: Pass, sees: dict[int, NDArray[np.bool_]]) -> None:
        """Changes `sees`, which holds the masks of what is in flight."""
        self.blocks, self.device = current.blocks, current.device
        self.batch, self.rows = current.batch, current.rows
        self.text = self.blocks[0].text
        self.slots = torch.tensor([b.slot for b in self.blocks], device=self.device)
        if self.text:
            return
        self.room = max(len(b.tokens) for b in self.blocks)
        self.extends = any(b.done for b in self.blocks)
        whole = np.zeros((self.batch, self.room, self.room), dtype=bool)
        whole[:, range(self.room), range(self.room)] = True  # what pads the others sees itself
        places = np.zeros((self.batch, self.rows), dtype=np.int64)
        fresh = np.zeros((self.batch, self.rows), dtype=np.int64)
        everything = np.zeros((self.batch, self.room), dtype=np.int64)
        for i, b in enumerate(self.blocks):
            count = len(b.tokens)
            if b.done:
                whole[i, : b.done, : b.done] = sees[b.slot][: b.done, : b.done]
            whole[i, b.done : count, :count] = b.sees
            sees[b.slot] = whole[i, :count, :count]
            places[i, : b.rows], places[i, b.rows :] = np.arange(b.done, count), self.room
            fresh[i, : b.rows] = places[i, : b.rows]
            everything[i, :count] = np.arange(count)
        self.ancestry = Ancestry(whole, self.device)
        self.places = torch.from_numpy(places).to(self.device)  # padding: a place behind the others, which nobody reads
        self.fresh = torch.from_numpy(fresh).to(self.device)
        self.all_places = torch.from_numpy(everything).to(self.device)
        self.line = torch.arange(self.batch, device=self.device)[:, None]
        self.room += 1
