"""The walk that the token-level rules share: choose a token at a node, follow the child that carries it, repeat.

Only how the token is chosen differs between rules; the target's rows are asked for along the path and nowhere else.
Also how rules refuse draws for which they are not exact.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from torch import Tensor

from outrider.core.errors import UnsupportedDraws
from outrider.core.protocols import Noise, Rows
from outrider.core.records import Verdict
from outrider.core.tree import NOTHING, Draw, Law, TokenTree, law_of


def follow(tree: TokenTree, choose: Callable[[int], int]) -> Verdict:
    """Walk from node 0 while the chosen token has a child; one choice a node, however many paths run through it.

    Greedy decoding is `follow(tree, rows.argmax)` for every rule: the target's distribution is a point mass, so how the
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


Choose = Callable[[Tensor, tuple[Draw, ...], int, Noise], int]  # the target's row, a node's draws, the node, noise


def follow_draws(tree: TokenTree, rows: Rows, noise: Noise, choose: Choose) -> Verdict:
    """The walk of a rule that chooses each node's token from the target's row there and the node's draws."""
    return follow(tree, lambda node: choose(rows.probs(node), tree.draws[node], node, noise))


def refuse_several(tree: TokenTree, rule: str, remedy: str) -> None:
    """Raise for a node with more than one draw."""
    for node, draws in enumerate(tree.draws):
        if len(draws) > 1:
            raise UnsupportedDraws(f"{rule} and node {node} has {len(draws)}; draft a chain, or verify with {remedy}")


def refuse_other_laws(tree: TokenTree, name: str, honours: frozenset[Law]) -> None:
    """Raise for a node whose draws the rule does not honour, whether or not the walk would come by.

    A single draw and several from one row object are recognised first, since computing every node's law costs more.
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
    """Raise where point masses stand ahead of sampled draws whose rows may hold them."""
    for node, draws in enumerate(tree.draws):
        # Only a point mass ahead of a sampled draw can make the law OTHER; computing it for every node costs more.
        if len(draws) > 1 and _point_first(draws) and law_of(draws) is Law.OTHER:
            raise UnsupportedDraws(
                f"node {node} has point masses ahead of sampled draws; put the sampled draws first, "
                "or verify with the invariant rule"
            )


def _point_first(draws: tuple[Draw, ...]) -> bool:
    return any(a.row is None and b.row is not None for a, b in pairwise(draws))
