"""Answers of the store equal those of a naive scan, over several shards and document borders."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.store.store import Store
from tests.store.conftest import make_store

V = 4
documents = st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=40), min_size=1, max_size=5)
corpora = st.lists(documents, min_size=1, max_size=3)
contexts = st.lists(st.integers(0, V - 1), max_size=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


def places(shards, query) -> list[tuple[list[int], int]]:
    """(document, position after the match) of every occurrence."""
    n = len(query)
    return [
        (document, i + n)
        for shard in shards
        for document in shard
        for i in range(len(document) - n + (n > 0))
        if document[i : i + n] == list(query)
    ]


def ids(tokens) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


@given(shards=corpora)
def test_suffixes_are_a_sorted_permutation_of_the_tokens(folder, shards) -> None:
    for shard, documents in zip(make_store(folder, shards, V).shards, shards, strict=True):
        flat = shard.tokens.tolist()
        assert sorted(shard.suffixes.tolist()) == [i for i, token in enumerate(flat) if token < V]
        assert sum(map(len, documents)) == len(shard.suffixes)
        followed = [flat[i:] for i in shard.suffixes]
        assert followed == sorted(followed)


@given(shards=corpora, query=contexts)
def test_counts_equal_naive_counting_and_never_cross_a_document(folder, shards, query) -> None:
    store = make_store(folder, shards, V)
    assert store.count(ids(query)) == len(places(shards, query))
    counts = [store.count(ids(query[len(query) - n :])) for n in range(len(query) + 1)]
    assert counts == sorted(counts, reverse=True)


def check_longest(shards, context, reach) -> None:
    ends = [context[len(context) - n :] for n in range(len(context) + 1)]
    match = reach.match
    assert match.length == max(n for n, end in enumerate(ends) if n == 0 or places(shards, end))
    assert match.count == len(places(shards, ends[match.length]))
    for i, low, high in match.spans:
        assert high - low == len(places([shards[i]], ends[match.length]))


@given(shards=corpora, context=contexts)
def test_the_longest_match_and_what_follows_equal_a_naive_scan(folder, shards, context) -> None:
    store = make_store(folder, shards, V)
    reach = store.longest(ids(context))
    check_longest(shards, context, reach)
    found = places(shards, context[len(context) - reach.match.length :])
    expected = Counter(document[end] for document, end in found if end < len(document))
    tokens, counts = store.next_tokens(reach.match)
    assert dict(zip(tokens.tolist(), counts.tolist(), strict=True)) == expected
    rows = store.continuations(reach.match, 1000, 5)
    naive = [(document[end : end + 5] + [-1] * 5)[:5] for document, end in found]
    assert sorted(rows.tolist()) == sorted(naive)


@given(shards=corpora, context=contexts, more=st.lists(st.integers(0, V - 1), max_size=5))
def test_advancing_equals_searching_afresh(folder, shards, context, more) -> None:
    store = make_store(folder, shards, V)
    reach = store.longest(ids(context))
    for i in range(len(more)):
        reach = store.advance(reach, ids(context + more[: i + 1]), 1)
    check_longest(shards, context + more, reach)
    at_once = store.advance(store.longest(ids(context)), ids(context + more), len(more))
    check_longest(shards, context + more, at_once)


@given(shards=corpora, most=st.integers(1, 9))
def test_a_sample_of_the_continuations_is_evenly_spread_over_the_shards(folder, shards, most) -> None:
    store = make_store(folder, shards, V)
    match = store.longest(ids([])).match
    every, some = store.continuations(match, 10**6, 3), store.continuations(match, most, 3)
    stride = -(-len(every) // most)
    assert len(some) <= most
    assert some.tolist() == every[::stride].tolist()


def test_ids_that_the_store_does_not_have_match_nothing(make) -> None:
    store = make([[[0, 1, 2, 3]]])
    for foreign in (-1, 4, 70_000, 0xFFFF):
        assert store.count(ids([foreign])) == store.count(ids([0, foreign])) == 0
        assert store.longest(ids([foreign, 0, 1])).match.length == 2
        assert store.longest(ids([0, 1, foreign])).match.length == 0
        reach = store.longest(ids([0, 1]))
        assert store.advance(reach, ids([0, 1, foreign]), 1).match.length == 0
        assert store.advance(reach, ids([0, 1, foreign, 1]), 2).match.length == 1


def test_large_vocabularies_take_32_bits(make) -> None:
    shards = [[[70_000, 5, 70_000], [0xFFFF, 5]]]
    store = make(shards, 100_000)
    assert store.shards[0].tokens.dtype == np.uint32
    assert store.count(ids([70_000])) == 2 and store.count(ids([0xFFFF, 5])) == 1
    tokens, counts = store.next_tokens(store.find(ids([5])))
    assert tokens.tolist() == [70_000] and counts.tolist() == [1]


def test_an_empty_store_matches_nothing() -> None:
    store = Store()
    reach = store.longest(ids([1, 2]))
    assert reach.match.length == 0 and reach.match.count == 0
    assert store.advance(reach, ids([1, 2, 3]), 1).match.count == 0
    assert store.count(ids([1])) == 0
