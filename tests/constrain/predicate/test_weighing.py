"""The token is the one a mask leaves, and the weight is unbiased: by enumeration of all orders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations

import numpy as np
import pytest

from outrider.constrain.predicate.weighing import first, weighed

PROBS = np.array([0.3, 0.25, 0.2, 0.12, 0.08, 0.05])
Weigh = Callable[[Iterator[int], np.ndarray, Callable[[int], bool]], tuple[int | None, float]]


def means(probs: np.ndarray, legal: set[int], weigh: Weigh = weighed) -> tuple[np.ndarray, float]:
    """E[weight 1[token = v]] for each v, over all orders of drawing without replacement, and the calls of a token."""
    found, calls = np.zeros(len(probs)), 0.0
    for order in permutations(np.flatnonzero(probs).tolist()):
        chance, left = 1.0, 1.0
        for token in order:
            chance *= probs[token] / left
            left -= probs[token]
        asked: list[int] = []
        token, weight = weigh(iter(order), probs.copy(), lambda v, asked=asked: asked.append(v) or v in legal)
        calls += chance * len(asked)
        if token is not None:
            found[token] += chance * weight
    return found, calls


@pytest.mark.parametrize("legal", [{0}, {5}, {1, 3}, {0, 1, 2, 3, 4}, {2, 4, 5}, {0, 1, 2, 3, 4, 5}, set()])
def test_the_mean_weight_of_a_token_is_its_probability_where_it_is_legal(legal: set[int]) -> None:
    found, _ = means(PROBS, legal)
    assert np.abs(found - np.where([v in legal for v in range(6)], PROBS, 0)).max() < 1e-12


def test_a_legal_token_that_is_next_to_impossible_is_found() -> None:
    probs = np.array([0.5, 0.5 - 1e-9, 1e-9])
    found, _ = means(probs, {2})
    assert found == pytest.approx([0, 0, 1e-9], rel=1e-6)


def test_where_all_is_legal_the_weight_is_1_for_two_calls_and_where_nothing_is_there_is_no_token() -> None:
    asked: list[int] = []
    assert weighed(iter([3, 1, 0]), PROBS.copy(), lambda v: asked.append(v) or True) == (3, 1.0)
    assert asked == [3, 1]
    assert weighed(iter([3, 1, 0]), PROBS.copy(), lambda v: False) == (None, 0.0)
    assert first(iter([3, 1, 0]), lambda v: v < 2) == 1 and first(iter([3]), lambda v: False) is None


def test_a_model_that_obeys_costs_few_calls() -> None:
    _, calls = means(PROBS, {0, 1, 2, 3, 4})  # 0.95 legal
    assert calls < 3


def test_planted_without_the_second_call_the_weights_are_too_high() -> None:
    def fake(order: Iterator[int], probs: np.ndarray, allows: Callable[[int], bool]) -> tuple[int | None, float]:
        for token in order:
            if allows(token):
                return token, float(probs.sum())
            probs[token] = 0.0
        return None, 0.0

    found, _ = means(PROBS, {1, 3}, fake)
    assert (found[[1, 3]] > PROBS[[1, 3]] + 0.01).all()


def test_planted_what_was_refused_stays_in_the_urn() -> None:
    """Drawing again with replacement: refused tokens keep their probability in what is left."""

    def fake(order: Iterator[int], probs: np.ndarray, allows: Callable[[int], bool]) -> tuple[int | None, float]:
        left = 1.0
        for token in order:
            if allows(token):
                following = next(order, None)
                return token, left * (1.0 if following is None or allows(following) else float(probs[token]))
            left *= 1 - float(probs[token])
        return None, 0.0

    found, _ = means(PROBS, {1, 3}, fake)
    assert np.abs(found[[1, 3]] - PROBS[[1, 3]]).max() > 0.01


def test_a_limit_ends_the_search_after_so_many_refusals_and_no_acceptance_is_cut() -> None:
    asked: list[int] = []
    assert weighed(iter(range(6)), PROBS.copy(), lambda v: asked.append(v) or False, 4) == (None, 0.0)
    assert asked == [0, 1, 2, 3]
    assert weighed(iter(range(6)), PROBS.copy(), lambda v: v == 3, 4)[0] == 3
