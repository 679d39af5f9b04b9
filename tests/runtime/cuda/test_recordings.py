"""In which recorded size a pass runs, what is recorded when, and what a later start knows of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.records import NO_NEEDS, Needs, Piece
from outrider.core.tree import fixed
from outrider.runtime.cuda.packing import ROWS, Bucket, cover, smallest
from outrider.runtime.cuda.sizes import kept as kept_sizes
from outrider.runtime.cuda.sizes.recordings import SHARE, WORTH, Recordings, Size
from outrider.runtime.slots import SlotTarget
from outrider.runtime.targets import cuda_target
from tests.runtime.cuda import test_packing
from tests.runtime.cuda.test_backend import GPU, placed
from tests.runtime.cuda.test_packing import block_of, mixed

HIDDEN = Needs(hidden=(1,))


@dataclass
class Pass:
    size: Size
    uses: int = 0
    tried: bool = False
    graph: bool = False


@dataclass
class Chip:
    """Records in so many seconds."""

    seconds: float = 1.0
    now: float = 0.0
    recorded: list[Bucket] = field(default_factory=list)

    def record(self, step: Pass) -> None:
        self.now += self.seconds
        step.tried = step.graph = True
        self.recorded.append(step.size.bucket)

    def recordings(self, known: Any = None) -> Recordings[Pass]:
        return Recordings(Pass, self.record, known=known, clock=lambda: self.now)


def size(sequences: int, rows: int, scored: int | None = None) -> Size:
    return Size(Bucket(sequences, rows, scored or rows))


@settings(deadline=None, derandomize=True)
@given(
    slots=st.integers(1, 64),
    trees=st.lists(st.integers(1, 64), min_size=1, max_size=64),
    text=st.sampled_from([0, 1, 30, 300, 512]),
)
def test_the_cover_holds_every_pass_of_its_slots(slots: int, trees: list[int], text: int) -> None:
    blocks = [block_of(i, rows, False) for i, rows in enumerate(trees[: slots - (text > 0)])]
    blocks += [block_of(64, text, True)] * (text > 0)
    if not blocks or sum(b.rows for b in blocks) > ROWS[-1]:
        return
    sizes, wanted = cover(slots, 64, 512), smallest(blocks, NO_NEEDS)
    assert any(one.holds(wanted) for one in sizes)
    assert len(sizes) == len(set(sizes)) <= 40


def test_plain_steps_are_recorded_before_wide_ones() -> None:
    first = cover(64, 64, 512)[:4]
    assert [(one.sequences, one.rows) for one in first] == [(1, 1), (4, 4), (16, 16), (64, 64)]


def test_what_is_not_recorded_runs_in_the_next_larger_size_and_without_one_as_it_is() -> None:
    chip = Chip()
    recordings = chip.recordings()
    recordings.first([size(4, 64), size(4, 128), size(16, 256)])
    assert recordings.find(size(2, 24)) == size(4, 64)
    assert recordings.find(size(4, 96)) == size(4, 128)
    assert recordings.find(size(4, 96, 64)) == size(4, 128)  # all rows have logits there
    assert recordings.find(size(4, 192)) == size(16, 256)
    assert recordings.find(size(32, 64)) == size(32, 64)  # nothing holds so many sequences
    assert recordings.find(Size(Bucket(4, 64, 64), (1,))) == Size(Bucket(4, 64, 64), (1,))  # nor says that
    assert len(chip.recorded) == 3


def test_a_recording_that_says_more_will_do() -> None:
    recordings = Chip().recordings()
    recordings.first([Size(Bucket(1, 8, 8), (1, 2), 4)])
    assert recordings.find(Size(Bucket(1, 8, 8), (2,))) == Size(Bucket(1, 8, 8), (1, 2), 4)


def test_what_nothing_holds_is_recorded_when_it_is_met_again() -> None:
    chip = Chip()
    recordings = chip.recordings()
    recordings.at(recordings.find(size(8, 96))).uses += 1
    assert not chip.recorded
    assert recordings.find(size(8, 96)) == size(8, 96) and chip.recorded == [Bucket(8, 96, 96)]


def test_between_steps_recording_takes_its_share_and_what_is_wanted_most_comes_first() -> None:
    chip = Chip()
    recordings = chip.recordings()
    recordings.first([size(4, 64), size(4, 128)], None)
    for uses, wanted in ((WORTH, size(4, 96)), (2 * WORTH, size(4, 48)), (3 * WORTH, size(3, 64)), (2, size(4, 80))):
        for _ in range(uses):
            recordings.find(wanted)
    begun, kept = chip.now, len(chip.recorded)
    for _ in range(600):
        recordings.spare()
        chip.now += 0.1
        assert len(chip.recorded) - kept <= SHARE * (chip.now - begun) / chip.seconds
    assert chip.recorded[kept:] == [Bucket(4, 48, 48), Bucket(4, 96, 96)]  # those that have fewer rows than before
    assert recordings.find(size(4, 96)) == size(4, 96)


def test_where_nobody_waits_there_is_no_share() -> None:
    chip = Chip()
    recordings = chip.recordings()
    recordings.first([size(1, 2**i) for i in range(5)], seconds=2.5)
    assert len(chip.recorded) == 3
    while recordings.spare(idle=True):
        pass
    assert len(chip.recorded) == 5


def test_a_later_start_records_first_what_was_wanted_most(tmp_path: Path) -> None:
    path = tmp_path / "passes" / "one.json"
    assert kept_sizes.read(path) == {}
    wanted = {size(4, 96): 4 * WORTH, size(16, 256, 64): 8 * WORTH, Size(Bucket(1, 8, 8), (1, 2), 4): 3}
    kept_sizes.write(path, wanted)
    known = kept_sizes.read(path)
    assert known == {one: uses // 2 for one, uses in wanted.items()}
    chip = Chip()
    chip.recordings(known).first([size(4, 4)], seconds=1.5)
    assert chip.recorded == [Bucket(16, 256, 64), Bucket(4, 96, 96)]
    path.write_text('[{"sequences": 3, "rows": 7, "scored": 9, "hidden": [], "top": 0, "uses": 1}]')
    assert kept_sizes.read(path) == {}


def prepared(model: Any, **limits: Any) -> SlotTarget:
    """Every size that is recorded beforehand counts as recorded; the passes run as they are."""
    target = cuda_target(model, warm_up=False, **limits)
    backend: Any = target.backend

    def record(step: Any) -> None:
        step.tried = step.graph = True

    if not GPU:
        backend.recordings._record = record
    target.prepare((1,), HIDDEN)
    return target


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_passes_in_larger_sizes_equal_the_eager_runtime(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(test_packing, "runtime", lambda *a, **b: made.append(prepared(*a, **b)) or made[-1])
    assert mixed(placed(name), seed=7, steps=14) < 1e-4
    recordings = made[0].backend.recordings
    ran = [size for size, step in recordings.steps.items() if step.uses > 1]  # one is run by the check
    assert all(recordings.steps[one].graph for one in ran)
    assert len([one for one in recordings.wanted if one not in recordings.steps]) >= 4  # and they are larger


def test_no_step_behind_prepare_waits_for_a_recording() -> None:
    """Of one to six sequences, with trees of several sizes."""
    target = prepared(placed("llama"), max_slots=6, max_rows=16)
    recordings: Any = target.backend.recordings  # type: ignore[attr-defined]
    slots = [target.acquire() for _ in range(6)]
    target.run([Piece(slot, [1, 2, 3]) for slot in slots], HIDDEN)
    known = set(recordings.steps)
    for count in range(1, 7):
        for rows in (1, 2, 5, 16):
            tree = fixed(np.arange(rows), np.arange(rows) - 1)
            target.run([Piece(slot, tree=tree) for slot in slots[:count]], HIDDEN)
            target.commit(slots[:count], [[] for _ in range(count)])
    assert set(recordings.steps) == known
