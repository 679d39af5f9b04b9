"""The cost curve: measured through the protocol alone, read between its points, stored and trusted only when whole."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from outrider.check.toy import ToyLM, ToyTarget
from outrider.control.cost import CostCurve, measure, stored
from outrider.core.errors import InputError

CURVE = CostCurve((1, 2, 4), (1, 2), (0, 100), (((1.0, 2.0, 3.0), (2.0, 3.0, 4.0)), ((2.0, 4.0, 6.0), (4.0, 6.0, 8.0))))


class Clock:
    """Time passes only in passes over trees, by what the step should cost."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(ToyTarget):
    clock = Clock()

    def run(self, pieces, needs):
        if pieces[0].tree is not None:
            rows = sum(len(piece.tree) for piece in pieces)
            self.clock.now += 1.0 + 0.5 * rows + 0.01 * self.length(pieces[0].slot)
        return super().run(pieces, needs)


def test_measured_points_are_the_targets_times() -> None:
    target = Slow(ToyLM(5), slots=3, max_context=64)
    curve = measure(target, (1, 2, 8), (1, 2), (10, 20), repeats=3, clock=target.clock)
    assert (curve.rows, curve.batches, curve.contexts) == ((1, 2, 8), (1, 2), (10, 20))
    for batch in (1, 2):
        for context in (10, 20):
            for rows in (1, 2, 8):
                want = 1.0 + 0.5 * rows * batch + 0.01 * context
                assert curve.seconds(rows * batch, batch, context) == pytest.approx(want)
    assert target.free_slots == 3


def test_reading_the_curve_between_and_beyond_its_points() -> None:
    assert CURVE.seconds(3) == 2.5 and CURVE.seconds(1, 1, 50) == 1.5
    assert CURVE.seconds(6) == 4.0  # the slope of the last stretch
    assert CURVE.seconds(4, 2) == 4.0 and CURVE.seconds(4, 2, 100) == 6.0
    assert CURVE.seconds(1, 1, 10_000) == 2.0 and CURVE.seconds(8, 8) == CURVE.seconds(2, 2)


def test_a_slow_spell_at_one_size_does_not_make_more_rows_cheaper() -> None:
    curve = CostCurve((1, 2, 4), (1,), (0,), (((1.0, 9.0, 3.0),),))
    times = [curve.seconds(rows) for rows in range(1, 8)]
    assert times == sorted(times)
    assert curve.seconds(2) == 3.0 and curve.seconds(6) == 3.0, "the slow one stands for those beside it"


def test_sizes_that_do_not_fit_are_left_out_and_nothing_left_is_an_error() -> None:
    target = Slow(ToyLM(5), slots=2, max_context=30, max_rows=8)
    curve = measure(target, (1, 4, 8, 16), (1, 2, 4), (10, 500), repeats=1)
    assert curve.rows == (1, 4, 8) and curve.batches == (1, 2) and curve.contexts == (10, 26)  # and a tree of depth 3
    target.acquire(), target.acquire()
    with pytest.raises(InputError, match="no free slot"):
        measure(target)


@pytest.mark.parametrize(("context", "rows"), [(64, 64), (32, 64), (6, 24), (2, 1)])
def test_a_short_context_is_measured_with_what_fits_into_it(context: int, rows: int) -> None:
    target = Slow(ToyLM(5), slots=1, max_context=context)
    curve = measure(target, repeats=1, clock=target.clock)
    assert max(curve.rows) == rows
    assert curve.contexts == (context - 1 - (rows.bit_length() - 1),)
    assert curve.seconds(1) > 0


def test_slots_are_given_back_when_the_target_fails() -> None:
    class Broken(ToyTarget):
        def run(self, *args, **kwargs):
            raise RuntimeError("out of memory")

    target = Broken(ToyLM(5), slots=2)
    with pytest.raises(RuntimeError):
        measure(target, (1,), (2,))
    assert target.free_slots == 2


def test_a_stored_curve_is_read_again_and_belongs_to_one_model_and_runtime(tmp_path) -> None:
    target = ToyTarget(ToyLM(5))
    sizes = {"rows": (1, 2), "contexts": (8,), "repeats": 1, "clock": itertools.count().__next__}
    first = stored(target, "model-a", "eager", tmp_path, **sizes)
    runs = target.forwards
    assert stored(target, "model-a", "eager", tmp_path, **sizes) == first and target.forwards == runs
    stored(target, "model-b", "eager", tmp_path, **sizes)
    stored(target, "model-a", "packed", tmp_path, **sizes)
    assert target.forwards > runs and len(list(tmp_path.iterdir())) == 3
    runs = target.forwards
    stored(target, "model-a", "eager", tmp_path, fresh=True, **sizes)
    assert target.forwards > runs and len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"curve": {}}', "cut", "other"])
def test_a_damaged_file_is_measured_again(tmp_path, damage: str) -> None:
    target = ToyTarget(ToyLM(5))
    sizes = {"rows": (1, 2), "contexts": (8,), "repeats": 1, "clock": itertools.count().__next__}
    stored(target, "model-a", "eager", tmp_path, **sizes)
    (path,) = tmp_path.iterdir()
    kept = json.loads(path.read_text())
    if damage == "cut":
        kept["curve"]["table"][0][0].pop()
    elif damage == "other":
        kept["identity"]["model"] = "model-z"
    path.write_text(json.dumps(kept) if damage in {"cut", "other"} else damage)
    runs = target.forwards
    stored(target, "model-a", "eager", tmp_path, **sizes)
    assert target.forwards > runs
    assert json.loads(path.read_text())["identity"]["model"] == "model-a"


def test_a_folder_that_cannot_be_written_only_costs_the_storing(tmp_path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    curve = stored(ToyTarget(ToyLM(5)), "m", "eager", blocked, rows=(1,), contexts=(8,), repeats=1)
    assert curve.rows == (1,)


def test_other_work_beside_some_passes_is_left_out_and_a_curve_that_falls_was_disturbed() -> None:
    class Disturbed(Slow):
        passes, every = 0, 5  # some passes of each size

        def run(self, pieces, needs):
            if pieces[0].tree is not None:
                self.passes += 1
                if self.passes % self.every == 0:
                    self.clock.now += 100.0
            return super().run(pieces, needs)

    target = Disturbed(ToyLM(5), slots=3, max_context=64)
    calm = measure(target, (1, 2, 8), (1,), (10,), repeats=5, clock=target.clock)
    assert [calm.seconds(rows) for rows in (1, 2, 8)] == pytest.approx([1.6, 2.1, 5.1]) and not calm.disturbed
    assert CostCurve((1, 2, 4), (1,), (0,), (((1.0, 9.0, 3.0),),)).disturbed
    assert not CostCurve((1, 2, 4), (1,), (0,), (((1.0, 0.9, 1.1),),)).disturbed


def test_a_disturbed_curve_is_used_but_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curves = iter([CostCurve((1, 2), (1,), (0,), (((9.0, 1.0),),)), CURVE])
    monkeypatch.setattr("outrider.control.cost.measure", lambda *_: next(curves))
    target = ToyTarget(ToyLM(5), slots=1, max_context=16)
    assert stored(target, "model", "toy", tmp_path).disturbed and not list(tmp_path.iterdir())
    assert stored(target, "model", "toy", tmp_path) == CURVE and len(list(tmp_path.iterdir())) == 1
