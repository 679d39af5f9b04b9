"""An engine over a toy model, with a clock that stands still, and methods to run on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.check.toy import ToyLM, ToyTarget
from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.errors import CacheFull
from outrider.core.protocols import Recipe
from outrider.core.records import Budget, Needs, Piece, Scores
from outrider.core.sampling import SamplingParams
from outrider.draft.lookup.prompt_lookup import PromptLookup
from outrider.verify.invariant import Invariant

VOCAB = 5
LM = ToyLM(VOCAB, seed=4, order=2, concentration=0.3)
PROMPTS = [[1], [2, 3, 1, 2], [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1], [3, 3, 3, 4, 3, 3, 3]]
PLAIN = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))
SAMPLED = SamplingParams(max_new_tokens=14, temperature=1.0, seed=3, frequency_penalty=0.2)


def lookup() -> Recipe:
    return Recipe("prompt-lookup", PromptLookup(), Invariant(), Fixed(Budget(4, 3)))


def letters(ids: Sequence[int]) -> str:
    return "".join(chr(ord("A") + i) for i in ids)


def engine(target: Any = None, **settings: Any) -> Engine:
    return Engine(target or ToyTarget(LM), PLAIN, decode=letters, strict=True, **settings)


def said(prompt: Sequence[int], params: SamplingParams = SAMPLED) -> list[int]:
    """What plain decoding says, alone and never interrupted."""
    return engine().submit(prompt, params).result().token_ids


class Pool(ToyTarget):
    """A cache of so many tokens, that finds beginnings of texts that ran; rows that do not fit are refused."""

    def __init__(self, tokens: int = 1 << 20, slots: int = 6, prompt_rows: int = 8, keeps: bool = True) -> None:
        super().__init__(LM, slots, prompt_rows=prompt_rows)
        self.tokens, self.keeps = tokens, keeps
        self.found: list[tuple[str, int]] = []  # the salt of each request, and how much of it was found
        self._kept: dict[str, list[tuple[int, ...]]] = {}
        self._salts: dict[int, str] = {}

    @property
    def used(self) -> int:
        return sum(len(slot.tokens) for slot in self._slots.values())

    def fits(self, rows: Mapping[int, int]) -> bool:
        return self.used + sum(rows.values()) <= self.tokens

    def acquire(self, tokens: Sequence[int] = (), salt: str = "") -> int:
        slot = super().acquire()
        same = [_common(text, tokens) for text in self._kept.get(salt, ())]
        self._slots[slot].tokens[:] = list(tokens[: max(same, default=0)])
        self.found.append((salt, len(self._slots[slot].tokens)))
        self._salts[slot] = salt
        return slot

    def release(self, slot: int) -> None:
        if self.keeps:
            self._kept.setdefault(self._salts[slot], []).append(self.committed(slot))
        super().release(slot)

    def run(self, pieces: Sequence[Piece], needs: Needs) -> list[Scores]:
        rows = {piece.slot: len(piece.tokens) or len(piece.tree or ()) for piece in pieces}
        if not self.fits(rows):
            raise CacheFull(f"{sum(rows.values())} rows do not fit beside {self.used} of {self.tokens}")
        return super().run(pieces, needs)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
