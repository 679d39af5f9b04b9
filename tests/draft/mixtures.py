"""Mixtures with their controller, driven step by step as the engine does, and drafters that say what they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from outrider.check.exhaustive import _Text
from outrider.control.goodput import Goodput
from outrider.core.proposals import Proposals
from outrider.core.protocols import Context, Drafter, Noise, Part
from outrider.core.records import Budget, Chunk, Load, Needs, Role, Scores, StepRecord, StepTiming, Verdict
from outrider.core.tree import TokenTree, from_paths
from outrider.draft.mix import Mix

Paths = list[tuple[int, ...]]
PENDING = 1
paths_of = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=6)


@dataclass(slots=True)
class Says:
    """Proposes the paths it is told, all equally sure."""

    paths: Callable[[], Paths]
    sure: float = 0.5
    name: str = "says"
    needs: Needs = field(default_factory=Needs)
    shared_noise: bool = False

    def begin(self, slot: int, context: Context) -> None: ...
    def absorb(self, chunks: Sequence[Chunk]) -> None: ...
    def end(self, slot: int) -> None: ...
    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None: ...

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        return Proposals([weighted(self.paths(), self.sure) for _ in slots])


def weighted(paths: Paths, sure: float = 0.5) -> TokenTree:
    tree = from_paths(PENDING, paths)
    return TokenTree(tree.tokens, tree.parents, tree.draws, tree.origins, sure ** tree.depths.astype(float))


def prefixes(paths: Iterable[Sequence[int]]) -> set[tuple[int, ...]]:
    return {tuple(path[:n]) for path in paths for n in range(1, len(path) + 1)}


def spelled(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.path_tokens(node)) for node in range(1, len(tree))}


@dataclass(slots=True)
class Mixture:
    """A mixture and its controller, driven as the engine does."""

    mix: Mix
    control: Goodput

    def trees(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise | None]) -> list[TokenTree]:
        made = self.mix.propose(slots, budgets, noise)  # type: ignore[arg-type]
        return self.control.size(slots, made, budgets, Load(len(slots)), 0.0)

    def step(self, emitted: Sequence[int], budget: Budget = Budget(16, 4)) -> TokenTree:
        """One step whose text goes on with `emitted`."""
        (tree,) = self.trees([0], [budget], [None])
        path, node = [], 0
        for token in emitted[:-1]:
            node = tree.child(node, token)
            if node < 0:
                break
            path.append(node)
        record = StepRecord(tree, Verdict(tuple(path), emitted[-1]), tuple(emitted), Scores(None))
        self.mix.observe([0], [record])
        self.control.observe([0], [record], StepTiming(0.0, 1.0, 0.0, len(tree), 1))
        return tree


@dataclass(slots=True)
class Curve:
    """Costs as they are told, whatever steps take."""

    of: Callable[[int, int], np.ndarray]

    def seconds(self, batch: int, most: int, context: int = 0) -> np.ndarray:
        return self.of(batch, most)


def joined(parts: Sequence[tuple[Drafter, Role]], seconds=None, clock=lambda: 0.0, **options) -> Mixture:
    control = Goodput(
        Budget(64, 16), [role for _, role in parts], None if seconds is None else Curve(seconds), **options
    )
    return Mixture(Mix([Part(*part) for part in parts], control, clock), control)


def mix_of(*says: Says, slots: int = 1, last: Role = Role.FREE, **options) -> Mixture:
    """The last one with a role of its own."""
    roles = [*[Role.FREE] * (len(says) - 1), last]
    mixture = joined(list(zip(says, roles, strict=True)), **options)
    for slot in range(slots):
        mixture.mix.begin(slot, _Text(np.array([0, PENDING])))
    return mixture


def flat(batch: int, most: int) -> np.ndarray:
    return np.ones(most + 1)
