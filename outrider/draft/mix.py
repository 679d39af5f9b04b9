"""Mix: the candidates of several drafters in one tree.

Paper: merged trees after TAPS (arXiv 2603.27027), as a trie. Lossless: parts that draw are allotted their share before
they draw and are never cut; what the others propose are point masses, of which the controller keeps what pays. How much
each part is asked is the controller's to say, too: this file asks, merges and hands on. Cost: the parts' and tens of
microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from outrider.core.proposals import NO_CANDIDATES, Candidates, Proposals, Run, united
from outrider.core.protocols import Advice, Context, Drafter, Noise, Part, Remembers
from outrider.core.records import NO_NEEDS, Budget, Chunk, Needs, Role, StepRecord
from outrider.core.tree import TokenTree, merge, root
from outrider.draft.noise_of_part import NoiseOfPart


@dataclass(slots=True)
class Mix:
    parts: Sequence[Part]  # in the order in which they are asked; those that draw come last
    advice: Advice
    clock: Callable[[], float] = time.perf_counter
    name: str = "mix"
    _contexts: dict[int, Context] = field(default_factory=dict)
    _looked: dict[int, float] = field(default_factory=dict)  # seconds of reading rows since they were last told

    @property
    def drafters(self) -> list[Drafter]:
        return [part.drafter for part in self.parts]

    @property
    def needs(self) -> Needs:
        """What the parts that are awake ask for."""
        needs = NO_NEEDS
        for number, part in enumerate(self.parts):
            if self.advice.awake(number):
                needs |= part.drafter.needs
        return needs

    @property
    def shared_noise(self) -> bool:
        return any(drafter.shared_noise for drafter in self.drafters)

    def begin(self, slot: int, context: Context) -> None:
        self._contexts[slot] = context
        for drafter in self.drafters:
            drafter.begin(slot, context)

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        """A part that is not to draft soon is spared prompts, as one that sleeps is spared the rows of steps."""
        for number, drafter in enumerate(self.drafters):
            if self.advice.reads(number):
                drafter.absorb(chunks)

    def end(self, slot: int) -> None:
        self._contexts.pop(slot, None)
        for drafter in self.drafters:
            drafter.end(slot)

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        found: list[list[tuple[int, TokenTree]]] = [[] for _ in slots]
        merged = [NO_CANDIDATES] * len(slots)
        runs = []
        for number, part in enumerate(self.parts):
            if part.role is Role.DRAWS:
                break
            if part.role is not Role.FREE:
                merged = self._merge(merged, found)
            asked = self.advice.ask(number, slots, merged, budgets)
            begun = self.clock()
            levels = _ask(part.drafter, number, slots, asked, noise, found)
            runs.append(Run(number, levels, self.clock() - begun, self._looked.pop(number, 0.0)))
        trees = self._draw(slots, budgets, noise)
        names = tuple(drafter.name for drafter in self.drafters)
        return Proposals(trees, max((run.levels for run in runs), default=0), self._merge(merged, found), names,
                         tuple(runs))  # fmt: skip

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        for number, part in enumerate(self.parts):
            if part.role is not Role.LOOKS:
                part.drafter.observe(slots, records)
            elif self.advice.awake(number):
                begun = self.clock()
                part.drafter.observe(slots, records)
                self._looked[number] = self._looked.get(number, 0.0) + self.clock() - begun

    def memory(self) -> dict[str, NDArray[Any]]:
        kept: dict[str, NDArray[Any]] = {}
        for drafter in self.drafters:
            if isinstance(drafter, Remembers):
                kept |= {f"{drafter.name}/{name}": array for name, array in drafter.memory().items()}
        return kept

    def remember(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        for drafter in self.drafters:
            prefix = f"{drafter.name}/"
            kept = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
            if kept and isinstance(drafter, Remembers):
                drafter.remember(kept)

    def forget(self) -> None:
        for drafter in self.drafters:
            if isinstance(drafter, Remembers):
                drafter.forget()

    @staticmethod
    def _merge(before: Sequence[Candidates], found: Sequence[Sequence[tuple[int, TokenTree]]]) -> list[Candidates]:
        return [united(trees) if trees else old for trees, old in zip(found, before, strict=True)]

    def _draw(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> list[TokenTree]:
        """The trees of the parts that draw, each within the share it was allotted before."""
        trees = [root(int(self._contexts[slot].tokens[-1])) for slot in slots]
        drawing = [part.drafter for part in self.parts if part.role is Role.DRAWS]
        for number, (drafter, share) in enumerate(zip(drawing, self.advice.shares(), strict=True)):
            allotted = [Budget(int(budget.nodes * share), budget.depth) for budget in budgets]
            able = [i for i, budget in enumerate(allotted) if budget]
            if able:
                apart = [NoiseOfPart(noise[i], number) for i in able]
                made = drafter.propose([slots[i] for i in able], [allotted[i] for i in able], apart)
                for i, tree in zip(able, made, strict=True):
                    trees[i] = merge(trees[i], tree)
        return trees


def _ask(
    drafter: Drafter, number: int, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise],
    found: list[list[tuple[int, TokenTree]]],
) -> int:  # fmt: skip
    """Changes `found`: the drafter's trees, of the slots for which it is asked. The levels that it ran."""
    able = [i for i, budget in enumerate(budgets) if budget]
    if not able:
        return 0
    made = drafter.propose([slots[i] for i in able], [budgets[i] for i in able], [noise[i] for i in able])
    for i, tree in zip(able, made, strict=True):
        if tree.candidates:
            found[i].append((number, tree))
    return made.levels if any(tree.candidates for tree in made) else 0
