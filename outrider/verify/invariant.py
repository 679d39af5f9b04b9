"""Drafter-invariant verification: the target's own noise picks each token, and the tree is followed while it agrees.

Lossless for every way of drawing, because the candidates never enter the choice; the same seed gives the same text with
any drafter, tree or batch, or with none. Accepts less often than a rule coupled to the draft: the chance of going on at
a node is the target's probability of its children. Costs one pass over the vocabulary for each token emitted.
"""

from __future__ import annotations

from outrider.core.protocols import Noise, Rows
from outrider.core.records import Verdict
from outrider.core.tree import Law, TokenTree
from outrider.verify.walk import follow


class Invariant:
    name = "invariant"
    honours = frozenset(Law)
    coupled = False

    def verify(self, tree: TokenTree, rows: Rows, noise: Noise) -> Verdict:
        if rows.greedy:
            return follow(tree, rows.argmax)
        if (probs := rows.together()) is not None:
            return follow(tree, noise.pick_rows(probs, tree).__getitem__)
        return follow(tree, lambda node: rows.pick(node, tree.path_tokens(node), noise))
