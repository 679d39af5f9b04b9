"""Where an answer departs from plain greedy decoding: how close the two likeliest tokens were, and whether it is a tie.

A first difference counts as a near tie where the margin is below the noise of the precision, which is measured by
scoring the same text in forwards of other widths without any tree code (`check.ties`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outrider.bench.journal import Book, Unit
from outrider.core.params import SamplingParams

if TYPE_CHECKING:
    from outrider.api import Outrider
    from outrider.bench.compare import Comparison

MAX_GAPS = 20  # first differences of a contender whose margin is looked up
TEXTS, TOKENS, LONGEST = 4, 32, 512  # what the noise is measured on: texts, tokens of each, tokens of their prompts


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer first departs from the baseline's."""

    label: str
    unit: int  # which unit of the comparison
    member: int  # which prompt of its batch
    position: int  # tokens of the answer before it
    gap: float | None = None  # between the two likeliest tokens there, in nats; None where it was not looked up
    near_tie: bool | None = None


def look_up(engine: Outrider, comparison: Comparison, params: SamplingParams, book: Book) -> None:
    """Ask plain decoding for the gaps that the book lacks, and for the noise. Changes the book."""
    params = params.with_(max_new_tokens=1, min_new_tokens=0, logprobs=min(8, engine.target.vocab_size))
    looked_up: dict[str, int] = {}
    for difference in comparison.differences:
        looked_up[difference.label] = looked_up.get(difference.label, 0) + 1
        unit = comparison.units[difference.unit]
        answer = unit.runs[comparison.baseline].outputs[difference.member]
        ids = [*unit.prompts[difference.member], *answer[: difference.position]]
        place = _place(unit, difference)
        if (
            looked_up[difference.label] > MAX_GAPS
            or len(ids) >= engine.target.max_context
            or book.gap(place) is not None
        ):
            continue
        row = engine.engine.submit(ids, params, engine.recipe("plain")).result().logprobs
        best = sorted((processed for _, _, processed in row[0].top), reverse=True) if row else []
        if len(best) > 1:
            book.keep_gap(place, best[0] - best[1])
    if comparison.differences and book.noise is None and (bound := noise(engine, comparison.units)) is not None:
        book.keep_noise(bound)


def classified(comparison: Comparison, book: Book) -> list[Difference]:
    """The differences with what the book knows of them."""
    out = []
    for difference in comparison.differences:
        gap = book.gap(_place(comparison.units[difference.unit], difference))
        tie = None if gap is None or book.noise is None else gap <= book.noise
        out.append(replace(difference, gap=gap, near_tie=tie))
    return out


def _place(unit: Unit, difference: Difference) -> tuple[str | int, ...]:
    return difference.label, unit.round, unit.case, unit.turn, difference.member


def noise(engine: Outrider, units: Sequence[Unit]) -> float | None:
    """How far another order of the same sums moves two logits apart; None where there is no such model to ask."""
    from outrider.check.reference import Job, Plain
    from outrider.check.ties import measure

    if not hasattr(engine.loaded.model, "forward"):
        return None
    prompts = {tuple(ids[-LONGEST:]): None for unit in units for ids in unit.prompts}
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True, seed=0)
    plain = Plain(engine.loaded.model, engine.target.vocab_size)
    answers = [plain.decode(Job("noise", ids, params), _watch) for ids in list(prompts)[:TEXTS]]
    return measure(plain, answers, _watch).bound


def _watch(what: str, tokens: int) -> None:
    pass
