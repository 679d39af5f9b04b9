"""The last requests of which every step was kept, as documents, within a number of requests and of bytes.

A document is made when it is asked for: while a text grows, its trace costs what the engine notes and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from outrider.core.generation import Generation
from outrider.core.params import SamplingParams
from outrider.explain.document import Decode, document

MAX_BYTES = 64 << 20  # of all traces together


@dataclass(frozen=True, slots=True)
class _Kept:
    generations: tuple[Generation, ...]  # of the samples, as they ended
    params: SamplingParams
    bytes: int = 0


@dataclass(slots=True)
class Traces:
    """Changes state in `keep`; the oldest leave first."""

    decode: Decode
    model: str = ""
    requests: int = 64
    limit: int = MAX_BYTES
    _kept: OrderedDict[str, _Kept] = field(default_factory=OrderedDict)
    _bytes: int = 0

    def keep(self, id: str, generation: Generation, params: SamplingParams) -> None:
        """What became of one sample of a request."""
        if generation.trace is None:
            return
        before = self._kept.pop(id, None) or _Kept((), params)
        size = generation.trace.bytes
        self._kept[id] = _Kept((*before.generations, generation), params, before.bytes + size)
        self._bytes += size
        while self._kept and (len(self._kept) > self.requests or self._bytes > self.limit):
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.bytes

    def find(self, id: str) -> dict[str, Any] | None:
        """The document of the first sample, with those of the `others`; None where nothing is kept."""
        kept = self._kept.get(id)
        if kept is None:
            return None
        params = kept.params
        first, *others = [
            document(one, self.decode, model=self.model, stop=params.stop, skip=params.stop_token_ids)
            for one in sorted(kept.generations, key=lambda one: one.sample)
        ]
        return {"id": id, **first, "others": others}
