"""Searching one shard: compiled binary searches over its suffix array, and nothing that allocates on the way.

`tokens` is the shard's text, every document closed by a separator that is larger than any token; `suffixes` holds the
positions of all other tokens, sorted by what follows; `starts[t]` is the first suffix that begins with token t or a
later one. A query holds no separator, so a comparison always ends inside the text and never crosses a document.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.numeric.compiled import compiled

Array = NDArray[Any]
Int = int | np.signedinteger[Any]
Span = tuple[int, int]


@compiled
def _order(tokens: Array, place: Int, query: Array, skip: int) -> int:
    """How the text at `place` compares with the query from its token `skip` on: -1, 0 (it begins with it) or 1."""
    for i in range(skip, len(query)):
        token = np.int64(tokens[place + i])
        if token != query[i]:
            return -1 if token < query[i] else 1
    return 0


@compiled
def _lower(tokens: Array, suffixes: Array, query: Array, skip: int, low: Int, high: Int) -> Any:
    """The first suffix in [low, high) that is not before the query."""
    while low < high:
        middle = (low + high) >> 1
        if _order(tokens, np.int64(suffixes[middle]), query, skip) < 0:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _upper(tokens: Array, suffixes: Array, query: Array, skip: int, low: Int, high: Int) -> Any:
    """The first suffix in [low, high) after all that begin with the query; in steps that double, as most are near."""
    step = 1
    while low + step < high and _order(tokens, np.int64(suffixes[low + step]), query, skip) <= 0:
        low += step
        step *= 2
    high = min(high, low + step)
    while low < high:
        middle = (low + high) >> 1
        if _order(tokens, np.int64(suffixes[middle]), query, skip) <= 0:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def known(context: Array, vocabulary: int) -> int:
    """Where the end of the context begins that has only ids of this vocabulary."""
    for i in range(len(context) - 1, -1, -1):
        if context[i] < 0 or context[i] >= vocabulary:
            return i + 1
    return 0


@compiled
def find(tokens: Array, suffixes: Array, starts: Array, query: Array) -> Span:
    """The suffixes that begin with the query, as a half-open span; of an empty query, all."""
    if len(query) == 0:
        return 0, len(suffixes)
    first, last = np.int64(starts[query[0]]), np.int64(starts[query[0] + 1])
    low = _lower(tokens, suffixes, query, 1, first, last)
    return low, _upper(tokens, suffixes, query, 1, low, last)


@compiled
def longest(tokens: Array, suffixes: Array, starts: Array, context: Array, least: int) -> tuple[int, int, int]:
    """The longest end of the context that occurs; its length and span. Length -1: it is shorter than `least`.

    Whether an end occurs falls with its length: it is doubled until one does not, then halved in between.
    """
    size = len(context)
    good, bad, low = 0, size + 1, 0
    length = max(least, min(2, size))
    while good + 1 < bad:
        query = context[size - length :]
        first, last = np.int64(starts[query[0]]), np.int64(starts[query[0] + 1])
        at = _lower(tokens, suffixes, query, 1, first, last)
        if at < last and _order(tokens, np.int64(suffixes[at]), query, 1) == 0:
            good, low = length, at
        elif length <= least:
            return -1, 0, 0
        else:
            bad = length
        length = min(2 * good, size) if bad > size else (good + bad) >> 1
    if good == 0:
        return 0, 0, len(suffixes)
    query = context[size - good :]
    return good, low, _upper(tokens, suffixes, query, 1, low, np.int64(starts[query[0] + 1]))


@compiled
def narrow(tokens: Array, suffixes: Array, low: int, high: int, length: int, token: int) -> Span:
    """Of suffixes that agree in `length` tokens, those that go on with `token`."""
    end = high
    while low < high:
        middle = (low + high) >> 1
        if np.int64(tokens[np.int64(suffixes[middle]) + length]) < token:
            low = middle + 1
        else:
            high = middle
    return low, _run(tokens, suffixes, low, end, length, token)


@compiled
def _run(tokens: Array, suffixes: Array, low: int, high: int, length: int, token: Int) -> int:
    """Where the suffixes that go on with `token` end; they begin at `low`, if there are any."""
    step = 1
    while low + step < high and np.int64(tokens[np.int64(suffixes[low + step]) + length]) <= token:
        low += step
        step *= 2
    high = min(high, low + step)
    while low < high:
        middle = (low + high) >> 1
        if np.int64(tokens[np.int64(suffixes[middle]) + length]) <= token:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def advance(tokens: Array, suffixes: Array, fresh: Array, length: int, low: int, high: int) -> tuple[int, int, int]:
    """The suffixes of a span that agree in `length` tokens, where they go on with all of `fresh`; else length -1."""
    for token in fresh:
        low, high = narrow(tokens, suffixes, low, high, length, token)
        if low == high:
            return -1, 0, 0
        length += 1
    return length, low, high


@compiled
def histogram(tokens: Array, suffixes: Array, low: int, high: int, length: int, end: int) -> tuple[Array, Array]:
    """Which tokens follow suffixes that agree in `length` tokens, ascending, and how often; `end` is the separator."""
    ids, counts = np.empty(16, np.int64), np.empty(16, np.int64)
    used = 0
    while low < high:
        token = np.int64(tokens[np.int64(suffixes[low]) + length])
        if token == end:  # the largest: only ends of documents are left
            break
        after = _run(tokens, suffixes, low, high, length, token)
        if used == len(ids):
            ids, counts = np.concatenate((ids, np.empty_like(ids))), np.concatenate((counts, np.empty_like(counts)))
        ids[used], counts[used] = token, after - low
        used += 1
        low = after
    return ids[:used], counts[:used]


@compiled
def gather(
    tokens: Array, suffixes: Array, first: int, high: int, stride: int, length: int, end: int, rows: Array, used: int
) -> int:
    """Copies what follows every `stride`-th suffix of [first, high) into rows[used:]; -1 after a document's end."""
    depth = rows.shape[1]
    for i in range(first, high, stride):
        place = np.int64(suffixes[i]) + length
        ended = False
        for d in range(depth):
            token = np.int64(-1) if ended else np.int64(tokens[place + d])
            ended = ended or token == end
            rows[used, d] = -1 if ended else token
        used += 1
    return used
