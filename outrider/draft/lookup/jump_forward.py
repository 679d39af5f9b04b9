"""Jump-forward: drafts what a constraint leaves no choice about, such as a schema's fields, and the text it copies.

After SGLang's jump-forward decoding (arXiv 2312.07104), as candidates instead of text: the target may still cut the
text into other tokens, so nothing changes. Silent where nothing constrains a text. Costs microseconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.core.legality.trim import CLAIM, FORWARD
from outrider.core.proposals import Proposals
from outrider.core.protocols import Context, Noise
from outrider.core.records import Budget, Chunk, Needs, StepRecord
from outrider.core.tree import TokenTree, from_paths


@dataclass(slots=True)
class JumpForward:
    name: str = FORWARD
    needs: Needs = field(default_factory=Needs)
    shared_noise: bool = False
    _contexts: dict[int, Context] = field(default_factory=dict)

    def begin(self, slot: int, context: Context) -> None:
        self._contexts[slot] = context

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        """Reads nothing but the constraint."""

    def end(self, slot: int) -> None:
        self._contexts.pop(slot, None)

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        return Proposals(
            [self._forced(self._contexts[slot], budget) for slot, budget in zip(slots, budgets, strict=True)]
        )

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        """Learns nothing."""

    def _forced(self, context: Context, budget: Budget) -> TokenTree:
        room, paths, ways = budget.nodes, [], context.continuations()
        for left, way in zip(
            range(len(ways), 0, -1), ways, strict=True
        ):  # what one does not use is for those behind it
            paths.append(way[: min(-(-room // left), budget.depth)])
            room -= len(paths[-1])
        tree = from_paths(int(context.tokens[-1]), paths, self.name)
        weights = np.power(CLAIM, tree.depths).astype(np.float64)
        weights[1:] /= max(len(paths), 1)
        return dataclasses.replace(tree, weights=weights)
