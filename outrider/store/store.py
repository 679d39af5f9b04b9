"""A store opened for reading: counts and continuations for contexts of any length, over all its shards.

Paper: infini-gram (arXiv 2401.17377). Estimates are plain ratios of counts at the longest end of the context that
occurs; nothing is smoothed. Read-only and memory-mapped: any number of processes share one copy in the page cache.
Cost: a few binary searches a shard for a new context, one or two for a context that grew by a token.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import InputError
from outrider.store import search
from outrider.store.format import Manifest, Shard, open_shard, read_manifest, refuse_compact, separator

log = logging.getLogger("outrider")

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Match:
    """`length` tokens and where they occur: (shard, first suffix, end) wherever they do."""

    length: int
    spans: tuple[tuple[int, int, int], ...]

    @property
    def count(self) -> int:
        return sum(high - low for _, low, high in self.spans)


@dataclass(frozen=True, slots=True)
class Reach:
    """Per shard, the longest end of a context that occurs there: (length, first suffix, end).

    Only the longest over all shards counts: a length of -1 says that this shard has only a shorter one.
    """

    shards: tuple[tuple[int, int, int], ...] = ()

    @property
    def match(self) -> Match:
        """The longest of all; nothing at all matches every place with length 0."""
        length = max((found[0] for found in self.shards), default=0)
        return Match(length, tuple((i, low, high) for i, (n, low, high) in enumerate(self.shards) if n == length))


@dataclass(frozen=True, slots=True)
class Store:
    shards: tuple[Shard, ...] = ()  # none: an empty store, in which nothing matches
    manifest: Manifest | None = None

    @property
    def tokens(self) -> int:
        return sum(len(shard.suffixes) for shard in self.shards)

    @property
    def vocabulary(self) -> int:
        return len(self.shards[0].starts) - 1 if self.shards else 0

    def count(self, query: Ids) -> int:
        return self.find(query).count

    def find(self, query: Ids) -> Match:
        """Where exactly these tokens occur."""
        spans = []
        if search.known(query, self.vocabulary) == 0:
            for i, shard in enumerate(self.shards):
                low, high = search.find(shard.tokens, shard.suffixes, shard.starts, query)
                if low < high:
                    spans.append((i, low, high))
        return Match(len(query), tuple(spans))

    def longest(self, context: Ids) -> Reach:
        """The longest end of the context that occurs. A later shard is not searched for shorter ones."""
        context = context[search.known(context, self.vocabulary) :]
        found, best = [], 0
        for shard in self.shards:
            longest = search.longest(shard.tokens, shard.suffixes, shard.starts, context, best)
            best = max(best, longest[0])
            found.append(longest)
        return Reach(tuple(found))

    def advance(self, reach: Reach, context: Ids, fresh: int) -> Reach:
        """The same for a context that grew by `fresh` tokens, from the answer before.

        An end that was the longest and goes on with the new tokens is the longest again: nothing longer can have begun.
        """
        best = max((span[0] for span in reach.shards), default=0)
        if best > 0 and search.known(context, self.vocabulary) <= len(context) - fresh:
            new = context[len(context) - fresh :]
            found = tuple(
                search.advance(s.tokens, s.suffixes, new, *span) if span[0] == best else (-1, 0, 0)
                for s, span in zip(self.shards, reach.shards, strict=True)
            )
            if any(span[0] > 0 for span in found):
                return Reach(found)
        return self.longest(context)

    def next_tokens(self, match: Match) -> tuple[Ids, Ids]:
        """Which tokens follow, ascending, and how often: exact, ends of documents left out."""
        counts: dict[int, int] = {}
        for i, low, high in match.spans:
            shard = self.shards[i]
            end = separator(shard.tokens.itemsize)
            ids, occurrences = search.histogram(shard.tokens, shard.suffixes, low, high, match.length, end)
            for token, count in zip(ids.tolist(), occurrences.tolist(), strict=True):
                counts[token] = counts.get(token, 0) + count
        ordered = sorted(counts)
        return np.array(ordered, dtype=np.int64), np.array([counts[t] for t in ordered], dtype=np.int64)

    def continuations(self, match: Match, most: int, depth: int) -> NDArray[np.int32]:
        """[rows, depth] what followed: all occurrences, or `most` of them at even distances; -1 after the end."""
        stride = max(-(-match.count // most), 1)
        rows = np.empty((-(-match.count // stride), depth), dtype=np.int32)
        used = ahead = 0  # `ahead`: places of the next shard to pass by, so that distances stay even across shards
        for i, low, high in match.spans:
            shard = self.shards[i]
            end = separator(shard.tokens.itemsize)
            taken = search.gather(
                shard.tokens, shard.suffixes, low + ahead, high, stride, match.length, end, rows, used
            )  # fmt: skip
            ahead += (taken - used) * stride - (high - low)
            used = taken
        return rows

    def warm(self) -> None:
        """Touches every page once, so that later searches wait for no disk."""
        for shard in self.shards:
            for array in (shard.tokens, shard.suffixes, shard.starts):
                int(array.view(np.uint8)[::4096].max(initial=0))


def open_store(folder: Path | str, fingerprint: str | None = None, owner: str = "this model") -> Store:
    """Opens every shard; refuses a store of another tokenizer than the one with this fingerprint."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    if fingerprint is not None and manifest.fingerprint != fingerprint:
        raise InputError(
            f"{folder}: built with the tokenizer of {manifest.tokenizer!r} ({manifest.fingerprint}), not with that of "
            f"{owner} ({fingerprint}); build one with: outrider index build --tokenizer MODEL"
        )
    refuse_compact(folder, manifest)
    if manifest.unfinished is not None:
        log.warning("%s: its build was not finished; run the same `outrider index build` again to finish it", folder)
    return Store(tuple(open_shard(folder / name, manifest.fingerprint) for name in manifest.shards), manifest)


def corpora(manifest: Manifest) -> list[dict[str, Any]]:
    """What was indexed, as plain values."""
    return [
        {"path": c.path, "files": c.files, "bytes": c.bytes, "skipped_files": c.skipped_files,
         "skipped_lines": c.skipped_lines, "finished": c.next is None}
        for c in manifest.corpora
    ]  # fmt: skip


def describe(store: Store) -> dict[str, Any]:
    """What a store holds, as plain values."""
    manifest = store.manifest
    assert manifest is not None
    size = sum(shard.bytes for shard in store.shards)
    return {
        "tokenizer": manifest.tokenizer,
        "fingerprint": manifest.fingerprint,
        "vocabulary": manifest.vocabulary,
        "tokens": store.tokens,
        "documents": sum(shard.documents for shard in store.shards),
        "bytes": size,
        "bytes_per_token": size / store.tokens if store.tokens else None,
        "finished": manifest.unfinished is None,
        "shards": [
            {"file": s.path.name, "tokens": len(s.suffixes), "documents": s.documents, "bytes": s.bytes}
            for s in store.shards
        ],
        "corpora": corpora(manifest),
    }  # fmt: skip
