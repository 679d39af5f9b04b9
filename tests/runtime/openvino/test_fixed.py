"""Graphs of one shape: made when they have paid, the same to the last bit, and left out where they are not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("openvino", reason="the extra outrider[openvino] is not installed")

from outrider.core.records import NO_NEEDS, Needs
from outrider.core.tree import fixed
from outrider.runtime.openvino import backend as openvino
from outrider.runtime.openvino.convert import BLOCK
from outrider.runtime.openvino.fixed import MAX_GRAPHS, FixedShapes
from outrider.runtime.openvino.request import Request
from outrider.runtime.slots import SlotTarget
from outrider.runtime.targets import eager_target, openvino_target
from tests.runtime import test_architectures as zoo
from tests.runtime.openvino.test_backend import (
    ALL,
    TEXT,
    TREE,
    logits,
    open_slot,
    row_by_row,
    small_llama_graphs,
    widths_that_move_a_bit,
    zoo_graph,
)
from tests.runtime.running import run_trees


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Shapes that steps have run in."""
    used: list[tuple[int, int]] = []
    request = FixedShapes.request
    monkeypatch.setattr(FixedShapes, "request", lambda self, shape: (used.append(shape), request(self, shape))[1])
    return used


@pytest.fixture
def stored(tmp_path: Path) -> Callable[..., SlotTarget]:
    """Of stored graphs, as conversions are: the plugin knows a rotary embedding only in those."""

    def make(model: Any, graph: Any, **limits: Any) -> SlotTarget:
        import openvino as ov

        ov.save_model(graph, path := tmp_path / "graph.xml", compress_to_fp16=False)
        return openvino_target(model, ov.Core().read_model(path), **limits)

    return make


@pytest.fixture
def of(stored: Callable[..., SlotTarget]) -> Callable[..., SlotTarget]:
    """Of the small model."""

    def make(precision: str = "float32", **limits: Any) -> SlotTarget:
        model, graphs = small_llama_graphs()
        limits = {"max_slots": 2, "max_context": 2048} | limits
        return stored(model, graphs[precision], precision=precision, **limits)

    return make


# In the runtime


# Of the quantised forms one in the fast tests: each has graphs of its own to compile.
FEW = [
    p if p == "float32" or "int8" in p.values else pytest.param(*p.values, marks=(*p.marks, pytest.mark.slow))
    for p in ALL
]


@pytest.mark.parametrize("precision", FEW)
def test_steps_of_fixed_shapes_leave_no_other_bit(
    of: Callable[..., SlotTarget], precision: str, made: list[tuple[int, int]]
) -> None:
    target = of(precision)
    plain = {n: row_by_row(target, open_slot(target, TEXT[:n]), TEXT[n - 1 : n + 11])[0] for n in (60, 300)}
    for slot in range(2):
        target.release(slot)
    target.prepare([60, 300, 500], NO_NEEDS)
    for n in (60, 122, 300, 380, 500):
        assert widths_that_move_a_bit(target, n) == []
    assert {rows for rows, _ in made} > {8, 16} and {blocks for _, blocks in made} == {2, 4}
    assert target.backend._fixed._ready and not target.backend._fixed._refused
    for n, row in plain.items():
        slot = open_slot(target, TEXT[:n])
        assert torch.equal(row_by_row(target, slot, TEXT[n - 1 : n])[0], row)
        target.release(slot)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "gemma2", "phi3-window"])
def test_trees_in_fixed_shapes_equal_independent_forwards(
    stored: Callable[..., SlotTarget], name: str, made: list[tuple[int, int]]
) -> None:
    def prepared(model: Any, **limits: Any) -> SlotTarget:
        target = stored(model, zoo_graph(name), **limits)
        target.prepare([200], NO_NEEDS)
        return target

    assert zoo.walk(zoo.build(name), runtime=prepared, batch=1, seed=5, steps=12, chunk=13) < 1e-4
    windowed = name in ("gemma2", "phi3-window")  # their masks have another shape once a window is full
    assert bool(made) != windowed


def test_hidden_states_come_from_fixed_shapes_too(of: Callable[..., SlotTarget], made: list[tuple[int, int]]) -> None:
    target, needs = of(), Needs(hidden=(0, 2, -1))
    want = run_trees(target, [slot := open_slot(target)], [TREE], needs)[0]
    target.prepare([100], NO_NEEDS)
    for _ in range(2):  # the first one is run both ways
        got = run_trees(target, [slot], [TREE], needs)[0]
        assert torch.equal(got.logits, want.logits)
        assert all(torch.equal(got.hidden[layer], want.hidden[layer]) for layer in needs.hidden)
    assert made


def test_steps_prepared_with_hidden_states_are_still_there_when_a_drafter_asks_for_them(
    of: Callable[..., SlotTarget], made: list[tuple[int, int]]
) -> None:
    target, needs = of(), Needs(hidden=(0, 2, -1))
    target.prepare([100], needs)
    compiled = set(target.backend._fixed._ready)
    made.clear()
    for _ in range(2):
        run_trees(target, [open_slot(target)], [TREE], needs)
    assert compiled and set(target.backend._fixed._ready) == compiled and made


def test_batches_and_steps_over_the_end_of_a_block_run_in_the_graph_of_any_shape(
    of: Callable[..., SlotTarget], made: list[tuple[int, int]]
) -> None:
    target = of()
    target.prepare([100], NO_NEEDS)
    slots = [open_slot(target, TEXT[:BLOCK]), open_slot(target)]  # one token is left of the first one's block
    made.clear()
    run_trees(target, slots, [TREE, TREE], Needs())
    logits(target, slots[0])
    assert made == []
    run_trees(target, [slots[1]], [fixed(TREE.tokens[:3], TREE.parents[:3])], Needs())
    made.clear()
    run_trees(target, [slots[1]], [TREE], Needs(), done=[3])
    assert made == []
    logits(target, slots[0], fixed(np.array([4]), np.array([-1])))
    assert set(made) == {(1, 2)}


def test_a_fixed_graph_that_gives_another_bit_is_left_out(
    of: Callable[..., SlotTarget], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Other(Request):
        def __init__(self, graph: Any, settings: Any) -> None:
            super().__init__(graph, settings)
            self.fixed = not graph.is_dynamic()

        def out(self, name: str) -> Any:
            return super().out(name) * np.float32(1 + 1e-6 * (self.fixed and name == "logits"))

    caplog.set_level(logging.INFO, "outrider")
    monkeypatch.setattr(openvino, "Request", Other)
    target = of()
    want = logits(target, slot := open_slot(target))
    target.prepare([100], NO_NEEDS)
    assert torch.equal(logits(target, slot), want) and torch.equal(logits(target, slot), want)
    assert "gives other bits" in caplog.text and target.backend._fixed.find(8, 2) is None


def test_old_caches_are_let_go(of: Callable[..., SlotTarget]) -> None:
    target = of()
    target.prepare([100], NO_NEEDS)
    slot = open_slot(target)
    logits(target, slot)
    target.release(slot)
    logits(target, open_slot(target, TEXT[:300]), fixed(np.array([4]), np.array([-1])))
    assert not target.backend._fixed._ready[8, 2]._held and target.backend._fixed._ready[1, 2]._held


def test_what_was_prepared_has_been_tried_before_the_first_text(
    of: Callable[..., SlotTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = of(max_context=300)
    target.prepare([100, 290], NO_NEEDS)
    assert (
        target.backend._fixed._checked == set(target.backend._fixed._ready)
        and {(1, 2), (16, 2)} <= target.backend._fixed._checked
    )
    assert target.free_slots == target.slots and target.cache_bytes == 0
    monkeypatch.setattr(target.backend, "_compared", lambda *given: pytest.fail("a step of a text was run twice"))
    logits(target, open_slot(target))


def test_a_target_says_how_many_rows_it_runs(of: Callable[..., SlotTarget]) -> None:
    target = of()
    assert (
        target.traits.width == target.backend.width
        and eager_target(target.backend.model, max_slots=1).traits.width is None
    )
    target.prepare([100], NO_NEEDS)
    open_slot(target)
    assert [target.traits.width(rows) for rows in (3, 4, 5, 8, 9, 16, 17)] == [3, 4, 8, 8, 16, 16, 20]


# When they are made


def fake(shape: tuple[int, int]) -> Any:
    return f"graph of {shape}"


def wait(shapes: FixedShapes) -> None:
    for future in list(shapes._coming.values()):
        future.exception()


def test_a_shape_is_compiled_once_it_would_have_paid() -> None:
    shapes = FixedShapes(fake, 2.0, lambda: True)
    for _ in range(9):
        shapes.missed(5, 2, 1.0)
    assert shapes.find(5, 2) is None and not shapes._coming
    shapes.missed(8, 2, 1.1)  # a fifth of ten steps
    wait(shapes)
    assert shapes.find(5, 2) == (8, 2) and shapes.request((8, 2)) == "graph of (8, 2)"
    assert shapes.find(5, 4) is None and shapes.find(9, 2) is None
    assert shapes.find(4, 2) == (8, 2)  # until there is one of its own
    assert shapes.find(3, 2) is None  # which is too far off


def test_a_size_that_runs_in_the_next_one_still_earns_its_own() -> None:
    shapes = FixedShapes(fake, 0.1, lambda: True)
    shapes.make_now((2, 2))
    shapes.missed(1, 2, 1.0)
    wait(shapes)
    assert shapes.find(1, 2) == (1, 2) and shapes.find(2, 2) == (2, 2)
    shapes.missed(2, 2, 1e9)
    assert not shapes._coming  # it has its own already


def test_a_single_row_in_a_wider_graph_is_counted(
    of: Callable[..., SlotTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, seen = of(), []
    target.backend._fixed.make_now((4, 2))
    monkeypatch.setattr(target.backend._fixed, "missed", lambda rows, blocks, seconds: seen.append((rows, blocks)))
    logits(target, open_slot(target), fixed(np.array([4]), np.array([-1])))
    assert seen == [(target.backend._least, 2)]


def test_steps_too_wide_for_any_size_are_not_counted() -> None:
    shapes = FixedShapes(fake, 0.1, lambda: True)
    shapes.missed(17, 2, 1e9)
    assert not shapes._coming and shapes.find(17, 2) is None


def test_without_memory_nothing_is_compiled() -> None:
    shapes = FixedShapes(fake, 0.1, lambda: False)
    shapes.missed(1, 2, 1e9)
    shapes.make_now((8, 2))
    assert not shapes._coming and shapes.find(1, 2) is None and shapes.find(8, 2) is None


def test_what_cannot_be_compiled_is_said_once_and_left(caplog: pytest.LogCaptureFixture) -> None:
    tried = []

    def broken(shape: tuple[int, int]) -> Any:
        tried.append(shape)
        raise RuntimeError("no such kernel")

    shapes = FixedShapes(broken, 0.1, lambda: True)
    for _ in range(3):
        shapes.make_now((1, 2))
        shapes.missed(1, 2, 1e9)
        wait(shapes)
        assert shapes.find(1, 2) is None
    assert tried == [(1, 2)] and caplog.text.count("no such kernel") == 1


def test_the_one_used_longest_ago_makes_room() -> None:
    shapes = FixedShapes(fake, 0.1, lambda: True)
    for blocks in range(MAX_GRAPHS):
        shapes.make_now((1, blocks))
    shapes.request((1, 0))
    shapes.make_now((1, 99))
    assert shapes.find(1, 0) and shapes.find(1, 99) and shapes.find(1, 1) is None
    shapes.missed(1, 1, 0.4)
    assert not shapes._coming  # it has to pay anew
