"""Every family with recurrent layers: random trees equal independent forwards of the unmodified model over their paths.

With random acceptance over many commits, prompts in pieces, one sequence and a ragged batch; and planted bugs show.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.core.tree import fixed
from outrider.runtime.recurrent.ancestry import Ancestry, chain
from outrider.runtime.recurrent.states import StateStore
from tests.runtime.recurrent.families import FAMILIES, build, unchecked, walked
from tests.runtime.running import run_text, run_trees

CAUGHT = 1e-3  # a bug shows by at least this


@pytest.mark.parametrize("name", FAMILIES)
def test_trees_equal_independent_forwards(name: str) -> None:
    assert walked(name, batch=5, seed=1) < 1e-4
    assert walked(name, batch=1, seed=2, chunk=64) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("seed", [0, 4])
def test_many_walks_equal_independent_forwards(name: str, seed: int) -> None:
    assert walked(name, batch=1 + seed, seed=10 + seed, steps=40, chunk=1 + 7 * seed) < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_siblings_have_no_influence(name: str) -> None:
    """Other tokens beside a path change nothing on it, in the pass and after the commit: not a bit.

    Experts multiply rows in groups, whose sizes change how torch rounds.
    """
    target = unchecked(build(name), max_slots=2)
    allowed = 1e-5 if any("expert" in part for part, _ in build(name).named_modules()) else 0.0
    parents, tokens = np.array([-1, 0, 0, 1, 2, 1, 3]), np.array([5, 6, 7, 8, 9, 10, 11])
    others = tokens.copy()
    others[[2, 4, 5]] = 50, 51, 52
    path, found = [1, 3, 6], []
    for row in (tokens, others):
        slot = target.acquire()
        run_text(target, [slot], [[3, 1, 4, 1, 5]])
        (scores,) = run_trees(target, [slot], [fixed(row, parents)])
        assert scores.logits is not None
        target.commit([slot], [path])
        (after,) = run_trees(target, [slot], [fixed(np.array([12, 13]), np.array([-1, 0]))])
        assert after.logits is not None
        found.append((scores.logits[[0, *path]].clone(), after.logits.clone()))
        target.release(slot)
    for one, other in zip(*found, strict=True):
        assert float((one - other).abs().max()) <= allowed


# Planted bugs


def wrong_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row goes on from the row before it, whoever is its parent."""
    right = Ancestry.__init__

    def straight(self: Ancestry, sees: Any, device: torch.device) -> None:
        right(self, np.broadcast_to(np.tri(sees.shape[1], dtype=bool), sees.shape), device)

    monkeypatch.setattr(Ancestry, "__init__", straight)


def convolution_across_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Ancestry.taps

    def taps(self: Ancestry, width: int) -> Tensor:
        return right(chain(self.batch, self.rows, self.device), width)

    monkeypatch.setattr(Ancestry, "taps", taps)


def replay_one_short(monkeypatch: pytest.MonkeyPatch) -> None:
    right = StateStore.keep
    monkeypatch.setattr(StateStore, "keep", lambda self, s, n, paths: right(self, s, n, [p[:-1] for p in paths]))


def state_overwritten_before_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row of a tree leaves its state behind, and the accepted path comes on top."""
    right = StateStore._tree

    def tree(self: StateStore, memory: Any, rows: Any, layout: Any) -> Tensor:
        out = right(self, memory, rows, layout)
        counts = [len(b.tokens) for b in layout.blocks]
        memory.state[layout.slots] = self._advance(memory, memory.state[layout.slots], rows, counts)
        return out

    monkeypatch.setattr(StateStore, "_tree", tree)


BUGS = [wrong_parent, replay_one_short, state_overwritten_before_the_verdict, convolution_across_siblings]
WITHOUT_CONVOLUTION = {"minimax"}
OF_EACH_KIND = ["mamba2", "lfm2", "qwen3-next", "mamba", "minimax", "recurrent-gemma", "kimi-linear", "falcon-h1"]
SOME = [name if name in OF_EACH_KIND else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_shows(name: str, bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug is convolution_across_siblings and name in WITHOUT_CONVOLUTION:
        pytest.skip("it has no convolution")
    bug(monkeypatch)
    assert walked(name, batch=2, seed=3, steps=4, enough=CAUGHT) > CAUGHT
