"""A chain that asks whether to go on: exact whatever it is told, and worth what the best stopping could be worth.

The marks of these tests are as bad as can be: they follow the drawn tokens, which a careless rule turns into a bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from outrider.check.exhaustive import CASES, TOLERANCE, Case, distance, grown_distribution, step_distribution
from outrider.check.toy import ToySource
from outrider.core.records import Budget
from outrider.core.tree import QRow, TokenTree, fixed
from outrider.grow.stopping import Doubt, Drafted, Stop, Stopping
from outrider.methods.common import verifier

COUPLED = ("rejection", "recursive", "naive", "k-seq", "optimal", "transport", "block", "traversal")
GENERIC, BUDGET = CASES[0], Budget(3, 3)


class Follows:
    """Marks that know nothing but the drawn token, and are sure of it."""

    def chances(self, slots, trees, done) -> list[np.ndarray]:
        return [(tree.tokens[first:] % 2).astype(float) for tree, first in zip(trees, done, strict=True)]


class UnlessOne:
    """No head, no rule: ends behind the second token where that is token 1, else behind the third."""

    def goes_on(self, drafted: Drafted) -> bool:
        return len(drafted.rows) < 2 or (len(drafted.chances) == 1 and drafted.chances[0] == 0.0)


STOPS: dict[str, Stop] = {"doubt": Doubt(0.5), "doubt from the first": Doubt(0.5, least=1), "token 1": UnlessOne()}


def gap(rule: str, stop: Stop, case: Case = GENERIC) -> float:
    probs, count = grown_distribution(verifier(rule), lambda: Stopping(stop, Follows()), BUDGET, case)
    assert count > 1 or case.target.greedy
    assert sum(probs.values()) == pytest.approx(1.0)
    return distance(probs, case.target, BUDGET.depth + 1)


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("rule", COUPLED)
def test_chains_whose_length_follows_the_drawn_tokens_keep_the_distribution(rule: str, stop: str) -> None:
    assert gap(rule, STOPS[stop]) <= TOLERANCE


@pytest.mark.parametrize("case", CASES[1:], ids=lambda case: case.name)
@pytest.mark.parametrize("rule", ["rejection", "block", "traversal"])
def test_so_they_do_on_every_toy(rule: str, case: Case) -> None:
    assert gap(rule, Doubt(0.5), case) <= TOLERANCE


def test_the_lengths_do_differ() -> None:
    lengths = set()

    def draft(paths) -> TokenTree:
        source = ToySource(GENERIC.draft)
        source.begin(0, type("Text", (), {"tokens": np.array([0, 1])})())
        tree = Stopping(Doubt(0.5), Follows()).grow(source, [0], [1], [BUDGET], [paths.noise("draft")])[0]
        lengths.add(tree.candidates)
        return tree

    step_distribution(verifier("rejection"), draft, GENERIC.target)
    assert lengths == {2, 3}


@pytest.mark.parametrize("rule", ["rejection", "block", "traversal"])
def test_dropping_the_token_that_is_doubted_is_seen(rule: str, monkeypatch) -> None:
    """What was drawn must stay, or the decision must have come before it."""

    class Drops(Stopping):
        def grow(self, source, slots, pending, budgets, noise):
            (tree,) = super().grow(source, slots, pending, budgets, noise)
            last = len(tree) - 1
            if tree.candidates and tree.tokens[last] % 2 == 0:
                draws = (*tree.draws[: last - 1], ())
                tree = replace(TokenTree(tree.tokens[:last], tree.parents[:last], draws))
            return [tree]

    probs, _ = grown_distribution(verifier(rule), lambda: Drops(Doubt(0.5), Follows()), BUDGET, GENERIC)
    assert distance(probs, GENERIC.target, BUDGET.depth + 1) > 1e-3


class Fixed:
    """Two tokens at every place, and a chance for each depth."""

    name = "fixed"

    def __init__(self, chances: Sequence[float]) -> None:
        self.said, self.asked = chances, list[int]()

    def row(self) -> QRow:
        return QRow(np.array([3, 4]), np.array([0.75, 0.25]))

    def start(self, slots):
        return [self.row() for _ in slots]

    def extend(self, slots, trees, done):
        return [[self.row()] * (len(tree) - first) for tree, first in zip(trees, done, strict=True)]

    def chances(self, slots, trees, done):
        self.asked += [int(tree.depth) for tree in trees]
        return [np.array([self.said[d - 1] for d in tree.depths[first:]])
                for tree, first in zip(trees, done, strict=True)]  # fmt: skip


def grown(threshold: float, chances: Sequence[float], budget: int = 8, **options) -> TokenTree:
    source = Fixed(chances)
    grower = Stopping(Doubt(threshold), source, **options)
    return grower.grow(source, [0], [7], [Budget(budget, budget)], [None])[0]


def test_the_mark_of_a_token_counts_one_token_later() -> None:
    """Behind token k only what is known of tokens 1 to k - 1 decides."""
    sure = [1.0] * 7
    for k in range(2, 7):
        doubted = [*sure[: k - 1], 0.0, *sure[k:]]
        assert grown(0.3, doubted).candidates == k + 1
        assert grown(0.3, sure).candidates == 8


def test_lengths_grow_with_the_threshold_between_their_bounds() -> None:
    chances = [0.9, 0.8, 0.95, 0.6, 0.9, 0.9, 0.9]
    lengths = [grown(h, chances).candidates for h in (0.0, 0.05, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)]
    assert lengths == sorted(lengths) and lengths[0] == 2 and lengths[-1] == 8 and len(set(lengths)) > 4


def test_a_chain_ends_behind_the_end_of_a_text_which_is_proposed() -> None:
    tree = grown(1.0, [1.0] * 7, ends=frozenset({3}))
    assert tree.candidates == 1 and tree.tokens[1] == 3 and tree.draws[0][0].child == 1


@pytest.mark.parametrize("sampled", [False, True])
def test_trees_carry_the_marks_as_chances_of_their_paths(sampled: bool) -> None:
    class First:
        def draw(self, weights, node, draw):
            return 0

    source = Fixed([0.9, 0.5, 0.8])
    noise = First() if sampled else None
    (tree,) = Stopping(Doubt(1.0), source).grow(source, [0], [7], [Budget(3, 3)], [noise])
    assert tree.is_sampled == sampled
    assert tree.weights == pytest.approx([1.0, 0.9, 0.45, 0.45 * 0.75])  # the last did not run: its row says so much
    assert source.asked == [1, 2]


def test_marks_reach_what_a_mixture_chooses_from() -> None:
    from outrider.core.proposals import united

    source = Fixed([0.9, 0.5])
    (tree,) = Stopping(Doubt(1.0), source).grow(source, [0], [7], [Budget(3, 3)], [None])
    surer = fixed(np.array([7, 3]), np.array([-1, 0]), "other", np.array([1.0, 0.2]))
    trie = united([(0, surer), (1, tree)])
    assert trie.claims[1:] == pytest.approx([0.9, 0.5, 0.75]) and trie.sources[1] == 1


# What stopping is worth: time per token with known chances of acceptance

EASY, HARD = 0.95, 0.3
STAYS = 0.85  # that the next token is as easy or as hard as this one
DRAFT, TARGET, LONGEST = 0.08, 1.0, 10


def after(state: int | None) -> list[tuple[float, int]]:
    """Chances of the next token's state: 0 is easy."""
    return [(0.5, 0), (0.5, 1)] if state is None else [(STAYS, state), (1 - STAYS, 1 - state)]


def accepted(states: tuple[int, ...]) -> list[float]:
    return [(EASY, HARD)[state] for state in states]


def worth(states: tuple[int, ...]) -> tuple[float, float]:
    """Tokens and seconds of a step whose chain ends one token behind these."""
    run = np.cumprod([1.0, *accepted(states)])
    last = sum(p * (EASY, HARD)[state] for p, state in after(states[-1] if states else None))
    return float(run.sum() + run[-1] * last), (len(states) + 1) * DRAFT + TARGET


def rate(goes_on) -> float:
    """Tokens per second of a policy: of all chains that it may come to, by their chance."""
    tokens = seconds = 0.0
    open_chains: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    while open_chains:
        chance, states = open_chains.pop()
        if len(states) + 1 < LONGEST and goes_on(states):
            open_chains += [(chance * p, (*states, s)) for p, s in after(states[-1] if states else None)]
        else:
            gained, took = worth(states)
            tokens, seconds = tokens + chance * gained, seconds + chance * took
    return tokens / seconds


def best_rate() -> float:
    """Of all policies, by dynamic programming: the rate at which a step is worth exactly the time it takes."""

    def value(states: tuple[int, ...], price: float) -> float:
        tokens, seconds = worth(states)
        end = tokens - price * seconds
        if len(states) + 1 == LONGEST:
            return end
        return max(end, sum(p * value((*states, s), price) for p, s in after(states[-1] if states else None)))

    low, high = 0.0, 10.0
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (middle, high) if value((), middle) > 0 else (low, middle)
    return low


def test_the_threshold_is_within_a_percent_of_the_best_policy_and_fixed_lengths_are_not() -> None:
    best = best_rate()

    def doubting(threshold: float) -> float:
        stop = Doubt(threshold, least=1)
        return rate(lambda states: stop.goes_on(Drafted([QRow(np.empty(0), np.empty(0))] * (len(states) + 1),
                                                        accepted(states))))  # fmt: skip

    lengths = [rate(lambda states, k=k: len(states) + 1 < k) for k in range(1, LONGEST + 1)]
    stopping = max(doubting(h) for h in np.arange(0.1, 1.0, 0.1))
    assert best + 1e-3 >= stopping >= 0.99 * best
    assert max(lengths) < 0.95 * stopping
