"""RASD: what a retriever found, pruned by the draft model's first law, in one tree with what the model drafted.

Paper: arXiv 2503.03434. A retrieved branch stays where its first token is among the `keep` likeliest of the model's law
after the pending token; the best of them, at most `share` of the budget, are joined with the model's tree, shared
prefixes once. How many candidates the model may draw is decided before it draws, from the number retrieved; pruning
looks at its law, never at what was drawn.

Lossless: sampled draws come first and retrieved ones are point masses behind them, which recursive rejection honours;
without sampling all are point masses. Cost: the two drafters', and a union of two small trees.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.proposals import Proposals
from outrider.protocols import Budget, Chunk, Context, Drafter, Needs, Noise, Remembers, Source, StepRecord, Verdict
from outrider.tree import QRow, TokenTree, merge, root


@dataclass(slots=True)
class FirstLaws:
    """A source that remembers its law after each pending token, for those who asked in this step."""

    source: Source
    laws: dict[int, QRow] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def needs(self) -> Needs:
        return self.source.needs

    def begin(self, slot: int, context: Context, chunks: Iterable[Chunk]) -> None:
        self.source.begin(slot, context, chunks)

    def end(self, slot: int) -> None:
        self.laws.pop(slot, None)
        self.source.end(slot)

    def start(self, slots: Sequence[int]) -> list[QRow]:
        rows = self.source.start(slots)
        self.laws.update(zip(slots, rows, strict=True))
        return rows

    def extend(self, slots: Sequence[int], trees: Sequence[TokenTree], done: Sequence[int]) -> list[list[QRow]]:
        return self.source.extend(slots, trees, done)

    def observe(self, slot: int, record: StepRecord) -> None:
        self.source.observe(slot, record)


@dataclass(slots=True)
class Rasd:
    drafter: Drafter  # grown from `first`
    first: FirstLaws
    retriever: Drafter  # point masses, best first
    keep: int = 10  # k: how many of the likeliest first tokens a retrieved branch may begin with
    share: float = 0.5  # B_r / B: most of the budget that retrieved candidates get
    name: str = "rasd"
    shared_noise: bool = False

    @property
    def needs(self) -> Needs:
        return self.drafter.needs | self.retriever.needs

    def begin(self, slot: int, context: Context, chunks: Iterable[Chunk]) -> None:
        both = list(chunks)
        self.drafter.begin(slot, context, both)
        self.retriever.begin(slot, context, both)

    def end(self, slot: int) -> None:
        self.drafter.end(slot)
        self.retriever.end(slot)

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        for slot in slots:
            self.first.laws.pop(slot, None)
        found = self.retriever.propose(slots, budgets, noise)
        shares = [min(int(b.nodes * self.share), tree.candidates) for b, tree in zip(budgets, found, strict=True)]
        rest = [Budget(b.nodes - own, b.depth) for b, own in zip(budgets, shares, strict=True)]
        drawn = self.drafter.propose(slots, rest, noise)
        trees = [
            merge(tree, self._pruned(slot, retrieved, own)) if own else tree
            for slot, tree, retrieved, own in zip(slots, drawn, found, shares, strict=True)
        ]
        return Proposals(trees, drawn.levels)

    def observe(self, slot: int, record: StepRecord) -> None:
        self.retriever.observe(slot, record)
        if self.first.laws.pop(slot, None) is None:  # the model did not run: to it this was a step without candidates
            pending = int(record.tree.tokens[0])
            record = replace(record, tree=root(pending), verdict=Verdict((), record.verdict.next_token))
        self.drafter.observe(slot, record)

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
        law = self.first.laws.get(slot)
        likely = set(law.ids[np.argsort(-law.probs, kind="stable")[: self.keep]].tolist()) if law is not None else None
        kept, fits = [], [True]
        for i, (parent, token) in enumerate(zip(tree.parents.tolist()[1:], tree.tokens.tolist()[1:], strict=True), 1):
            fits.append(fits[parent] if parent else likely is None or token in likely)
            if fits[i]:
                kept.append(i)
        return tree.keep(kept[:most])
