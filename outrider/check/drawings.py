"""Toy trees drawn in each of the ways that `Law` names, all randomness through the noise.

A *shape* such as (2, 1) says how many draws each node at depth 0, 1, .. makes. A *drawing* says how one node makes
them; equal tokens share a child and keep their draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.check.toy import ToyLM
from outrider.core.protocols import Noise
from outrider.core.tree import NOTHING, Draw, Law, QRow, TokenTree

Widths = tuple[int, ...]  # draws of each node, by depth
Sample = Callable[[QRow], int]  # a token of this row, or NOTHING with what the row lacks to 1
DrawnTokens = list[tuple[int, QRow | None]]  # each with the row it was drawn from; None: a point mass


@dataclass(frozen=True, slots=True)
class Drawing:
    """`propose(first, second, count, sample)`: about `count` draws from the rows of two sources."""

    name: str
    law: Law  # of a node with two draws or more; with one it is iid or fixed
    propose: Callable[[QRow, QRow, int, Sample], DrawnTokens]
    muted: tuple[int, ...] = ()  # tokens that are drawn but stand in no node
    rollouts: bool = False  # whole paths: a node below the first makes as many draws as named it


def draw_tree(
    drawing: Drawing, shape: Widths, draft: ToyLM, second: ToyLM, context: Sequence[int], noise: Noise
) -> TokenTree:
    """Grow one tree below the last token of `context`."""
    tokens, parents = [int(context[-1])], [-1]
    draws: list[tuple[Draw, ...]] = []
    paths: list[list[int]] = [list(context)]
    arrivals = [shape[0]]  # draws that named each node
    for path in paths:  # grows while it is walked: breadth first
        node, depth = len(draws), len(path) - len(context)
        if depth == len(shape):
            draws.append(())
            continue
        count = arrivals[node] if drawing.rollouts else shape[depth]
        proposals = drawing.propose(draft.row(path), second.row(path), count, _sampler(noise, node))
        children: dict[int, int] = {}
        for token, _ in proposals:
            if token != NOTHING and token not in drawing.muted and token not in children:
                children[token] = len(tokens)
                tokens.append(token)
                parents.append(node)
                paths.append([*path, token])
                arrivals.append(0)
            if token in children:
                arrivals[children[token]] += 1
        draws.append(tuple(Draw(token, children.get(token, NOTHING), row) for token, row in proposals))
    return TokenTree(np.array(tokens), np.array(parents), tuple(draws))


def _sampler(noise: Noise, node: int) -> Sample:
    made = 0

    def sample(row: QRow) -> int:
        nonlocal made
        lacking = 1.0 - float(row.probs.sum())
        weights = np.array([*row.probs.tolist(), lacking if lacking > 1e-12 else 0.0])
        index = noise.draw(weights, node, made)
        made += 1
        return int(row.ids[index]) if index < len(row.ids) else NOTHING

    return sample


def top(row: QRow, count: int) -> list[int]:
    """The likeliest tokens, best first."""
    return [int(t) for t in row.ids[np.argsort(-row.probs, kind="stable")[:count]]]


def lacking(row: QRow) -> QRow:
    """The row cut to its two likeliest tokens and not renormalised: the rest of it proposes nothing."""
    keep = np.isin(row.ids, top(row, 2))
    return QRow(row.ids[keep], row.probs[keep])


def _fixed(first: QRow, second: QRow, count: int, sample: Sample) -> DrawnTokens:
    return [(token, None) for token in top(first, count)]


def _iid(first: QRow, second: QRow, count: int, sample: Sample) -> DrawnTokens:
    return [(sample(first), first) for _ in range(count)]


def _iid_null(first: QRow, second: QRow, count: int, sample: Sample) -> DrawnTokens:
    return _iid(lacking(first), second, count, sample)


def _without_replacement(first: QRow, second: QRow, count: int, sample: Sample) -> DrawnTokens:
    row, proposals = first, DrawnTokens()
    while len(proposals) < count and row.ids.size:
        token = sample(row)
        proposals.append((token, row))
        row = row.without(token)
    return proposals


def _without_replacement_null(first: QRow, second: QRow, count: int, sample: Sample) -> DrawnTokens:
    return _without_replacement(lacking(first), second, count, sample)


def _top_plus_one(first: QRow, second: QRow, count: int, sample: Sample) -> DrawnTokens:
    points, rest = top(first, count - 1), first
    for token in points:
        rest = rest.without(token)
    sampled: DrawnTokens = [(sample(rest), rest)] if rest.ids.size else []
    return [*((token, None) for token in points), *sampled]


def _mixed(first: QRow, second: QRow, count: int, sample: Sample) -> DrawnTokens:
    """Sampled from one source, then the favourite of the other."""
    if count == 1:
        return _iid(first, second, 1, sample)
    return [*_iid(first, second, count - 1, sample), (top(second, 1)[0], None)]


def _two_sources(first: QRow, second: QRow, count: int, sample: Sample) -> DrawnTokens:
    return [(sample(row), row) for row in (first, second, first, second)[:count]]


def _point_ahead(first: QRow, second: QRow, count: int, sample: Sample) -> DrawnTokens:
    """Top one, then independent draws that may repeat it."""
    return [(top(first, 1)[0], None), *_iid(first, second, count - 1, sample)]


DRAWINGS = (
    Drawing("fixed", Law.FIXED, _fixed),
    Drawing("iid", Law.IID, _iid),
    Drawing("iid, some propose nothing", Law.IID, _iid_null),
    Drawing("iid, token 0 in no node", Law.IID, _iid, muted=(0,)),
    Drawing("iid, whole paths", Law.IID, _iid, rollouts=True),
    Drawing("without replacement", Law.WITHOUT_REPLACEMENT, _without_replacement),
    Drawing("without replacement, some propose nothing", Law.WITHOUT_REPLACEMENT, _without_replacement_null),
    Drawing("top plus one", Law.TOP_PLUS_ONE, _top_plus_one),
    Drawing("mixed", Law.MIXED, _mixed),
    Drawing("mixed, two sources", Law.MIXED, _two_sources),
    Drawing("a point ahead of iid", Law.OTHER, _point_ahead),
)
