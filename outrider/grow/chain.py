"""Chain: one path, one source call a depth, over the whole batch at once.

Lossless: with noise each token is drawn from the source's law and carries its row; without, the likeliest token is
taken as a point mass. Cost: as many source calls as the deepest budget.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.protocols import Budget, Noise, Source
from outrider.tree import QRow, TokenTree, chain, root


class Chain:
    def grow(
        self, source: Source, slots: Sequence[int], pending: Sequence[int], budgets: Sequence[Budget],
        noise: Sequence[Noise | None],
    ) -> list[TokenTree]:  # fmt: skip
        trees = [root(token) for token in pending]
        tokens: list[list[int]] = [[] for _ in slots]
        rows: list[list[QRow]] = [[] for _ in slots]
        lengths = [min(b.nodes, b.depth) for b in budgets]
        live = [i for i, length in enumerate(lengths) if length > 0]
        laws = source.start([slots[i] for i in live]) if live else []
        depth = 0
        while live:
            for i, law in zip(live, laws, strict=True):
                own = noise[i]
                index = int(law.probs.argmax()) if own is None else own.draw(law.probs, depth, 0)
                tokens[i].append(int(law.ids[index]))
                rows[i].append(law)
                trees[i] = chain(pending[i], tokens[i], None if own is None else rows[i], origin=source.name)
            depth += 1
            live = [i for i in live if lengths[i] > depth]
            if live:
                grown = source.extend([slots[i] for i in live], [trees[i] for i in live], [depth] * len(live))
                laws = [new[0] for new in grown]
        return trees
