"""Recorded passes of models with recurrent layers: trees of one size in one launch, instead of a launch an operation.

On a GPU a hybrid's pass is some thousands of small operations, and launching them takes longer than running them. So a
pass over trees of a size is captured once as a CUDA graph, its inputs in tensors of their own, and a commit, too. What
cannot be captured (text, trees that grow level by level, recurrences that run level by level, states to be copied at a
border) runs as before. The same operations in the same order: no result changes but by padding. Elsewhere the same
passes run from traced operations, which is what their tests compare.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from outrider.core.records import Needs, Scores
from outrider.runtime.flight import Block
from outrider.runtime.passes import Pass
from outrider.runtime.recurrent.ancestry import Ancestry, Level
from outrider.runtime.recurrent.states import StateStore

log = logging.getLogger(__name__)
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # of a tree, padded to the next of these
REACH = 256  # rows of the cache that attention reads, padded to this times a power of two
MAX_RECORDINGS = 48  # recordings; passes of sizes beyond these run as before
AFTER = 2  # passes of a size before it is recorded
Record = Callable[[Callable[[], Any]], Callable[[], Any]]  # what runs once -> what runs it again


def recorder(device: torch.device) -> Record | None:
    """CUDA graphs that share their memory; None where there are none."""
    if device.type != "cuda":
        return None
    from outrider.runtime.cuda.step import recorded

    return partial(recorded, device=device, pool=torch.cuda.graph_pool_handle())


class Unrecordable(Exception):
    """What was asked for depends on values that stand on the host."""


class Slots(Protocol):
    """The cache of a hybrid model."""

    states: StateStore
    capacity: int

    def bind_fixed(self, current: FixedPass) -> Any: ...


class Size(NamedTuple):
    batch: int
    rows: int
    reach: int
    hidden: bool


class FixedAncestry(Ancestry):
    """Of trees that are filled in anew for every pass, in tensors that stay where they are."""

    def __init__(self, batch: int, rows: int, device: torch.device) -> None:
        super().__init__(np.broadcast_to(np.eye(rows, dtype=bool), (batch, rows, rows)).copy(), device)
        self.__dict__["sees"] = torch.from_numpy(self.sees_on_host.copy()).to(device)

    def fill(self, sees: NDArray[np.bool_]) -> None:
        """Changes state."""
        self.sees_on_host = sees
        self.sees.copy_(torch.from_numpy(sees))
        places, self._taps = self._taps, {}
        for width, place in places.items():
            place.copy_(self.taps(width))
        self._taps = places

    @property
    def parents(self) -> NDArray[np.int64]:  # type: ignore[override]
        raise Unrecordable

    @property
    def levels(self) -> Sequence[Level]:  # type: ignore[override]
        raise Unrecordable


class FixedLayout:
    """Where the rows of such a pass are; what `StateStore` reads of any."""

    text = extends = False

    def __init__(self, batch: int, rows: int, room: int, device: torch.device) -> None:
        self.batch, self.rows, self.room, self.device = batch, rows, room, device
        self.blocks: Sequence[Block] = ()
        self.slots = torch.zeros(batch, dtype=torch.long, device=device)
        self.places = torch.zeros((batch, rows), dtype=torch.long, device=device)
        self.ancestry = FixedAncestry(batch, rows, device)

    def fill(self, blocks: Sequence[Block], states: StateStore) -> None:
        """Changes state, and what the states know of the rows in flight."""
        self.blocks = blocks
        sees = np.zeros((self.batch, self.rows, self.rows), dtype=bool)
        sees[:, range(self.rows), range(self.rows)] = True  # what pads the others sees itself
        places = np.full((self.batch, self.rows), self.room - 1)  # and is stored where nobody reads
        for i, b in enumerate(blocks):
            sees[i, : b.rows, : b.rows] = b.sees
            places[i, : b.rows] = np.arange(b.rows)
            states.in_flight(b.slot, sees[i, : b.rows, : b.rows])
        self.slots.copy_(torch.tensor([b.slot for b in blocks]))
        self.places.copy_(torch.from_numpy(places))
        self.ancestry.fill(sees)


class FixedPass(Pass):
    """A pass over trees whose inputs are filled in anew, in tensors that stay where they are."""

    fixed = True

    def __init__(self, size: Size, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.batch, self.rows, self.reach = size.batch, size.rows, size.reach
        self.dtype, self.device, self.capacity = dtype, device, capacity
        self.blocks: Sequence[Block] = ()
        self.consecutive, self.slot, self.start, self.attended = False, 0, 0, 0
        self.vectors = []  # side rows are refused for these models
        self._folded: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        inputs = torch.zeros((2, size.batch, size.rows), dtype=torch.long, device=device)
        self.inputs, (self.input_ids, self.positions) = inputs, inputs
        self.mask: Tensor = torch.zeros((size.batch, 1, size.rows, size.reach), dtype=dtype, device=device)
        self._by_row = torch.zeros((size.batch, size.reach), dtype=torch.long, device=device)
        self._owners = torch.zeros((size.batch, 1), dtype=torch.long, device=device)
        self._stored = torch.zeros((size.batch, size.rows), dtype=torch.long, device=device)

    def fill(self, blocks: Sequence[Block]) -> None:
        """Changes state. Padding repeats the pending token and what it sees, and is stored in the bin."""
        self.blocks = blocks
        inputs = np.empty((2, self.batch, self.rows), dtype=np.int64)
        sees = np.zeros((self.batch, 1, self.rows, self.reach), dtype=np.bool_)
        by_row = np.tile(np.arange(self.reach), (self.batch, 1))
        stored = np.full((self.batch, self.rows), self.capacity - 1)
        for i, b in enumerate(blocks):
            inputs[0, i, : b.rows], inputs[0, i, b.rows :] = b.tokens, b.tokens[0]
            inputs[1, i, : b.rows], inputs[1, i, b.rows :] = b.length + b.depths, b.length
            sees[i, 0, :, : b.length] = True
            sees[i, 0, : b.rows, b.length : b.reach] = b.sees
            sees[i, 0, b.rows :, b.length] = True
            by_row[i, b.length : b.reach] = b.length + b.depths
            stored[i, : b.rows] = np.arange(b.length, b.reach)
        self.inputs.copy_(torch.from_numpy(inputs))
        assert self.mask is not None
        self.mask.copy_(torch.from_numpy(np.where(sees, np.float32(0), np.float32(-np.inf))))
        self._by_row.copy_(torch.from_numpy(by_row))
        self._owners.copy_(torch.tensor([[b.slot] for b in blocks]))
        self._stored.copy_(torch.from_numpy(stored))

    def begin(self) -> None:
        """Changes state: nothing that an earlier forward made of the inputs is used again."""
        self._folded.clear()

    @property
    def key_positions(self) -> Tensor:
        return self._by_row

    def places(self, capacity: int, device: torch.device) -> tuple[Tensor, Tensor]:
        return self._owners, self._stored

    def restricted(self, rule: Callable[..., Tensor], size: int | None) -> Tensor | None:
        if rule is causal_mask_function:
            return self.mask
        return super().restricted(rule, None)  # its window, if it has one, is looked at whatever the lengths are


class Step:
    """The passes of one size."""

    def __init__(self, current: FixedPass, layout: FixedLayout) -> None:
        self.current, self.layout = current, layout
        self.replay: Callable[[], Any] | None = None


class RecordedPasses:
    """Runs what it can of a backend's passes and commits; what it cannot it leaves to the backend."""

    def __init__(
        self, forward: Callable[..., Any], cache: Slots, room: int, dtype: torch.dtype, device: torch.device,
        record: Record,
    ) -> None:  # fmt: skip
        """`forward` is the adapter's; at most `room - 1` rows of a slot are in flight."""
        self._forward, self._cache, self._room, self._record = forward, cache, room, record
        self._dtype, self._device = dtype, device
        self._uses: dict[Any, int] = {}
        self._steps: dict[Size, Step] = {}
        self._commits: dict[tuple[int, int], Commit] = {}
        self._given_up = False

    @property
    def sizes(self) -> list[Size]:
        """Of passes that are recorded."""
        return list(self._steps)

    def run(self, blocks: Sequence[Block], needs: Needs) -> list[Scores] | None:
        """Changes state: one pass over trees; None where it is not recorded, and nothing has run."""
        size = self._size(blocks, needs)
        if size is None or not self._due(size, self._steps):
            return None
        step = self._steps.get(size) or self._made(size, blocks)
        if step is None:
            return None
        self._fill(step, blocks)
        out = step.replay() if step.replay is not None else None
        if out is None:
            return None
        logits, hidden = out.logits.clone(), {layer: out.hidden_states[layer].clone() for layer in needs.hidden}
        return [
            Scores(logits[i, : b.rows], {layer: states[i, : b.rows] for layer, states in hidden.items()})
            for i, b in enumerate(blocks)
        ]

    def keep(self, slots: Sequence[int], counts: Sequence[int], paths: NDArray[np.int64]) -> bool:
        """Changes state: states go on by the first `counts` rows of `paths` [B, P]; False: nothing has run."""
        size = (len(slots), 1 << (paths.shape[1] - 1).bit_length())
        if self._given_up or not self._due(size, self._commits):
            return False
        if size not in self._commits:
            made = Commit(*size, self._cache.states, self._device)
            made.fill(slots, [0] * len(slots), np.zeros_like(paths))  # while it is recorded no state goes on
            if (replay := self._recording(made.run)) is None:
                return False
            made.replay, self._commits[size] = replay, made
        commit = self._commits[size]
        commit.fill(slots, counts, paths)
        commit.replay()
        return True

    def _size(self, blocks: Sequence[Block], needs: Needs) -> Size | None:
        if self._given_up or any(b.text or b.done for b in blocks):
            return None
        widest, reach = max(b.rows for b in blocks), max(b.reach for b in blocks)
        rows = next((rows for rows in ROWS if rows >= widest), 0)
        if not rows or rows >= self._room:
            return None
        padded = min(REACH << max(0, (-(-reach // REACH) - 1).bit_length()), self._cache.capacity)
        return Size(len(blocks), rows, padded, bool(needs.hidden))

    def _due(self, size: Any, made: dict[Any, Any]) -> bool:
        """Whether it is recorded, or is to be."""
        self._uses[size] = self._uses.get(size, 0) + 1
        return size in made or (self._uses[size] > AFTER and len(self._steps) + len(self._commits) < MAX_RECORDINGS)

    def _made(self, size: Size, blocks: Sequence[Block]) -> Step | None:
        current = FixedPass(size, self._cache.capacity, self._dtype, self._device)
        step = Step(current, FixedLayout(size.batch, size.rows, self._room, self._device))
        self._fill(step, blocks)
        step.replay = self._recording(partial(self._once, step, size))
        if step.replay is None:
            return None
        self._steps[size] = step
        return step

    def _recording(self, run: Callable[[], Any]) -> Callable[[], Any] | None:
        try:
            return self._record(run)
        except (RuntimeError, Unrecordable) as error:
            log.info("passes of this model are not recorded: %s", error or "its recurrences run level by level")
            self._given_up = True
            return None

    def _once(self, step: Step, size: Size) -> Any:
        step.current.begin()
        cache = self._cache.bind_fixed(step.current)
        self._cache.states.bind_layout(step.layout)
        return self._forward(step.current, cache, logits=size.rows, hidden=size.hidden)

    def _fill(self, step: Step, blocks: Sequence[Block]) -> None:
        step.current.fill(blocks)
        step.layout.fill(blocks, self._cache.states)
        self._cache.bind_fixed(step.current)


class Commit:
    """Replays of the accepted paths of so many slots, up to so long."""

    def __init__(self, batch: int, longest: int, states: StateStore, device: torch.device) -> None:
        self.states, self.longest = states, longest
        self.slots = torch.zeros(batch, dtype=torch.long, device=device)
        self.counts = torch.zeros(batch, dtype=torch.long, device=device)
        self.paths = torch.zeros((batch, longest), dtype=torch.long, device=device)
        self.replay: Callable[[], Any] = self.run

    def fill(self, slots: Sequence[int], counts: Sequence[int], paths: NDArray[np.int64]) -> None:
        """Changes state. Behind a path stands any row of its slot."""
        self.slots.copy_(torch.tensor(slots))
        self.counts.copy_(torch.tensor(counts))
        self.paths.copy_(torch.from_numpy(np.pad(paths, ((0, 0), (0, self.longest - paths.shape[1])))))

    def run(self) -> bool:
        for memory in self.states.memories.values():
            rows, state = memory.rows(self.slots, self.paths, memory.recurrence.kept), memory.state[self.slots]
            memory.state[self.slots] = memory.recurrence.advance(state, rows, self.counts)
        return True
