"""N-gram cache: which runs of draft tokens the target says in one token, learnt as the target says them.

OmniDraft's cache (arXiv 2507.02659). Only a draft aid: a wrong or missing run costs time, never exactness. Bounded in
bytes, the run not seen for longest goes first. Cost: a dictionary look-up for each token of a match.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import InputError
from outrider.core.tree import NOTHING
from outrider.draft.model.vocabulary_map import VocabularyMap, fingerprint

ENTRY = 160  # bytes of a dictionary entry with its value, besides the key's own
UNIT = 4  # bytes of a token in a key
LONGEST = 32  # tokens of a run that is still worth keeping


@dataclass(slots=True)
class NgramCache:
    vocabularies: int = 0  # fingerprint of the pair that the ids belong to
    memory_bytes: int = 4 << 20
    used: int = 0  # bytes
    _tokens: dict[bytes, int] = field(default_factory=dict)  # run -> target token; the one learnt last stands last
    _prefixes: dict[bytes, int] = field(default_factory=dict)  # beginning of runs -> how many of them

    def __len__(self) -> int:
        return len(self._tokens)

    def learn(self, token: int, run: Sequence[int]) -> None:
        """The target said in `token` what the draft's tokenizer spells as `run`."""
        if not 2 <= len(run) <= LONGEST:
            return
        key = pack(run)
        if self._tokens.pop(key, None) is None:
            self._count(key, 1)
        self._tokens[key] = int(token)
        while self.used > self.memory_bytes:
            oldest = next(iter(self._tokens))
            del self._tokens[oldest]
            self._count(oldest, -1)

    def token(self, key: bytes) -> int:
        """The target token of a packed run, or NOTHING."""
        return self._tokens.get(key, NOTHING)

    def goes_on(self, key: bytes) -> bool:
        """Whether some longer run begins with this packed one."""
        return key in self._prefixes

    def longest(self, key: bytes) -> tuple[int, int, bool]:
        """The longest run that `key` begins with: its target token, its length (0: none), and whether `key` ended
        where a longer run could still go on."""
        token, length = NOTHING, 0
        for end in range(UNIT, len(key) + 1, UNIT):
            part = key[:end]
            if part in self._tokens:
                token, length = self._tokens[part], end // UNIT
            if part not in self._prefixes:
                return token, length, False
        return token, length, bool(key)

    def _count(self, key: bytes, change: int) -> None:
        """Account for one run that came or went, and for its beginnings."""
        self.used += change * (ENTRY + len(key))
        for end in range(UNIT, len(key), UNIT):
            part = key[:end]
            count = self._prefixes.get(part, 0) + change
            if count:
                self._prefixes[part] = count
            else:
                del self._prefixes[part]
            if count == max(change, 0):  # it was not there before, or is no longer
                self.used += change * (ENTRY + len(part))

    def memory(self) -> dict[str, NDArray[Any]]:
        return {
            "vocabularies": np.array([self.vocabularies], dtype=np.int64),
            "tokens": np.fromiter(self._tokens.values(), dtype=np.int64, count=len(self._tokens)),
            "lengths": np.fromiter((len(key) // UNIT for key in self._tokens), dtype=np.int64, count=len(self._tokens)),
            "runs": np.frombuffer(b"".join(self._tokens), dtype=np.int32),
        }

    def remember(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        try:
            known, tokens, lengths, runs = (arrays[name] for name in ("vocabularies", "tokens", "lengths", "runs"))
            ends = np.cumsum(lengths, dtype=np.int64).tolist()
            whole = len(tokens) == len(lengths) and (ends[-1] if ends else 0) == len(runs) and (lengths > 0).all()
        except (KeyError, TypeError, ValueError):
            whole = False
        if not whole:
            raise InputError("the memory holds no cache of merged tokens; give a file saved with this method")
        if known.tolist() != [self.vocabularies]:
            raise InputError("the cache of merged tokens belongs to other vocabularies; save one with this pair")
        self.forget()
        begin = 0
        for token, end in zip(tokens.tolist(), ends, strict=True):
            self.learn(token, runs[begin:end].tolist())
            begin = end

    def forget(self) -> None:
        self._tokens.clear()
        self._prefixes.clear()
        self.used = 0


def pack(run: Sequence[int] | NDArray[np.int64]) -> bytes:
    return np.array(run, dtype=np.int32).tobytes()


def unpack(run: bytes) -> list[int]:
    return np.frombuffer(run, dtype=np.int32).tolist()


def cache_for(mapped: VocabularyMap, memory_bytes: int) -> NgramCache:
    return NgramCache(fingerprint(mapped.target, mapped.draft), memory_bytes)


def translate(run: Sequence[int], mapped: VocabularyMap, cache: NgramCache, ended: bool = True) -> list[int]:
    """Draft tokens as target tokens, left to right: the longest cached run first, else the token's own spelling.

    Stops before a draft token that no target token spells, and, unless the run has `ended`, before a rest that may
    still become a longer cached run.
    """
    out: list[int] = []
    key, at = pack(run), 0
    while at < len(run):
        token, length, open_end = cache.longest(key[at * UNIT : (at + LONGEST) * UNIT])
        if open_end and not ended:
            break
        if length:
            out.append(token)
        elif spelled := mapped.spelled(run[at]):
            out += spelled
        else:
            break
        at += length or 1
    return out
