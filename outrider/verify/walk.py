"""The walk that the token-level rules share: choose a token at a node, follow the child that carries it, repeat.

Only how the token is chosen differs between rules; the target's rows are asked for along the path and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from outrider.errors import UnsupportedDraws
from outrider.protocols import Verdict
from outrider.tree import NOTHING, Draw, Law, TokenTree, law_of


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


def refuse_other_laws(tree: TokenTree, name: str, honours: frozenset[Law]) -> None:
    """Raise for a node whose draws the rule does not honour, whether or not the walk would come by.

    A single draw and several from one row object are known at sight; naming the law of every node costs more.
    """
    for node, draws in enumerate(tree.draws):
        if len(draws) < 2 or (Law.IID in honours and all(a.row is b.row for a, b in pairwise(draws))):
            continue
        if (law := law_of(draws)) not in honours:
            known = ", ".join(sorted(honours - {Law.NONE}))
            raise UnsupportedDraws(
                f"the {name} rule honours {known} draws and those of node {node} are {law}; "
                "draft another way, or verify with the recursive or invariant rule"
            )


def refuse_points_first(tree: TokenTree) -> None:
    """Raise where point masses stand ahead of sampled draws whose row need not know them."""
    for node, draws in enumerate(tree.draws):
        # Only a point mass ahead of a sampled draw can make the law OTHER; naming the law of every node costs more.
        if len(draws) > 1 and _point_first(draws) and law_of(draws) is Law.OTHER:
            raise UnsupportedDraws(
                f"node {node} has point masses ahead of sampled draws; put the sampled draws first, "
                "or verify with the invariant rule"
            )


def _point_first(draws: tuple[Draw, ...]) -> bool:
    return any(a.row is None and b.row is not None for a, b in pairwise(draws))
