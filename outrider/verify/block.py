"""Block verification for chains: how long a prefix to keep is decided for the whole chain at once (arXiv 2403.10444).

A later token that the target likes can rescue an earlier one that it does not: with w_i = min(1, w_{i-1} p(X_i)/q(X_i))
and S_i = sum [w_i p_i - q_i]+, prefixes are tried from the longest down, prefix i is kept with probability
S_i / (S_i + 1 - w_i), the whole chain with its w, and the next token comes from norm([w_i p_i - q_i]+).

Lossless for chains, sampled or of point masses, and the best of all rules that look at p and q along the chain only:
never fewer tokens on average than the rejection rule. Nodes with several draws are refused. Needs the target's row at
every node of the chain, and a pass over the vocabulary for each prefix tried.
"""

from __future__ import annotations

from outrider.core.protocols import Noise, Rows
from outrider.core.records import Verdict
from outrider.core.tree import NOTHING, Draw, Law, TokenTree
from outrider.verify.residual import accept_ratio, after_rejection, point
from outrider.verify.walk import follow, refuse_several


class Block:
    name = "block"
    honours = frozenset({Law.NONE, Law.FIXED, Law.IID})
    coupled = True

    def verify(self, tree: TokenTree, rows: Rows, noise: Noise) -> Verdict:
        if rows.greedy:
            return follow(tree, rows.argmax)
        refuse_several(tree, "block verification takes one draw a node", "the traversal or invariant rule")
        return _verify(tree, rows, noise)


def _verify(tree: TokenTree, rows: Rows, noise: Noise) -> Verdict:
    nodes, weights = [0], [1.0]
    while draws := tree.draws[nodes[-1]]:
        draw = _with_row(draws[0])
        if draw.token == NOTHING:
            break
        weight = accept_ratio(rows.probs(nodes[-1]), 1.0 / weights[-1], draw)
        if weight == 0.0:  # nor has any longer prefix a weight
            break
        if draw.child == NOTHING:  # the chain's last token stands in no node: kept, it is the next token itself
            if noise.coin(weight, nodes[-1], 0):
                return Verdict(tuple(nodes[1:]), draw.token)
            break
        nodes.append(draw.child)
        weights.append(weight)
    while True:
        node, w = nodes[-1], weights[-1]
        draws = tree.draws[node]
        p = left = rows.probs(node)
        keep = w
        if draws:
            row = _with_row(draws[0]).row
            assert row is not None
            left, total = after_rejection(p, 1.0 / w, row)
            rest = w * total if left is not p else 0.0
            # Nothing left at weight 1 is p = q, where the longer prefix was kept but for rounding.
            keep = rest / (rest + (1.0 - w)) if rest > 0.0 else float(w == 1.0)
        if node == 0 or (keep > 0.0 and noise.coin(keep, node, len(draws))):
            return Verdict(tuple(nodes[1:]), noise.draw(left, node, len(draws) + 1))
        nodes.pop()
        weights.pop()


def _with_row(draw: Draw) -> Draw:
    return draw if draw.row is not None else Draw(draw.token, draw.child, point(draw.token))
