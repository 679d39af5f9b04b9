"""The path search of DiffuSpec: the best path of all where the beam is wide enough, and what a lattice holds."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.records import Budget
from outrider.core.tree import Law, QRow
from outrider.draft.marginals import Marginals
from outrider.grow.block.lattice import Lattice, Place

END = 99
TOKENS = 4


@st.composite
def lattices(draw) -> tuple[list[Place], np.ndarray]:
    """Up to four places of up to three tokens, and the logarithms of a bigram model over them."""
    places = []
    for _ in range(draw(st.integers(1, 4))):
        ids = draw(st.lists(st.sampled_from([0, 1, 2, END]), min_size=1, max_size=3, unique=True))
        logs = draw(st.lists(st.floats(-5, 0), min_size=len(ids), max_size=len(ids)))
        places.append(Place(np.array(ids), np.array(logs)))
    numbers = draw(st.lists(st.floats(-5, 0), min_size=TOKENS * TOKENS, max_size=TOKENS * TOKENS))
    return places, np.array(numbers).reshape(TOKENS, TOKENS)


def bigram(table: np.ndarray):
    def following(path, ids):
        last = min(path[-1], 3) if path else 3
        return table[last, np.minimum(ids, 3)]

    return following


def value(places: list[Place], table: np.ndarray, path: tuple[int, ...], share: float) -> float:
    total, following = 0.0, bigram(table)
    for depth, token in enumerate(path):
        place = places[depth]
        log = float(place.logs[place.ids.tolist().index(token)])
        total += share * log + (1 - share) * float(following(path[:depth], np.array([token]))[0])
    return total


@given(lattices(), st.floats(0, 1), st.booleans())
def test_a_beam_as_wide_as_the_lattice_finds_the_best_path_of_all(given_lattice, share: float, mean: bool) -> None:
    places, table = given_lattice
    whole = [path for path in product(*(place.ids.tolist() for place in places)) if END not in path]
    ended = [
        (*path, END)
        for depth in range(len(places)) if END in places[depth].ids
        for path in product(*(place.ids.tolist() for place in places[:depth])) if END not in path
    ]  # fmt: skip
    search = Lattice(frozenset({END}), beam=3**4, share=share, length_norm=mean)
    found = search.search(places, bigram(table))
    if not whole and not ended:
        assert found == ()
        return

    def rank(path: tuple[int, ...]) -> float:
        return value(places, table, path, share) / (len(path) if mean else 1)

    assert rank(found) == pytest.approx(max(map(rank, [*whole, *ended])))


def test_a_path_that_no_text_would_take_gives_way_to_one_that_reads() -> None:
    """Each place alone prefers 0, but nothing follows 0 but 1."""
    place = Place(np.array([0, 1]), np.log([0.6, 0.4]))
    table = np.full((TOKENS, TOKENS), -9.0)
    table[3, 0] = table[0, 1] = table[1, 0] = -0.1
    assert Lattice(frozenset(), share=0.5).search([place] * 3, bigram(table)) == (0, 1, 0)
    assert Lattice(frozenset(), share=1.0, beam=1).search([place] * 3, bigram(table)) == (0, 0, 0)


def row(probs: dict[int, float]) -> QRow:
    return QRow(np.array(list(probs)), np.array(list(probs.values())))


def test_a_place_holds_a_share_of_its_probability_so_many_tokens_at_most_and_the_end() -> None:
    search = Lattice(frozenset({END}), mass=0.8, most=3)
    (first, second) = search.places([row({1: 0.5, 2: 0.2, 3: 0.15, 4: 0.15}), row({1: 0.9, 2: 0.1})])
    assert first.ids.tolist() == [1, 2, 3, END] and second.ids.tolist() == [1, END]
    assert np.exp(first.logs[:3]).tolist() == pytest.approx([0.5, 0.2, 0.15]) and first.logs[-1] < -10
    (only,) = Lattice(frozenset({END}), most=2, mass=1.0).places([row({1: 0.25, 2: 0.4, 3: 0.35})])
    assert only.ids.tolist() == [2, 3, END]


def test_an_end_that_is_likely_ends_the_lattice_and_one_that_was_added_does_not() -> None:
    search = Lattice(frozenset({END}))
    rows = [row({1: 0.9, END: 0.01}), row({2: 0.5, END: 0.45}), row({3: 1.0})]
    places = search.places(rows)
    assert [place.ids.tolist() for place in places] == [[1, END], [2, END]]


class Fixed(Marginals):
    name = "fixed"

    def marginals(self, slots):
        return [[row({1: 0.7, 2: 0.3}), row({1: 0.4, 3: 0.6}), row({5: 1.0})] if slot else [] for slot in slots]

    def following(self, slot):
        return lambda path, ids: np.zeros(len(ids))


def test_a_draft_is_a_chain_of_point_masses_no_longer_than_its_budget() -> None:
    limits = [Budget(5, 2), Budget(5, 5), Budget(0, 0), Budget(5, 5)]
    trees = Lattice(frozenset()).grow(Fixed(), [1, 2, 3, 0], [9, 9, 9, 9], limits, [None] * 4)
    assert [tree.tokens.tolist() for tree in trees] == [[9, 1, 3], [9, 1, 3, 5], [9], [9]]
    assert all(tree.is_chain and {tree.law(n) for n in range(len(tree) - 1)} <= {Law.FIXED} for tree in trees)
