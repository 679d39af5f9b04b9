"""The walk that the token-level rules share: choose a token at a node, follow the child that carries it, repeat.

Only how the token is chosen differs between rules; the target's rows are asked for along the path and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable

from outrider.protocols import Verdict
from outrider.tree import NOTHING, TokenTree


def follow(tree: TokenTree, choose: Callable[[int], int]) -> Verdict:
    """Walk from node 0 while the chosen token has a child; one choice a node, however many paths run through it.

    Greedy decoding is `follow(tree, rows.argmax)` for every rule: the target's law is a point mass, so how the
    candidates were drawn cannot matter.
    """
    node = 0
    path: list[int] = []
    while True:
        token = choose(node)
        child = tree.child(node, token)
        if child == NOTHING:
            return Verdict(tuple(path), token)
        path.append(child)
        node = child
