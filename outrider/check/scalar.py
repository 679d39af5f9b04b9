"""Plain references of the acceptance rules: Python floats, dense lists, one loop over tokens at a time.

Each says what its rule says on the same noise, so that the rules that touch sparse rows and tensors only can be tested
against arithmetic that is plain to read. How the draws were made is not checked, and nothing is fast.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from outrider.core.protocols import Noise
from outrider.core.records import Verdict
from outrider.core.tree import NOTHING, Draw, QRow, TokenTree

Probs = list[float]  # dense, one float a token
ProbsAt = Callable[[int], Probs]  # the target's distribution at a node


def recursive(tree: TokenTree, target: ProbsAt, noise: Noise) -> Verdict:
    """Rejection on chains, recursive rejection on trees, and the optimal rule on top-plus-one draws."""

    def choose(node: int) -> int:
        p = target(node)
        for j, draw in enumerate(tree.draws[node]):
            if draw.row is None:
                continue
            q = _dense(draw.row, len(p))
            ratio = p[draw.token] / q[draw.token] if 0 <= draw.token < len(p) else 0.0
            if ratio > 0.0 and noise.coin(min(1.0, ratio), node, j):
                return draw.token
            p = _normalised([max(0.0, a - b) for a, b in zip(p, q, strict=True)], p)
        return noise.draw(np.array(p), node, len(tree.draws[node]))

    return _follow(tree, choose)


def k_seq(tree: TokenTree, target: ProbsAt, noise: Noise) -> Verdict:
    def choose(node: int) -> int:
        p, draws = target(node), tree.draws[node]
        if not draws or draws[0].row is None:
            return noise.draw(np.array(p), node, len(draws))
        q, k = _dense(draws[0].row, len(p)), len(draws)

        def kept(rho: float) -> Probs:
            return [min(b, a / rho) for a, b in zip(p, q, strict=True)]

        low, high = 1.0, float(k)
        for _ in range(60):
            middle = (low + high) / 2
            beta = sum(kept(middle))
            low, high = (middle, high) if 1 - (1 - beta) ** k > middle * beta else (low, middle)
        for j, draw in enumerate(draws):
            ratio = p[draw.token] / (high * q[draw.token]) if 0 <= draw.token < len(p) else 0.0
            if ratio > 0.0 and noise.coin(min(1.0, ratio), node, j):
                return draw.token
        beta = sum(kept(high))
        tests = (1 - (1 - beta) ** k) / beta if beta > 0 else 0.0
        left = [max(0.0, a - b * tests) for a, b in zip(p, kept(high), strict=True)]
        return noise.draw(np.array(_normalised(left, p)), node, k)

    return _follow(tree, choose)


def traversal(tree: TokenTree, target: ProbsAt, noise: Noise) -> Verdict:
    """Traversal on trees, block verification on chains. Point masses are tested after sampled draws."""

    def visit(node: int, a: float) -> Verdict | None:
        p, draws = target(node), tree.draws[node]
        for j, draw in sorted(enumerate(draws), key=lambda item: item[1].row is None):
            q = _dense(draw.row, len(p)) if draw.row is not None else [float(t == draw.token) for t in range(len(p))]
            if 0 <= draw.token < len(p) and p[draw.token] > 0:
                kept = below(node, j, draw, min(1.0, a * p[draw.token] / q[draw.token]))
                if kept is not None:
                    return kept
            rest = [max(0.0, a * x - y) for x, y in zip(p, q, strict=True)]
            said = sum(rest)
            if said == 0.0 and a < 1.0:
                return None
            a = said / (said + (1.0 - a)) if said > 0.0 else 1.0
            p = _normalised(rest, p)
        if node == 0 or noise.coin(a, node, len(draws)):
            return Verdict(tuple(tree.path(node)), noise.draw(np.array(p), node, len(draws) + 1))
        return None

    def below(node: int, j: int, draw: Draw, weight: float) -> Verdict | None:
        if draw.child != NOTHING:
            return visit(draw.child, weight)
        return Verdict(tuple(tree.path(node)), draw.token) if noise.coin(weight, node, j) else None

    verdict = visit(0, 1.0)
    assert verdict is not None
    return verdict


def _follow(tree: TokenTree, choose: Callable[[int], int]) -> Verdict:
    node, path = 0, list[int]()
    while True:
        token = choose(node)
        node = tree.child(node, token)
        if node == NOTHING:
            return Verdict(tuple(path), token)
        path.append(node)


def _dense(row: QRow, vocabulary: int) -> Probs:
    q = [0.0] * vocabulary
    for token, probability in zip(row.ids.tolist(), row.probs.tolist(), strict=True):
        if token < vocabulary:
            q[token] = probability
    return q


def _normalised(weights: Probs, otherwise: Probs) -> Probs:
    total = sum(weights)
    return [w / total for w in weights] if total > 0 else otherwise
