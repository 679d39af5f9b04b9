"""A compact store says what the store it was made from says, in at most 3 bytes a token, and is whole on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from outrider.core.errors import InputError
from outrider.store.build import merge
from outrider.store.fm.files import compact, describe, open_compact
from outrider.store.format import check_shard
from outrider.store.store import open_store
from outrider.store.tokens import BARE
from tests.store.conftest import make_store

pytest.importorskip("pydivsufsort", reason="building an index needs the extra retrieval")
WIDE = 49_152


def corpus(size: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Documents of about 2,000 tokens in which stretches come again, as in a language; ids follow Zipf's rule."""
    rng = np.random.default_rng(seed)
    ranks = np.minimum(rng.zipf(1.25, size), vocabulary) - 1
    spread = np.where(rng.random(size) < 0.5, ranks, rng.integers(0, vocabulary, size))  # all ids occur
    text = spread.tolist()
    for at in range(0, size - 400, 400):
        source = int(rng.integers(0, at + 1))
        text[at : at + 60] = text[source : source + 60]
    return [text[at : at + 2000] for at in range(0, size, 2000)]


def test_counts_are_those_of_the_suffix_array_on_ten_thousand_n_grams_and_it_is_small(tmp_path: Path) -> None:
    documents = corpus(1_200_000, WIDE)
    plain = make_store(tmp_path / "s", [documents[:300], documents[300:]], WIDE)
    rng = np.random.default_rng(1)
    flat = [np.array(document) for document in documents]
    queries = []
    for number in range(10_000):
        document = flat[int(rng.integers(len(flat)))]
        size = int(rng.integers(1, 7))
        at = int(rng.integers(0, len(document) - size))
        query = document[at : at + size].copy()
        if number % 3 == 0:  # most of these occur nowhere
            query[int(rng.integers(size))] = rng.integers(WIDE)
        queries.append(query)
    expected = [plain.count(query) for query in queries]
    following = [plain.next_tokens(plain.find(query)) for query in queries[:500]]
    compact(tmp_path / "s")
    small = open_compact(tmp_path / "s")
    assert [small.count(query) for query in queries] == expected
    assert sum(count == 0 for count in expected) > 1000 and max(expected) > 1000
    for query, (ids, counts) in zip(queries, following, strict=False):
        found, often = small.following(small.find(query))
        assert found.tolist() == ids.tolist() and often.tolist() == counts.tolist()
    per_token = describe(small)["bytes_per_token"]
    assert per_token <= 3.0, per_token
    on_disk = sum(file.stat().st_size for file in (tmp_path / "s").glob("*.fm"))
    assert on_disk <= 3.0 * small.tokens
    assert [small.document(number).tolist() for number in (0, 299, 300, 599)] == [
        documents[number] for number in (0, 299, 300, 599)
    ]


def test_places_are_numbered_through_the_parts(tmp_path: Path) -> None:
    make_store(tmp_path / "s", [[[1, 2], [3, 1, 2]], [[2, 1, 2, 1, 2]]], 4)
    compact(tmp_path / "s")
    small = open_compact(tmp_path / "s", BARE)
    numbers, places = small.places(small.find(np.array([1, 2])))
    assert sorted(zip(numbers.tolist(), places.tolist(), strict=True)) == [(0, 1), (1, 2), (2, 2), (2, 4)]
    assert (small.documents, small.tokens) == (3, 10)
    assert small.narrow(small.find(np.array([3])), 3) is None
    with pytest.raises(InputError, match="has 3"):
        small.document(3)


def test_an_interrupted_compaction_goes_on_and_a_second_one_changes_nothing(tmp_path: Path, monkeypatch) -> None:
    make_store(tmp_path / "s", [[[1, 2]], [[2, 3]]], 4)
    import outrider.store.fm.files as files

    real, calls = files.write, []

    def failing(path: Path, *rest) -> None:
        calls.append(path.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(path, *rest)

    monkeypatch.setattr(files, "write", failing)
    with pytest.raises(KeyboardInterrupt):
        compact(tmp_path / "s")
    with pytest.raises(InputError, match="not a compact store"):
        open_compact(tmp_path / "s")
    compact(tmp_path / "s")
    assert calls == ["00000.fm", "00001.fm", "00001.fm"]
    compact(tmp_path / "s")
    assert len(calls) == 3 and open_compact(tmp_path / "s").count(np.array([2])) == 2
    assert not list((tmp_path / "s").glob("*.shard"))


def test_what_wants_suffix_arrays_names_the_compact_store_and_damage_is_seen(tmp_path: Path) -> None:
    make_store(tmp_path / "s", [[[1, 2, 3] * 50]], 4)
    compact(tmp_path / "s")
    with pytest.raises(InputError, match="outrider find"):
        open_store(tmp_path / "s")
    with pytest.raises(InputError, match="compact"):
        merge(tmp_path / "s")
    with pytest.raises(InputError, match="not with that of"):
        open_compact(tmp_path / "s", "another")
    file = tmp_path / "s" / "00000.fm"
    check_shard(file)
    data = bytearray(file.read_bytes())
    data[4100] ^= 1
    file.write_bytes(data)
    with pytest.raises(InputError, match="damaged"):
        check_shard(file)
    file.write_bytes(data[:-8])
    with pytest.raises(InputError, match="bytes and should have"):
        open_compact(tmp_path / "s")
