"""A compact store on disk: the manifest of a store, whose shards are FM-indexes instead of suffix arrays.

Such a store is built as any other and made compact shard by shard, so an interrupted build goes on where it was. It can
be counted in, continued from and searched for documents; the retrieval drafters want suffix arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import InputError
from outrider.store.build import Progress, alone, sorter
from outrider.store.fm.index import Fm, Ids, Span, index_text
from outrider.store.fm.wavelet import Bits
from outrider.store.format import (
    COMPACT,
    Manifest,
    map_sections,
    open_shard,
    read_manifest,
    separator,
    write_manifest,
    write_sections,
)
from outrider.store.store import corpora

TYPES = {
    "words": "<u8", "counts": "<u4", "zeros": "<i8", "tokens": "<u4", "marks": "<u8",
    "mark_counts": "<u4", "places": "<u4", "starts": "<u4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CompactStore:
    """All indexes of a store as one. A state is a span in each of them; documents are numbered through."""

    parts: tuple[Fm, ...]
    manifest: Manifest

    @property
    def tokens(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def documents(self) -> int:
        return sum(part.documents for part in self.parts)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def everything(self) -> tuple[Span, ...]:
        return tuple(part.everything for part in self.parts)

    def narrow(self, state: tuple[Span, ...], token: int) -> tuple[Span, ...] | None:
        """The places where the state's text goes on with the token; None where it never does."""
        found = tuple(part.narrow(span, token) for part, span in zip(self.parts, state, strict=True))
        return found if any(low < high for low, high in found) else None

    def following(self, state: tuple[Span, ...]) -> tuple[Ids, Ids]:
        """Which tokens follow the state's text, ascending, and how often."""
        each = [part.following(span) for part, span in zip(self.parts, state, strict=True)]
        if len(each) == 1:
            return each[0]
        ids, where = np.unique(np.concatenate([ids for ids, _ in each]), return_inverse=True)
        return ids, np.bincount(where, np.concatenate([counts for _, counts in each]), len(ids)).astype(np.int64)

    def find(self, query: Ids) -> tuple[Span, ...]:
        return tuple(part.find(query) for part in self.parts)

    def occurrences(self, state: tuple[Span, ...]) -> int:
        return sum(high - low for low, high in state)

    def count(self, query: Ids) -> int:
        return sum(part.count(query) for part in self.parts)

    def places(self, state: tuple[Span, ...]) -> tuple[Ids, Ids]:
        """For each occurrence of the state's text, its document and where in that its last token stands."""
        documents, places, before = [], [], 0
        for part, span in zip(self.parts, state, strict=True):
            ends = part.ends(span)
            numbers = part.documents_of(ends)
            documents.append(numbers + before)
            places.append(ends - part.starts[numbers])
            before += part.documents
        return np.concatenate(documents), np.concatenate(places)

    def document(self, number: int) -> Ids:
        """The tokens of a document."""
        for part in self.parts:
            if number < part.documents:
                return part.document(number)
            number -= part.documents
        raise InputError(f"document {number}: this store has {self.documents:,}")


def compact(folder: Path, on_progress: Progress = lambda done, total, doing: None) -> None:
    """Makes every shard of a store compact that is not. Changes the folder."""
    with alone(folder):
        manifest = read_manifest(folder)
        for number, name in enumerate(list(manifest.shards)):
            if name.endswith(COMPACT):
                continue
            on_progress(number, len(manifest.shards), f"compacting shard {number + 1}")
            shard = open_shard(folder / name, manifest.fingerprint)
            made = Path(name).with_suffix(COMPACT).name
            write(folder / made, _index(shard.tokens), manifest.fingerprint)
            manifest.shards[number] = made
            write_manifest(folder, manifest)
            (folder / name).unlink()


def _index(tokens: NDArray[Any]) -> Fm:
    text = tokens.astype(np.int64)
    text[text == separator(tokens.dtype.itemsize)] = -1
    starts = np.concatenate([[0], np.flatnonzero(text < 0) + 1]).astype(np.uint32)
    return index_text(text, starts, sorter())


def write(path: Path, fm: Fm, fingerprint: str) -> None:
    """Changes the folder."""
    arrays: dict[str, NDArray[Any]] = {
        "words": fm.tree.words, "counts": fm.tree.counts, "zeros": fm.zeros, "tokens": fm.tokens,
        "marks": fm.marks.words, "mark_counts": fm.marks.counts, "places": fm.places, "starts": fm.starts,
    }  # fmt: skip

    def part(name: str) -> Callable[[], Any]:
        return lambda: iter([arrays[name].astype(TYPES[name], copy=False)])

    parts = {name: part(name) for name in TYPES}
    write_sections(path, parts, {"levels": len(fm.zeros), "documents": fm.documents, "fingerprint": fingerprint})


def read(path: Path, fingerprint: str) -> Fm:
    """Maps the file."""
    arrays, described = map_sections(path, fingerprint, lambda described: TYPES)
    rows = {"words": described.get("levels", 1), "counts": described.get("levels", 1), "marks": 1, "mark_counts": 1}
    shaped = {name: arrays[name].reshape(count, -1) for name, count in rows.items()}
    return Fm(
        Bits(shaped["words"], shaped["counts"]), arrays["zeros"], arrays["tokens"],
        Bits(shaped["marks"], shaped["mark_counts"]), arrays["places"], arrays["starts"],
    )  # fmt: skip


def open_compact(folder: Path | str, fingerprint: str | None = None, owner: str = "this model") -> CompactStore:
    """Opens every index; refuses a store of another tokenizer, and one that is not compact."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    if fingerprint is not None and manifest.fingerprint != fingerprint:
        raise InputError(f"{folder}: built with the tokenizer of {manifest.tokenizer!r}, not with that of {owner}")
    if not all(name.endswith(COMPACT) for name in manifest.shards):
        raise InputError(
            f"{folder}: not a compact store; build one with: outrider index build --fm --corpus DIR --out STORE"
        )
    return CompactStore(tuple(read(folder / name, manifest.fingerprint) for name in manifest.shards), manifest)


def describe(store: CompactStore) -> dict[str, Any]:
    """What a compact store holds, as plain values."""
    return {
        "tokenizer": store.manifest.tokenizer,
        "fingerprint": store.manifest.fingerprint,
        "vocabulary": store.manifest.vocabulary,
        "tokens": store.tokens,
        "documents": store.documents,
        "bytes": store.bytes,
        "bytes_per_token": store.bytes / store.tokens if store.tokens else None,
        "finished": store.manifest.unfinished is None,
        "shards": [
            {"file": name, "tokens": part.size, "documents": part.documents, "bytes": part.bytes}
            for name, part in zip(store.manifest.shards, store.parts, strict=True)
        ],
        "corpora": corpora(store.manifest),
    }
