"""Recorded passes of hybrids: the same scores and states as passes that are not recorded, whatever is filled in.

A graph holds operations and the places of tensors, and nothing of what Python decided meanwhile. Without a GPU the
operations are noted by torch's tracer, and run again in the same way.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from outrider.core.records import NO_NEEDS, Needs
from outrider.core.tree import TokenTree, fixed
from outrider.runtime.eager.backend import EagerBackend
from outrider.runtime.recurrent.recorded import AFTER, FixedAncestry, FixedLayout, FixedPass, Size
from outrider.runtime.slots import SlotTarget
from outrider.runtime.targets import eager_target
from tests.runtime.recurrent.families import FAMILIES, build
from tests.runtime.running import run_text, run_trees
from tests.runtime.test_architectures import walk

LEVEL_BY_LEVEL = {"mamba", "falcon-mamba", "jamba", "zamba", "recurrent-gemma", "rwkv"}
ONE_PASS = [name for name in FAMILIES if name not in LEVEL_BY_LEVEL]


def traced(run: Callable[[], Any]) -> Callable[[], Any]:
    """Runs what was noted of it, after a first run as there is before a capture."""
    run()

    def tensors() -> Any:
        out = run()
        return [out.logits, list(out.hidden_states or ())] if hasattr(out, "logits") else []

    graph = make_fx(tensors)()

    def again() -> Any:
        found = graph()
        return SimpleNamespace(logits=found[0], hidden_states=found[1]) if found else True

    return again


def tree(tokens: list[int], parents: list[int]) -> TokenTree:
    return fixed(np.array(tokens), np.array(parents))


def made(model: Any, record: Any = traced, **limits: Any) -> SlotTarget:
    return SlotTarget(EagerBackend(model, record), **{"self_test": False} | limits)


SOME = [name if name == "falcon-h1" else pytest.param(name, marks=pytest.mark.slow) for name in ONE_PASS]


@pytest.mark.parametrize("name", SOME)
def test_recorded_walks_equal_independent_forwards(name: str) -> None:
    targets = []

    def runtime(model: Any, **limits: Any) -> SlotTarget:
        targets.append(made(model, **limits))
        return targets[-1]

    assert walk(build(name), batch=2, seed=5, steps=8, chunk=16, runtime=runtime) < 1e-4
    assert targets[0].backend.recorded.sizes, "nothing was recorded"


@pytest.mark.parametrize("name", sorted(LEVEL_BY_LEVEL))
@pytest.mark.slow
def test_what_runs_level_by_level_is_not_recorded_and_runs_as_before(name: str) -> None:
    assert walk(build(name), batch=1, seed=5, steps=6, chunk=16, runtime=made) < 1e-4
    target = made(build(name), max_slots=1, max_rows=8)
    slot = target.acquire()
    run_text(target, [slot], [[3, 1, 4]])
    for _ in range(AFTER + 2):
        run_trees(target, [slot], [tree([5, 6, 7], [-1, 0, 0])])
        target.commit([slot], [[1]])
    assert not target.backend.recorded.sizes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", FAMILIES)
def test_cuda_graphs_of_passes_equal_independent_forwards(name: str) -> None:
    model, targets = copy.deepcopy(build(name)).cuda(), []

    def runtime(model: Any, **limits: Any) -> SlotTarget:
        targets.append(eager_target(model, recorded=True, self_test=False, **limits))
        return targets[-1]

    assert walk(model, batch=1, seed=5, steps=16, chunk=16, runtime=runtime) < 1e-4
    assert walk(model, batch=3, seed=6, steps=16, chunk=16, runtime=runtime) < 1e-4
    assert all(bool(target.backend.recorded.sizes) == (name in ONE_PASS) for target in targets)


def test_hidden_states_come_from_recorded_passes_too() -> None:
    model, needs = build("falcon-h1"), Needs(hidden=(1, -1))
    recorded, plain = made(model, max_slots=1, max_rows=8), made(model, lambda run: None, max_slots=1, max_rows=8)
    for target in (recorded, plain):
        slot = target.acquire()
        run_text(target, [slot], [[3, 1, 4, 1, 5]])
    for step in range(AFTER + 3):
        drafted = tree([5 + step, 6, 7, 8], [-1, 0, 0, 2])
        one, other = (run_trees(target, [0], [drafted], needs)[0] for target in (recorded, plain))
        assert torch.allclose(one.logits, other.logits, atol=1e-4)
        for layer in needs.hidden:
            assert torch.allclose(one.hidden[layer], other.hidden[layer], atol=1e-4)
        for target in (recorded, plain):
            target.commit([0], [[2, 3]])
    assert recorded.backend.recorded.sizes


# Planted bugs


def stale_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    right = FixedPass.fill

    def fill(self: FixedPass, blocks: Any) -> None:
        mask = self.mask.clone() if self.blocks else None
        right(self, blocks)
        if mask is not None:
            self.mask.copy_(mask)

    monkeypatch.setattr(FixedPass, "fill", fill)


def stale_ancestry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FixedAncestry, "fill", lambda self, sees: None)


def stale_taps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FixedAncestry, "fill", lambda self, sees: self.sees.copy_(torch.from_numpy(sees)))


def rows_of_another_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    right = FixedLayout.fill

    def fill(self: FixedLayout, blocks: Any, states: Any) -> None:
        right(self, blocks, states)
        self.slots.copy_(self.slots.flip(0))

    monkeypatch.setattr(FixedLayout, "fill", fill)


@pytest.mark.slow
@pytest.mark.parametrize("bug", [stale_mask, stale_ancestry, stale_taps, rows_of_another_slot])
def test_a_planted_bug_shows(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    assert walk(build("falcon-h1"), batch=2, seed=5, steps=12, chunk=16, runtime=made) > 1e-3


def test_sizes_are_few() -> None:
    target = made(build("lfm2"), lambda run: run, max_slots=2, max_rows=8)
    passes = target.backend.recorded
    slot = target.acquire()
    run_text(target, [slot], [[3, 1, 4]])
    for nodes in (5, 6, 7, 8, 5, 6):
        run_trees(target, [slot], [tree([1] * nodes, [-1] + [0] * (nodes - 1))], NO_NEEDS)
        target.commit([slot], [[]])
    assert passes.sizes == [Size(1, 8, min(256, target.backend.cache.capacity), False)]
