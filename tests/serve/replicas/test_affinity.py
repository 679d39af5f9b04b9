"""Texts that begin alike go to one engine, unless it has too much to do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.serve.replicas.affinity import AHEAD, BLOCK, Affinity, beginnings

ENGINES = ["a", "b", "c", "d"]
SHARED = list(range(3 * BLOCK))


def send(affinity: Affinity, names: list[str], engines: list[str] = ENGINES) -> str:
    chosen = affinity.order(names, engines)[0]
    affinity.sent(names, chosen)
    return str(chosen)


def test_texts_that_begin_alike_have_names_in_common_as_far_as_they_do() -> None:
    one, other = beginnings([*SHARED, 1, 2, 3, *SHARED]), beginnings([*SHARED, *range(7, 7 + BLOCK)])
    assert one[:3] == other[:3] and one[3] != other[3]
    assert beginnings(SHARED, "salt")[0] != one[0]
    assert beginnings(SHARED[: BLOCK - 1]) == []


def test_the_engine_that_ran_a_beginning_gets_the_next_text_with_it() -> None:
    affinity = Affinity()
    home = send(affinity, beginnings([*SHARED, *range(500, 600)]))
    affinity.done(home)
    for turn in range(20):
        assert send(affinity, beginnings([*SHARED, *range(1000 * turn, 1000 * turn + 80)])) == home
        affinity.done(home)


def test_the_longest_beginning_wins() -> None:
    affinity = Affinity()
    affinity.sent(beginnings(SHARED), "a")
    affinity.sent(beginnings(SHARED[: 2 * BLOCK]), "b")
    assert affinity.order(beginnings(SHARED), ENGINES)[0] == "a"
    assert affinity.order(beginnings([*SHARED[: 2 * BLOCK], *[9] * BLOCK]), ENGINES)[0] == "b"


def test_a_busy_engine_shares_even_its_beginnings() -> None:
    affinity, names = Affinity(), beginnings(SHARED)
    where = [send(affinity, names) for _ in range(40)]  # none of them ends
    assert len(set(where)) == len(ENGINES)
    assert max(where.count(one) for one in ENGINES) - min(where.count(one) for one in ENGINES) <= AHEAD + 1


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.sets(st.sampled_from(ENGINES), min_size=1))
def test_only_engines_that_are_there_are_chosen(texts: list[int], alive: set[str]) -> None:
    affinity = Affinity()
    for text in texts:
        send(affinity, beginnings([text] * 40))
    assert set(affinity.order(beginnings([texts[0]] * 40), alive)) == alive
