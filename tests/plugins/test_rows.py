"""Rows of a batch keep the names of their requests, however an engine moves them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.plugins.rows import RowNames


def text(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def test_a_text_that_goes_on_keeps_its_name_in_another_row() -> None:
    rows = RowNames()
    first, second = rows.names([0, 1], [text(1, 2), text(3, 4)])
    assert rows.names([0], [text(3, 4, 5)]) == [second]  # the first has ended and the second moved up
    assert rows.names([0, 1], [text(3, 4, 5, 6), text(1, 2, 9)])[0] == second
    assert first != second


def test_a_new_text_in_an_old_row_gets_a_name_of_its_own() -> None:
    rows = RowNames()
    (first,) = rows.names([0], [text(1, 2, 3)])
    assert rows.names([0], [text(1, 2, 4, 5)]) != [first]


def test_two_requests_with_one_text_are_two() -> None:
    rows = RowNames()
    names = rows.names([0, 1], [text(7, 7), text(7, 7)])
    assert len(set(names)) == 2
    assert rows.names([0, 1], [text(7, 7, 8), text(7, 7, 9)]) == names


@given(st.data())
def test_names_follow_their_texts_through_any_moves(data: st.DataObject) -> None:
    rows, alive, called = RowNames(), dict[int, np.ndarray](), dict[int, int]()
    for _ in range(data.draw(st.integers(1, 12))):
        alive = {k: np.append(v, data.draw(st.integers(0, 2))) for k, v in alive.items() if data.draw(st.booleans())}
        for _ in range(data.draw(st.integers(0, 2))):
            alive[len(called)] = text(1000 + len(called), data.draw(st.integers(0, 2)))  # begins like no other
            called[len(called)] = -1
        order = data.draw(st.permutations(list(alive)))
        names = rows.names(range(len(order)), [alive[key] for key in order])
        for key, name in zip(order, names, strict=True):
            assert called[key] in (-1, name)
            called[key] = name
    names_given = [name for name in called.values() if name >= 0]
    assert len(set(names_given)) == len(names_given)
