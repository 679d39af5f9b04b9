"""Judging a step: what the rule of each sequence accepts of its tree, and how much of that becomes text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.core.generation import FinishReason
from outrider.core.noise import VERIFY
from outrider.core.protocols import Noise
from outrider.core.records import RowPicker, Scores, StepRecord, Verdict
from outrider.core.rows.choices import choose
from outrider.core.sequence import Running
from outrider.core.target_rows import TargetRows
from outrider.core.tree import TokenTree


def judge(
    batch: Sequence[Running], trees: Mapping[int, TokenTree], scores: Mapping[int, Scores], pick: RowPicker | None
) -> dict[int, StepRecord]:
    """The record of each sequence, by slot. Changes the sequences: their text grows, up to where it stops.

    What the target alone decides is chosen for all of them at once where that is cheaper.
    """
    asked = [(s, s.rows(scores[s.slot], trees[s.slot]), s.noise(VERIFY)) for s in batch]
    choose([(rows, noise, not s.recipe.verifier.coupled) for s, rows, noise in asked], pick)
    return {s.slot: _judged(s, trees[s.slot], scores[s.slot], rows, noise) for s, rows, noise in asked}


def _judged(s: Running, tree: TokenTree, scores: Scores, rows: TargetRows, noise: Noise) -> StepRecord:
    try:
        verdict = s.recipe.verifier.verify(tree, rows, noise)
        if s.trace is not None:
            s.trace.judge(tree, verdict, rows)
        emitted = s.emit(tree, verdict, rows)
    except Exception as error:  # one request's impossible demand must not end the others
        s.error, s.finish = error, FinishReason.ERROR
        verdict, emitted = Verdict((), s.pending), ()
    return StepRecord(tree, verdict, emitted, scores)
