"""The FM-index says what a scan of the text says: counts, next tokens, places, and the text itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.store.fm.index import Fm, index
from outrider.store.fm.wavelet import bit, build, descend, distinct, ones, pack, symbol_at

divsufsort = pytest.importorskip("pydivsufsort", reason="building an index needs the extra retrieval").divsufsort
DOCUMENTS = st.lists(st.lists(st.sampled_from([0, 3, 4, 40, 41]), max_size=60), min_size=1, max_size=5)


def made(documents: list[list[int]]) -> Fm:
    return index([np.array(document, dtype=np.int64) for document in documents], divsufsort)


def scanned(documents: list[list[int]], query: list[int]) -> list[tuple[int, int]]:
    """Document and place of the last token of each occurrence."""
    size = len(query)
    return [
        (number, at + size - 1)
        for number, document in enumerate(documents)
        for at in range(len(document) - size + 1)
        if document[at : at + size] == query
    ]


@given(DOCUMENTS, st.lists(st.sampled_from([0, 3, 4, 40, 41, 7, 99]), min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_counts_next_tokens_places_and_text_are_those_of_a_scan(documents: list[list[int]], query: list[int]) -> None:
    fm = made(documents)
    expected = scanned(documents, query)
    span = fm.find(np.array(query))
    assert fm.count(np.array(query)) == len(expected) == span[1] - span[0]
    ends = fm.ends(span)
    numbers = fm.documents_of(ends)
    assert sorted(zip(numbers.tolist(), (ends - fm.starts[numbers]).tolist(), strict=True)) == expected
    following: dict[int, int] = {}
    for number, at in expected:
        if at + 1 < len(documents[number]):
            following[documents[number][at + 1]] = following.get(documents[number][at + 1], 0) + 1
    ids, counts = fm.following(span)
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == following and ids.tolist() == sorted(following)
    assert [fm.document(number).tolist() for number in range(len(documents))] == documents
    assert fm.size == sum(map(len, documents)) == fm.count(np.array([], dtype=np.int64))


def test_a_text_is_read_from_left_to_right_and_never_over_a_border() -> None:
    fm = made([[1, 2, 3], [4, 1]])
    assert fm.count(np.array([1, 2])) == 1 and fm.count(np.array([2, 1])) == 0
    assert fm.count(np.array([3, 4])) == 0  # over the border
    assert fm.following(fm.find(np.array([3])))[0].tolist() == []


def test_many_symbols_and_long_texts_agree_too() -> None:
    rng = np.random.default_rng(0)
    text = rng.integers(0, 300, 20_000) ** 2  # ids with gaps, above 16 bits
    fm = made([text[:9000].tolist(), text[9000:].tolist()])
    assert fm.text(0, len(text) + 1).tolist() == [*text[:9000].tolist(), -1, *text[9000:].tolist()]
    for _ in range(200):
        at, size = int(rng.integers(0, 19_000)), int(rng.integers(1, 4))
        query = text[at : at + size]
        windows = np.lib.stride_tricks.sliding_window_view
        want = sum(int((windows(part, size) == query).all(1).sum()) for part in (text[:9000], text[9000:]))
        assert fm.count(query) == want


@given(st.lists(st.integers(0, 12), min_size=1, max_size=400), st.integers(0, 400), st.integers(0, 400))
@settings(max_examples=100, deadline=None)
def test_the_wavelet_matrix_counts_as_numpy_does(symbols: list[int], first: int, second: int) -> None:
    values = np.array(symbols)
    tree, zeros = build(values, 4)
    low, high = sorted((first % (len(values) + 1), second % (len(values) + 1)))
    for symbol in range(13):
        at = [descend(tree.words, tree.counts, zeros, symbol, place) for place in (0, low, high)]
        assert [place - at[0] for place in at[1:]] == [int((values[:place] == symbol).sum()) for place in (low, high)]
    ids, counts = distinct(tree.words, tree.counts, zeros, low, high)
    want, often = np.unique(values[low:high], return_counts=True)
    assert ids.tolist() == want.tolist() and counts.tolist() == often.tolist()
    if low < len(values):
        symbol, place = symbol_at(tree.words, tree.counts, zeros, low)
        assert symbol == values[low] and place == descend(tree.words, tree.counts, zeros, symbol, low)


@given(st.lists(st.booleans(), min_size=1, max_size=1500), st.integers(0, 1500))
@settings(max_examples=60, deadline=None)
def test_bits_are_counted_over_words_and_blocks(bits: list[bool], place: int) -> None:
    packed = pack(np.array([bits], dtype=np.uint8))
    place %= len(bits)
    assert ones(packed.words, packed.counts, 0, place) == sum(bits[:place])
    assert ones(packed.words, packed.counts, 0, len(bits)) == sum(bits)
    assert bit(packed.words, 0, place) == bits[place]
