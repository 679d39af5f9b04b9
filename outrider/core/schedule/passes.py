"""A pass that may fail: tried once more plainly, then in halves, so that only the guilty rows end.

Exact: a tree is dropped for one step at most, and text that ran stays. Cost: nothing where nothing fails.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.errors import OutriderError, PassFailed
from outrider.core.protocols import Target
from outrider.core.records import Needs, Piece, Scores
from outrider.core.tree import root

log = logging.getLogger("outrider")


@dataclass(slots=True)
class Ran:
    """What a pass brought, by slot."""

    scores: dict[int, Scores] = field(default_factory=dict)
    pieces: dict[int, Piece] = field(default_factory=dict)  # as they ran: where a pass failed, without candidates
    failed: dict[int, Exception] = field(default_factory=dict)


def run_pass(target: Target, pieces: Sequence[Piece], needs: Needs) -> Ran:
    """Changes state: what ran of the text is committed."""
    ran = Ran()
    try:
        _run(target, pieces, needs, ran)
    except Exception as error:
        log.warning("a pass over %d sequences failed, trying it plainly: %r", len(pieces), error, exc_info=error)
        _bisect(target, [_plain(piece) for piece in pieces], needs, ran)
    return ran


def _run(target: Target, pieces: Sequence[Piece], needs: Needs, ran: Ran) -> None:
    for piece, scores in zip(pieces, target.run(pieces, needs), strict=True):
        ran.scores[piece.slot], ran.pieces[piece.slot] = scores, piece


def _bisect(target: Target, pieces: Sequence[Piece], needs: Needs, ran: Ran) -> None:
    try:
        _run(target, pieces, needs, ran)
    except Exception as error:
        if len(pieces) == 1:
            failure = error
            if not isinstance(error, OutriderError):
                failure = PassFailed(f"the model could not run this request: {type(error).__name__}: {error}")
                failure.__cause__ = error
            ran.failed[pieces[0].slot] = failure
            return
        half = len(pieces) // 2
        _bisect(target, pieces[:half], needs, ran)
        _bisect(target, pieces[half:], needs, ran)


def _plain(piece: Piece) -> Piece:
    return piece if piece.tree is None else Piece(piece.slot, tree=root(int(piece.tree.tokens[0])))
