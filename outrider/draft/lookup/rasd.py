"""RASD: what a retriever found, pruned by what the draft model thinks likely first, in one tree with its drafts.

Paper: arXiv 2503.03434. A retrieved branch stays where its first token is among the `keep` likeliest of the model
after the pending token; the best of them, at most `share` of the budget, are joined with the model's tree, shared
prefixes once. How many candidates the model may draw is decided before it draws, from the number retrieved; pruning
looks at its distribution, never at what was drawn.

Lossless: sampled draws come first and retrieved ones are point masses behind them, which recursive rejection honours;
without sampling all are point masses. Cost: the two drafters', and a union of two small trees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.proposals import Proposals
from outrider.core.protocols import Context, Drafter, Noise, Remembers, Source
from outrider.core.records import Budget, Chunk, Needs, StepRecord, Verdict
from outrider.core.tree import QRow, TokenTree, merge, root


@dataclass(slots=True)
class FirstDistributions:
    """A source that remembers its distribution after each pending token, for those who asked in this step."""

    source: Source
    rows: dict[int, QRow] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def needs(self) -> Needs:
        return self.source.needs

    def begin(self, slot: int, context: Context) -> None:
        self.source.begin(slot, context)

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        self.source.absorb(chunks)

    def end(self, slot: int) -> None:
        self.rows.pop(slot, None)
        self.source.end(slot)

    def start(self, slots: Sequence[int]) -> list[QRow]:
        first = self.source.start(slots)
        self.rows.update(zip(slots, first, strict=True))
        return first

    def extend(self, slots: Sequence[int], trees: Sequence[TokenTree], done: Sequence[int]) -> list[list[QRow]]:
        return self.source.extend(slots, trees, done)

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        self.source.observe(slots, records)


@dataclass(slots=True)
class Rasd:
    drafter: Drafter  # grown from `first`
    first: FirstDistributions
    retriever: Drafter  # point masses, best first
    keep: int = 10  # k: how many of the likeliest first tokens a retrieved branch may begin with
    share: float = 0.5  # B_r / B: most of the budget that retrieved candidates get
    name: str = "rasd"
    shared_noise: bool = False

    @property
    def needs(self) -> Needs:
        return self.drafter.needs | self.retriever.needs

    def begin(self, slot: int, context: Context) -> None:
        self.drafter.begin(slot, context)
        self.retriever.begin(slot, context)

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        self.drafter.absorb(chunks)
        self.retriever.absorb(chunks)

    def end(self, slot: int) -> None:
        self.drafter.end(slot)
        self.retriever.end(slot)

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        for slot in slots:
            self.first.rows.pop(slot, None)
        found = self.retriever.propose(slots, budgets, noise)
        shares = [min(int(b.nodes * self.share), tree.candidates) for b, tree in zip(budgets, found, strict=True)]
        rest = [Budget(b.nodes - share, b.depth) for b, share in zip(budgets, shares, strict=True)]
        drawn = self.drafter.propose(slots, rest, noise)
        trees = [
            merge(tree, self._pruned(slot, retrieved, share)) if share else tree
            for slot, tree, retrieved, share in zip(slots, drawn, found, shares, strict=True)
        ]
        return Proposals(trees, drawn.levels)

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        self.retriever.observe(slots, records)
        ran = [self.first.rows.pop(slot, None) is not None for slot in slots]
        # Where the model did not run, this was to it a step without candidates.
        seen = [record if asked else _bare(record) for record, asked in zip(records, ran, strict=True)]
        self.drafter.observe(slots, seen)

    def memory(self) -> dict[str, NDArray[Any]]:
        return self.retriever.memory() if isinstance(self.retriever, Remembers) else {}

    def remember(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        if isinstance(self.retriever, Remembers):
            self.retriever.remember(arrays)

    def forget(self) -> None:
        if isinstance(self.retriever, Remembers):
            self.retriever.forget()

    def _pruned(self, slot: int, tree: TokenTree, most: int) -> TokenTree:
        """The first `most` nodes of the branches that the model could begin with."""
        row = self.first.rows.get(slot)
        likely = set(row.ids[np.argsort(-row.probs, kind="stable")[: self.keep]].tolist()) if row is not None else None
        kept, fits = [], [True]
        for i, (parent, token) in enumerate(zip(tree.parents.tolist()[1:], tree.tokens.tolist()[1:], strict=True), 1):
            fits.append(fits[parent] if parent else likely is None or token in likely)
            if fits[i]:
                kept.append(i)
        return tree.keep(kept[:most])


def _bare(record: StepRecord) -> StepRecord:
    """The same step, as if nothing had been proposed."""
    pending = int(record.tree.tokens[0])
    return replace(record, tree=root(pending), verdict=Verdict((), record.verdict.next_token))
