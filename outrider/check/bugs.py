"""Planted bugs: the classic ways to lose losslessness, each put into the running code for the length of a check.

They answer whether the gate can fail at all. A bug that has nowhere to act in a method says so instead of passing.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from outrider.core.errors import UnknownName, did_you_mean
from outrider.core.noise import StreamNoise, text_hash
from outrider.core.protocols import Noise, Recipe, Target
from outrider.core.records import Needs
from outrider.core.sequence import Running
from outrider.core.tree import QRow
from outrider.runtime.flight import Block
from outrider.runtime.slots import SlotTarget

ALL = "all"


@dataclass(frozen=True, slots=True)
class Bug:
    name: str
    what: str
    parts: tuple[str, ...]  # of the gate that are run against it; at least one must refuse
    place: Callable[[Recipe, Target], tuple[Any, str, Any]]  # the object, its attribute, and what to put there
    cannot_show: Callable[[Recipe], str] = lambda recipe: ""  # why not, for this method; empty: it can

    @contextmanager
    def planted(self, recipe: Recipe, target: Target) -> Iterator[None]:
        owner, name, wrong = self.place(recipe, target)
        inherited, right = name not in vars(owner), getattr(owner, name)
        setattr(owner, name, wrong)
        try:
            yield
        finally:
            if inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, right)


def _rule(recipe: Recipe) -> Any:
    return sys.modules[type(recipe.verifier).__module__]


def _no_residual(recipe: Recipe) -> str:
    if not recipe.verifier.coupled:
        return f"the {recipe.verifier.name} rule never looks at the draws, so it has no residual to get wrong"
    if not hasattr(_rule(recipe), "after_rejection"):
        return f"the {recipe.verifier.name} rule does not use the shared residual arithmetic"
    return ""


def _nothing_taken_away(left: Tensor, mass: float, row: QRow) -> tuple[Tensor, float]:
    return left, float(left.sum())


def _changed_blocks(change: Callable[[Block, int], dict[str, Any]]) -> tuple[Any, str, Any]:
    right = SlotTarget._pass

    def wrong(self: SlotTarget, blocks: Sequence[Block], needs: Needs) -> Any:
        return right(self, [dataclasses.replace(b, **change(b, self.max_context)) for b in blocks], needs)

    return SlotTarget, "_pass", wrong


def _sees_all_before(block: Block, _: int) -> dict[str, Any]:
    return {"sees": np.tri(len(block.tokens), dtype=bool)[block.done :]}


def _by_storage_order(block: Block, context: int) -> dict[str, Any]:
    return {"depths": np.arange(len(block.tokens)).clip(max=context - 1 - block.length)}


def _commits_in_place(target: Target) -> tuple[Any, str, Any]:
    """In whichever runtime: the path has the accepted one's length, but is the nodes stored first."""
    right = type(target).commit

    def wrong(self: Target, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        right(self, slots, [range(1, len(path) + 1) for path in paths])

    return type(target), "commit", wrong


def _first_step_again(running: Running, stream: int) -> StreamNoise:
    return StreamNoise(running.seed, running.sample, stream, text_hash(running.prompt), len(running.prompt))


def _by_step(running: Running, stream: int) -> Noise:
    history = running.history
    return running.make_noise(running.seed, running.sample, stream, running.stats.steps, len(history.tokens))


BUGS = {
    bug.name: bug
    for bug in (
        Bug(
            "wrong-residual", "after a rejection the token is drawn from p, not from what the rejection left of it",
            ("exhaustive", "martingale"),
            lambda recipe, target: (_rule(recipe), "after_rejection", _nothing_taken_away), _no_residual,
        ),
        Bug(
            "leaked-sibling", "a tree node sees every node stored before it, not only its ancestors",
            ("greedy", "seeded"), lambda recipe, target: _changed_blocks(_sees_all_before),
        ),
        Bug(
            "stale-cache", "a commit keeps the rows of rejected nodes in place of the accepted ones",
            ("greedy", "seeded"), lambda recipe, target: _commits_in_place(target),
        ),
        Bug(
            "reused-noise", "every step draws with the random bits of the first one",
            ("seeded", "martingale"), lambda recipe, target: (Running, "noise", _first_step_again),
        ),
        Bug(
            "noise-by-step", "random bits are those of the step's number, which begins anew in every request",
            ("dependent",), lambda recipe, target: (Running, "noise", _by_step),
        ),
        Bug(
            "off-by-one-position", "a tree node's position follows its place in storage, not its depth",
            ("greedy", "seeded"), lambda recipe, target: _changed_blocks(_by_storage_order),
        ),
    )
}  # fmt: skip


def named(name: str) -> list[Bug]:
    """One bug, or all of them."""
    if name == ALL:
        return list(BUGS.values())
    if name not in BUGS:
        hint = did_you_mean(name, BUGS)
        raise UnknownName(f"unknown bug {name!r}; {hint}use one of {', '.join(BUGS)}, or no name for all")
    return [BUGS[name]]
