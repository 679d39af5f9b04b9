"""Drafts of sequences under an automaton, made to fit it before the target runs.

What may not be said leaves the pass: candidates go, and nodes of a tree are muted, so that their draws stay and every
rule stays exact. Text that is bound to follow hangs on what is left: on leaves, and on the pending token. Decided by
the text alone, so nothing is biased. Costs a few microseconds a candidate, for sequences under an automaton only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from outrider.core.legal import Legal
from outrider.core.proposals import Candidates, Proposals
from outrider.core.records import Budget
from outrider.core.sampling import History
from outrider.core.tree import Law, TokenTree, from_paths, merge

FORWARD = "jump-forward"  # the drafter that these runs are credited to, in mixtures that have it
CLAIM = 0.97  # that the target cuts the text that has to follow into these very tokens
LEAVES = 8  # at most so many get a run: each asks the automaton


def fitted(
    proposals: Proposals, histories: Sequence[History], budgets: Sequence[Budget], honours: Collection[Law]
) -> Proposals:  # fmt: skip
    """One history and budget a slot; `honours`: the laws of draws that the acceptance rule takes."""
    if all(history.legal is None for history in histories):
        return proposals
    number = proposals.names.index(FORWARD) if FORWARD in proposals.names else -1
    trees, candidates = list(proposals.trees), list(proposals.candidates)
    for i, (history, budget) in enumerate(zip(histories, budgets, strict=True)):
        if history.legal is None:
            continue
        pending = int(history.tokens[-1])
        trees[i] = _fitted_tree(trees[i], history.legal, budget, () if candidates else honours)
        if candidates:
            candidates[i] = _fitted_candidates(candidates[i], history.legal, budget, pending, number)
    return replace(proposals, trees=trees, candidates=candidates)


def _fitted_tree(tree: TokenTree, legal: Legal, budget: Budget, honours: Collection[Law]) -> TokenTree:
    if tree.candidates:
        dead = np.zeros(len(tree), dtype=bool)
        for node in range(1, len(tree)):
            parent = int(tree.parents[node])
            dead[node] = dead[parent] or not legal.continues(int(tree.tokens[node]), tuple(tree.path_tokens(parent)))
        if dead.any():
            alive, gone = np.flatnonzero(~dead).tolist(), np.flatnonzero(dead).tolist()
            tree = tree.mute(gone) if tree.is_sampled else tree.keep(alive)
    room, paths = budget.nodes - tree.candidates, []
    inner = set(tree.parents.tolist())
    leaves = [n for n in range(len(tree)) if n not in inner and (Law.MIXED if tree.draws[n] else Law.FIXED) in honours]
    for node in leaves[:LEAVES]:
        path = tree.path_tokens(node)
        for whole in legal.continuations(path):
            run = whole[: max(0, min(room, budget.depth - len(path)))]
            if run:
                paths.append([*path, *run])
                room -= len(run)
    return merge(tree, from_paths(int(tree.tokens[0]), paths, FORWARD)) if paths else tree


def _fitted_candidates(trie: Candidates, legal: Legal, budget: Budget, pending: int, number: int) -> Candidates:
    tokens, parents, depths = [pending], [-1], [0]
    makers, claims, sources = [0], [1.0], [0]
    paths: list[tuple[int, ...]] = [()]
    child: dict[tuple[int, int], int] = {}
    place = {0: 0}
    given = zip(*(column.tolist() for column in trie), strict=True)
    next(given)
    for node, (token, parent, depth, made, claim, source) in enumerate(given, 1):
        above = place.get(parent)
        if above is None or not legal.continues(token, paths[above]):
            continue
        place[node] = child[above, token] = len(tokens)
        tokens.append(token)
        parents.append(above)
        depths.append(depth)
        makers.append(made)
        claims.append(claim)
        sources.append(source)
        paths.append((*paths[above], token))
    if number >= 0:
        inner = set(parents)
        for leaf in [0, *(node for node in range(1, len(tokens)) if node not in inner)][: LEAVES + 1]:
            runs = legal.continuations(paths[leaf])
            for run in runs:
                node, claim = leaf, CLAIM / len(runs)  # the first token is a choice where there are several ways
                for token in run[: max(0, budget.depth - depths[leaf])]:
                    if (node, token) not in child:
                        child[node, token] = len(tokens)
                        tokens.append(token)
                        parents.append(node)
                        depths.append(depths[node] + 1)
                        makers.append(0)
                        claims.append(claim)
                        sources.append(number)
                        paths.append((*paths[node], token))
                    node = child[node, token]
                    makers[node] |= 1 << number
                    if claims[node] < claim:
                        claims[node], sources[node] = claim, number
                    claim = CLAIM
    return Candidates(
        np.array(tokens), np.array(parents), np.array(depths), np.array(makers), np.array(claims), np.array(sources)
    )
