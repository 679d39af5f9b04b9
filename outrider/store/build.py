"""Building a store: tokenise a corpus, sort the suffixes of one shard after the other, go on after an interruption.

Paper: infini-gram (arXiv 2401.17377). Sorting is libdivsufsort's, on the big-endian bytes of the tokens, whose order is
the order of the tokens; offsets inside a token are dropped. Memory: about five times `shard_bytes` while sorting, the
tokens of one shard and some megabytes of text while reading, whatever the size of the corpus.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from outrider.core.errors import InputError, MissingExtra
from outrider.store.corpus import Corpus, TextPiece, pieces, scan
from outrider.store.format import (
    BLOCK,
    MANIFEST,
    CorpusEntry,
    Manifest,
    open_shard,
    read_manifest,
    refuse_compact,
    separator,
    write_manifest,
    write_shard,
)
from outrider.store.tokens import Encode, encoder, fingerprint, vocabulary

log = logging.getLogger("outrider")

SHARD_BYTES = 1 << 29  # of tokens: sorting then takes about 2.5 GiB
SMALLEST, LARGEST = 1 << 12, (1 << 31) - 1
PIECE_BYTES = 1 << 15
BATCH_BYTES = 1 << 22
LOCK = ".lock"

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Built:
    """What one call did; `shards` and `tokens` are new ones."""

    shards: int
    tokens: int
    documents: int
    skipped_files: int
    skipped_lines: int


def build(
    root: Path, tokenizer: Any, name: str, out: Path, *, shard_bytes: int = SHARD_BYTES, field: str = "text",
    add: bool = False, on_progress: Progress = lambda done, total, doing: None,
) -> Built:  # fmt: skip
    """Indexes the corpus into the store `out`; goes on where an interrupted call ended. Changes the folder `out`.

    `add` puts another corpus into a store that has one. A corpus that is in the store already is not read again.
    """
    sorter()
    if not SMALLEST <= shard_bytes <= LARGEST:
        raise InputError(f"--shard-bytes {shard_bytes}: use {SMALLEST:,} to {LARGEST:,}")
    manifest = _manifest(out, tokenizer, name)
    corpus = scan(root, leave_out=out)
    if corpus.skipped:
        log.warning("%s: %d files are not UTF-8 text and are left out", root, len(corpus.skipped))
    created = not out.exists()
    with alone(out):
        if (out / MANIFEST).exists():  # another process may have finished meanwhile
            manifest = _manifest(out, tokenizer, name)
        for stale in out.glob(".*.partial"):
            stale.unlink()
        entry = _entry(manifest, corpus, {"shard_bytes": shard_bytes, "field": field}, add)
        done = Built(0, 0, 0, 0, 0)
        if entry.next is not None:
            done = _Filling(out, manifest, entry, corpus, encoder(tokenizer), on_progress).run()
    if not manifest.shards:
        for left in (MANIFEST, LOCK):
            (out / left).unlink(missing_ok=True)
        if created:
            out.rmdir()
        raise InputError(f"--corpus {root}: no text was found in its {len(corpus.files):,} files; check --field")
    if done.skipped_lines:
        log.warning("%s: %d lines are no JSON or have no text in %r", root, done.skipped_lines, field)
    return done


def merge(out: Path, shard_bytes: int = SHARD_BYTES, on_progress: Progress = lambda done, total, doing: None) -> int:
    """Joins neighbouring shards that together fit into `shard_bytes`; how many there are then. Changes the folder."""
    sorter()
    with alone(out):
        manifest = read_manifest(out)
        if manifest.unfinished is not None:
            raise InputError(f"{out}: its build is not finished; finish it first with: outrider index build")
        refuse_compact(out, manifest)
        groups: list[list[str]] = []
        room = 0
        for name in manifest.shards:
            size = open_shard(out / name, manifest.fingerprint).tokens.nbytes
            if not groups or size > room:
                groups.append([])
                room = shard_bytes
            groups[-1].append(name)
            room -= size
        for i, group in enumerate(groups):
            on_progress(i, len(groups), f"joining {len(group)} shards")
            if len(group) > 1:
                _join(out, manifest, group)
        return len(manifest.shards)


def sort_shard(
    path: Path, tokens: NDArray[Any], documents: int, vocabulary: int, fingerprint: str
) -> None:  # fmt: skip
    """Writes the shard of these big-endian tokens; each document ends with a separator, which no suffix begins with."""
    width = tokens.dtype.itemsize
    order = sorter()(tokens.view(np.uint8))
    starts = np.zeros(vocabulary + 1, dtype=np.uint32)
    for i in range(0, len(tokens), BLOCK):
        block = tokens[i : i + BLOCK].astype(np.int64)
        starts[1:] += np.bincount(block[block < vocabulary], minlength=vocabulary).astype(np.uint32)
    np.cumsum(starts, out=starts)

    def suffixes() -> Iterator[NDArray[np.uint32]]:
        left = len(tokens) - documents  # the separators are the largest, so they come last
        for i in range(0, len(order), BLOCK):
            block = order[i : i + BLOCK]
            aligned = (block[block % width == 0] // width).astype(np.uint32)[:left]
            left -= len(aligned)
            yield aligned

    write_shard(path, tokens, suffixes(), starts, documents, fingerprint)


class _Filling:
    """Reads a corpus into the buffer of one shard, sorts it when it is full, and notes how far it came."""

    def __init__(
        self, out: Path, manifest: Manifest, entry: CorpusEntry, corpus: Corpus, encode: Encode, on_progress: Progress
    ) -> None:
        self.out, self.manifest, self.entry, self.corpus = out, manifest, entry, corpus
        self.encode, self.on_progress = encode, on_progress
        self.shard_bytes = int(entry.settings["shard_bytes"])
        width = manifest.width
        self.buffer = np.empty(self.shard_bytes // width, dtype=f">u{width}")
        self.used = self.documents = self.tokens = self.shards = self.total_documents = 0
        self.bad = entry.skipped_lines
        self.at = list(entry.next or (0, 0))
        self.open = False  # inside a document
        self.before = [0, *np.cumsum(corpus.sizes).tolist()]

    def run(self) -> Built:
        write_manifest(self.out, self.manifest)  # before the first shard, so that a folder with shards has one
        for group, ids in self._encoded():
            if self.used + len(ids) + 1 > len(self.buffer):
                self._close()
                if len(ids) + 1 > len(self.buffer):
                    file = self.corpus.files[group.file]
                    raise InputError(
                        f"{file}: has a document of {len(ids):,} tokens; build anew with more --shard-bytes"
                    )
            self.buffer[self.used : self.used + len(ids)] = ids
            self.used += len(ids)
            self.open |= bool(ids)
            if group.ends:
                self._separate()
            self.bad += group.bad
            assert group.after is not None
            self.at = [group.file, group.after]
        self._close()
        self.entry.next = None
        write_manifest(self.out, self.manifest)
        return Built(self.shards, self.tokens, self.total_documents, len(self.corpus.skipped), self.bad)

    def _separate(self) -> None:
        if self.open:
            self.buffer[self.used] = separator(self.manifest.width)
            self.used += 1
            self.documents += 1
            self.open = False

    def _close(self) -> None:
        """The buffer becomes a shard, the manifest says so, and reading could start again after it."""
        self._separate()
        self.entry.next, self.entry.skipped_lines = self.at, self.bad
        if not self.used:
            return
        name = f"{self.manifest.made:05d}.shard"
        self._report(f"sorting shard {self.manifest.made + 1}")
        sort_shard(
            self.out / name, self.buffer[: self.used], self.documents, self.manifest.vocabulary,
            self.manifest.fingerprint,
        )  # fmt: skip
        self.manifest.shards.append(name)
        self.manifest.made += 1
        write_manifest(self.out, self.manifest)
        self.tokens += self.used - self.documents
        self.total_documents += self.documents
        self.shards += 1
        self.used = self.documents = 0

    def _encoded(self) -> Iterator[tuple[TextPiece, Sequence[int]]]:
        """Units that reading can go on after, each with its token ids: the last piece of a unit stands for it."""
        waiting: list[int] = []
        for batch in self._batches():
            self._report("tokenising")
            for piece, ids in zip(batch, self.encode([piece.text for piece in batch]), strict=True):
                if piece.after is None:
                    waiting += ids
                    continue
                yield piece, waiting + ids if waiting else ids
                waiting = []

    def _batches(self) -> Iterator[list[TextPiece]]:
        batch: list[TextPiece] = []
        size = 0
        file, start = self.at
        width = min(PIECE_BYTES, self.shard_bytes // 16)
        for piece in pieces(self.corpus, file, start, width, str(self.entry.settings["field"])):
            batch.append(piece)
            size += len(piece.text) + 64
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _report(self, doing: str) -> None:
        self.on_progress(self.before[self.at[0]] + self.at[1], self.corpus.bytes, doing)


def _join(out: Path, manifest: Manifest, group: list[str]) -> None:
    parts = [open_shard(out / name, manifest.fingerprint) for name in group]
    tokens = np.empty(sum(len(part.tokens) for part in parts), dtype=f">u{manifest.width}")
    np.concatenate([part.tokens for part in parts], out=tokens)
    name = f"{manifest.made:05d}.shard"
    sort_shard(
        out / name, tokens, sum(part.documents for part in parts), manifest.vocabulary, manifest.fingerprint
    )  # fmt: skip
    place = manifest.shards.index(group[0])
    manifest.shards[place : place + len(group)] = [name]
    manifest.made += 1
    write_manifest(out, manifest)
    for old in group:  # a reader that has them mapped keeps them
        (out / old).unlink(missing_ok=True)


def _manifest(out: Path, tokenizer: Any, name: str) -> Manifest:
    wanted = fingerprint(tokenizer)
    if not (out / MANIFEST).exists():
        if out.exists() and (not out.is_dir() or any(not p.name.startswith(".") for p in out.iterdir())):
            raise InputError(f"--out {out}: is there already and is no store; choose another folder")
        return Manifest(name, wanted, vocabulary(tokenizer))
    manifest = read_manifest(out)
    if manifest.fingerprint != wanted:
        raise InputError(
            f"--out {out}: was built with the tokenizer of {manifest.tokenizer!r} ({manifest.fingerprint}), "
            f"not of {name!r} ({wanted}); choose another folder"
        )
    return manifest


def _entry(manifest: Manifest, corpus: Corpus, settings: dict[str, Any], add: bool) -> CorpusEntry:
    """The corpus's place in the manifest, old or new."""
    path = str(corpus.root.resolve())
    begun = manifest.unfinished
    for entry in manifest.corpora:
        if entry.path != path:
            continue
        if entry.fingerprint != corpus.fingerprint:
            remedy = "choose another --out, or put new files into a folder of their own and --add it"
            raise InputError(f"--corpus {corpus.root}: has changed since it was indexed; {remedy}")
        if entry is begun and entry.settings != settings:
            was = ", ".join(f"--{key.replace('_', '-')} {value}" for key, value in entry.settings.items())
            raise InputError(f"--corpus {corpus.root}: this build was begun with {was}; go on with the same")
        return entry
    if begun is not None:
        raise InputError(f"the build of {begun.path} is not finished; finish it first, or choose another --out")
    if manifest.corpora and not add:
        raise InputError(f"--corpus {corpus.root}: the store holds another corpus; pass --add to add this one to it")
    entry = CorpusEntry(
        path, corpus.fingerprint, len(corpus.files), corpus.bytes, settings, skipped_files=len(corpus.skipped)
    )  # fmt: skip
    manifest.corpora.append(entry)
    return entry


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """One builder at a time."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: cannot be made ({error.strerror}); choose another folder") from None
    lock = FileLock(out / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise InputError(f"{out}: another process is building it; wait for it") from None
    try:
        yield
    finally:
        lock.release()


def sorter() -> Callable[[NDArray[np.uint8]], NDArray[np.int32]]:
    try:
        from pydivsufsort import divsufsort
    except ImportError:
        raise MissingExtra("building a store needs a sorter; run: pip install 'outrider[retrieval]'") from None
    return divsufsort
