"""Texts that run by themselves, of draft models and tests: together, and in pieces of as many rows as are asked for.

Knows slots and token ids. Exact: where a text is cut changes no result. Cost: slices of the texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.core.protocols import Target
from outrider.core.records import NO_NEEDS, Chunk, Needs, Piece


def run_texts(target: Target, texts: Sequence[tuple[int, Sequence[int]]], needs: Needs) -> Iterator[list[Chunk]]:
    """Changes state: runs each text behind what its slot holds; all texts have a piece in every pass until they end.

    A pass has as many rows as the target asks for, shared evenly, and at least one of each text.
    """
    left = [(slot, tokens, 0) for slot, tokens in texts if len(tokens)]
    while left:
        width = max(1, target.traits.prompt_rows // len(left))
        pieces = [Piece(slot, tokens[done : done + width]) for slot, tokens, done in left]
        starts = [target.length(piece.slot) for piece in pieces]
        scores = target.run(pieces, needs)
        yield [Chunk(p.slot, start, p.tokens, s) for p, start, s in zip(pieces, starts, scores, strict=True)]
        left = [(slot, tokens, done + width) for slot, tokens, done in left if done + width < len(tokens)]


def run_all(target: Target, texts: Sequence[tuple[int, Sequence[int]]], needs: Needs = NO_NEEDS) -> None:
    """The same, where nobody looks at the scores."""
    for _ in run_texts(target, texts, needs):
        pass
