"""N-gram table: token contexts to a few successors with a value each, bounded in bytes, the oldest entry leaving first.

An open-addressing hash in plain arrays, worked on by compiled code. A key is up to four tokens and the *owner* of the
entry: 0 is everybody's, a positive owner belongs to all sequences of one prompt, a negative one to a single sequence.
Reading falls back to everybody's entry; writing copies it first, so that what an owner learns stays its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import InputError
from outrider.core.numeric.compiled import compiled

SPAN = 4  # tokens of the longest key
EVERYBODY = 0
_GOLDEN, _MIX1, _MIX2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_owners = count(1)


LEAST_ENTRIES = 1024


class Table(NamedTuple):
    """[C] entries in a ring; `places` [a power of two] holds an entry's number plus 1, 0 for none."""

    keys: NDArray[np.int64]  # [C, 3]: owner, first two tokens, last two; a token stands as its id + 1, 0 for none
    ids: NDArray[np.int32]  # [C, width], -1 where there are fewer; largest value first
    values: NDArray[np.float32]  # [C, width]
    counts: NDArray[np.int32]  # [C] how often the entry was learnt from
    places: NDArray[np.int32]
    state: NDArray[np.int64]  # [2]: the next entry to write, how many are in use

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self)


def bytes_of(entries: int, width: int) -> int:
    return entries * (24 + 8 * width + 4) + 4 * _index_size(entries) + 16


def check_room(memory_bytes: int, width: int) -> None:
    """Refuse so few bytes that a table of this width would hardly hold anything."""
    if memory_bytes < (least := bytes_of(LEAST_ENTRIES, width)):
        raise InputError(f"option memory_bytes is {memory_bytes}; the least that works is {least}")


def new_table(memory_bytes: int, width: int) -> Table:
    """As many entries as fit; pages are taken from the system as they are used."""
    check_room(memory_bytes, width)
    entries = memory_bytes // (bytes_of(LEAST_ENTRIES, width) // LEAST_ENTRIES)
    while bytes_of(entries, width) > memory_bytes:
        entries = max(LEAST_ENTRIES, entries * 15 // 16)
    return Table(
        np.zeros((entries, 3), dtype=np.int64), np.zeros((entries, width), dtype=np.int32),
        np.zeros((entries, width), dtype=np.float32), np.zeros(entries, dtype=np.int32),
        np.zeros(_index_size(entries), dtype=np.int32), np.zeros(2, dtype=np.int64),
    )  # fmt: skip


def _index_size(entries: int) -> int:
    return 1 << (2 * entries - 1).bit_length()  # at most half full


def clear(table: Table) -> None:
    table.places[:] = 0
    table.state[:] = 0


def new_owner(scope: str, prompt: Sequence[int]) -> int:
    """Whose entries a sequence reads and writes."""
    if scope == "private":
        return -next(_owners)
    if scope == "prompt":
        digest = blake2b(np.asarray(prompt, dtype=np.int64).tobytes(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 2 | 1
    return EVERYBODY


def stored(table: Table) -> dict[str, NDArray[Any]]:
    """Everybody's entries, oldest first: what may outlive the requests that taught it."""
    first, used = int(table.state[0]), int(table.state[1])
    order = (np.arange(used) + (first if used == len(table.keys) else 0)) % len(table.keys)
    order = order[table.keys[order, 0] == EVERYBODY]
    return {
        "keys": table.keys[order, 1:],
        "ids": table.ids[order],
        "values": table.values[order],
        "counts": table.counts[order],
    }


def restore(table: Table, arrays: Mapping[str, NDArray[Any]], vocab_size: int, largest: float) -> None:
    """Replace everything by stored entries, the newest that fit. InputError where they are not such entries."""
    keys, ids, values, counts = (_array(arrays, name) for name in ("keys", "ids", "values", "counts"))
    wide = (len(keys), table.ids.shape[1])
    for name, array, kind, shape in (
        ("keys", keys, "i", (len(keys), 2)), ("ids", ids, "i", wide), ("values", values, "f", wide),
        ("counts", counts, "i", (len(keys),)),
    ):  # fmt: skip
        if array.shape != shape or array.dtype.kind != kind:
            raise InputError(f"stored {name} are {array.dtype} {array.shape}, not {shape}; they are of another table")
    tokens = np.concatenate([keys >> 32, keys & 0xFFFFFFFF], axis=None) if len(keys) else np.zeros(1, dtype=np.int64)
    if tokens.min() < 0 or tokens.max() > vocab_size or (ids < -1).any() or (ids >= vocab_size).any():
        raise InputError(f"stored token ids are outside 0..{vocab_size - 1}; the memory is of another vocabulary")
    if not np.isfinite(values).all() or (values < 0).any() or (values > largest).any() or (counts < 0).any():
        raise InputError(f"stored values are outside 0..{largest}; the memory is damaged, start without it")
    clear(table)
    last = slice(max(len(keys) - len(table.keys), 0), None)
    _insert(
        table, keys[last].astype(np.int64), ids[last].astype(np.int32), values[last].astype(np.float32),
        counts[last].astype(np.int32),
    )  # fmt: skip


def _array(arrays: Mapping[str, NDArray[Any]], name: str) -> NDArray[Any]:
    if name not in arrays:
        raise InputError(f"the memory has no {name}; it is of another drafter")
    return np.asarray(arrays[name])


@compiled
def _insert(
    table: Table, keys: NDArray[np.int64], ids: NDArray[np.int32], values: NDArray[np.float32],
    counts: NDArray[np.int32],
) -> None:  # fmt: skip
    for i in range(len(keys)):
        entry = claim(table, 0, keys[i, 0], keys[i, 1])
        table.ids[entry] = ids[i]
        table.values[entry] = values[i]
        table.counts[entry] = counts[i]


@compiled
def pack(window: NDArray[np.int64], order: int) -> tuple[int, int]:
    """The key of the last `order` tokens of a window [4]; tokens of -1 are none."""
    a = window[0] + 1 if order > 3 else 0
    b = window[1] + 1 if order > 2 else 0
    c = window[2] + 1 if order > 1 else 0
    return (a << 32) | b, (c << 32) | (window[3] + 1)


@compiled
def find(table: Table, owner: int, first: int, second: int) -> int:
    """The owner's entry, or else everybody's; -1 where there is neither."""
    entry = _find(table, owner, first, second)
    if entry < 0 and owner != 0:
        entry = _find(table, 0, first, second)
    return entry


@compiled
def claim(table: Table, owner: int, first: int, second: int) -> int:
    """The owner's entry, made if need be: empty, or a copy of everybody's. The oldest one of all leaves for it."""
    entry = _find(table, owner, first, second)
    if entry >= 0:
        return entry
    common = _find(table, 0, first, second) if owner != 0 else -1
    entry = table.state[0]
    if table.state[1] == len(table.keys):
        _remove(table, entry)
    else:
        table.state[1] += 1
    table.state[0] = (entry + 1) % len(table.keys)
    if common >= 0 and common != entry:
        table.ids[entry] = table.ids[common]
        table.values[entry] = table.values[common]
        table.counts[entry] = table.counts[common]
    else:
        table.ids[entry, :] = -1
        table.values[entry, :] = 0.0
        table.counts[entry] = 0
    table.keys[entry, 0], table.keys[entry, 1], table.keys[entry, 2] = owner, first, second
    mask = len(table.places) - 1
    at = _home(owner, first, second, mask)
    while table.places[at] != 0:
        at = (at + 1) & mask
    table.places[at] = entry + 1
    return entry


@compiled
def _find(table: Table, owner: int, first: int, second: int) -> int:
    mask = len(table.places) - 1
    at = _home(owner, first, second, mask)
    while True:
        entry = table.places[at] - 1
        if entry < 0:
            return -1
        key = table.keys[entry]
        if key[0] == owner and key[1] == first and key[2] == second:
            return entry
        at = (at + 1) & mask


@compiled
def _remove(table: Table, entry: int) -> None:
    """Take an entry out of the index and close the gap, so that every probe still ends at the first empty place."""
    mask = len(table.places) - 1
    key = table.keys[entry]
    hole = _home(key[0], key[1], key[2], mask)
    while table.places[hole] != entry + 1:
        hole = (hole + 1) & mask
    at = hole
    while True:
        at = (at + 1) & mask
        if table.places[at] == 0:
            break
        other = table.keys[table.places[at] - 1]
        home = _home(other[0], other[1], other[2], mask)
        if ((at - home) & mask) >= ((at - hole) & mask):
            table.places[hole] = table.places[at]
            hole = at
    table.places[hole] = 0


@compiled
def _home(owner: int, first: int, second: int, mask: int) -> int:
    x = _mixed(np.uint64(owner) * _GOLDEN + np.uint64(first))
    return int(np.int64(_mixed(x + np.uint64(second) * _GOLDEN) & np.uint64(mask)))


@compiled
def _mixed(x: np.uint64) -> np.uint64:
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


@compiled
def size(table: Table, entry: int) -> int:
    """Successors that the entry holds."""
    count = 0
    while count < table.ids.shape[1] and table.ids[entry, count] >= 0:
        count += 1
    return count


def windows_of_text(tokens: NDArray[np.int64], start: int, end: int) -> NDArray[np.int64]:
    """[end - start, 4]: the last four tokens at each of these positions, -1 before the text begins."""
    first = max(start - SPAN + 1, 0)
    padded = np.concatenate([np.full(SPAN - 1 - (start - first), -1, dtype=np.int64), tokens[first:end]])
    return np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(padded, SPAN))


@compiled
def windows_of_tree(
    tail: NDArray[np.int64], tokens: NDArray[np.int64], parents: NDArray[np.int64]
) -> NDArray[np.int64]:
    """[nodes, 4]: the last four tokens at each node; `tail` [4] are those at node 0."""
    windows = np.empty((len(tokens), 4), dtype=np.int64)
    windows[0] = tail
    for node in range(1, len(tokens)):
        windows[node, :3] = windows[parents[node], 1:]
        windows[node, 3] = tokens[node]
    return windows
