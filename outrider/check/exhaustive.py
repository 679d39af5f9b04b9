"""The exhaustive part of the losslessness gate: a rule's exact output distribution on toy models, against the target's.

Every tree that a drawing can make is verified in every way that the noise can fall; the emitted tokens, completed by
the target to one more than the depth of the tree, must be distributed as in plain decoding. Proves the rule and its
arithmetic, not the runtime that supplies the probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.check.drawings import DRAWINGS, Drawing, Widths, draw_tree
from outrider.check.enumeration import Branches, branches
from outrider.check.toy import TableRows, ToyLM, ToySource
from outrider.core.errors import InputError, UnsupportedDraws
from outrider.core.protocols import Grower, Noise, Verifier
from outrider.core.records import Budget
from outrider.core.tree import Law, QRow, TokenTree

TOLERANCE = 1e-9
LIMIT = 20_000
CONTEXT = (0, 1)  # ends with the pending token
SMALL: tuple[Widths, ...] = ((1, 1, 1), (2, 1))
SHAPES: tuple[Widths, ...] = (*SMALL, (2, 2), (3, 1), (2, 1, 1))

Sequences = dict[tuple[int, ...], float]
Weighted = tuple[TokenTree, float]  # a tree with its probability


@dataclass(frozen=True, slots=True)
class Case:
    """A target, and the two sources that drawings draw from."""

    name: str
    target: ToyLM
    draft: ToyLM
    second: ToyLM


# Seeds where p exceeds q on two tokens of three: a second draw then still has something to be rejected for, and every
# planted bug changes the output by 0.03 or more. Where one token is left after a rejection, most bugs cannot show.
_TARGET, _DRAFT, _SECOND = ToyLM(seed=9), ToyLM(seed=54), ToyLM(seed=43)
CASES = (
    Case("generic", _TARGET, _DRAFT, _SECOND),
    Case("q = p", _TARGET, _TARGET, _TARGET),
    Case(
        "q disjoint from p",
        ToyLM(4, seed=1, allowed=(0, 1)),
        ToyLM(4, seed=2, allowed=(2, 3)),
        ToyLM(4, seed=3, allowed=(2, 3)),
    ),
    Case("zeros in p", replace(_TARGET, zeros=0.5), _DRAFT, _SECOND),
    Case("zeros in q", _TARGET, replace(_DRAFT, zeros=0.5), replace(_SECOND, zeros=0.5)),
    Case("peaked", ToyLM(seed=8, concentration=0.2), ToyLM(seed=9, concentration=0.2), _SECOND),
    Case("temperature 0", replace(_TARGET, greedy=True), _DRAFT, _SECOND),
    Case("top-k 2", replace(_TARGET, top_k=2), _DRAFT, _SECOND),
    Case("top-p 0.7", replace(_TARGET, top_p=0.7), _DRAFT, _SECOND),
)


@dataclass(frozen=True, slots=True)
class Result:
    """One verifier on one case, shape and way of drawing."""

    verifier: str
    law: Law
    drawing: str
    shape: Widths
    case: str
    outcomes: int  # of drafting and verification together; 0: refused
    difference: float  # largest, over sequences, between the output's probability and the target's

    @property
    def passed(self) -> bool:
        return self.outcomes > 0 and self.difference <= TOLERANCE


def exhaustive(
    verifier: Verifier,
    laws: Iterable[Law] | None = None,
    shapes: Sequence[Widths] = SHAPES,
    cases: Sequence[Case] = CASES,
    drawings: Sequence[Drawing] = DRAWINGS,
    limit: int = LIMIT,
) -> list[Result]:
    """Every honoured law x drawing x shape x case. A law that the rule claims and refuses on every shape has failed.

    A claimed law may be refused on some shapes (a rule for chains): those are left out.
    """
    asked = verifier.honours & {d.law for d in drawings} & (set(Law) if laws is None else set(laws))
    results: list[Result] = []
    for law in sorted(asked):
        found = []
        for drawing, shape in product((d for d in drawings if d.law is law), shapes):
            drawn: dict[tuple[ToyLM, ToyLM], Trees] = {}  # cases that differ in their target share them
            for case in cases:
                trees = drawn.setdefault((case.draft, case.second), drawn_trees(drawing, shape, case, limit))
                try:
                    found.append(examine(verifier, drawing, shape, case, limit, trees))
                except UnsupportedDraws:
                    continue
        refused = Result(verifier.name, law, "every drawing was refused", (), "", 0, float("inf"))
        results.extend(found or [refused])
    return results


def quick(verifier: Verifier, drawings: Sequence[Drawing] = DRAWINGS) -> list[Result]:
    """Every case on the small shapes, the generic one on the rest: seconds instead of minutes."""
    rest = [shape for shape in SHAPES if shape not in SMALL]
    results = exhaustive(verifier, shapes=SMALL, drawings=drawings)
    wide = exhaustive(verifier, shapes=rest, cases=CASES[:1], drawings=drawings)
    return results + [result for result in wide if result.outcomes]


class Trees:
    """All trees that can be drafted: made once, as far as they are asked for, and gone through for each target."""

    def __init__(self, draft: Callable[[Branches], TokenTree], limit: int = LIMIT) -> None:
        self._made: list[Weighted] = []
        self._rest = branches(draft, limit)

    def __iter__(self) -> Iterator[Weighted]:
        yield from self._made
        for weighted in self._rest:
            self._made.append(weighted)
            yield weighted


def drawn_trees(drawing: Drawing, shape: Widths, case: Case, limit: int = LIMIT) -> Trees:
    """Of the case's sources."""

    def draft(paths: Branches) -> TokenTree:
        return draw_tree(drawing, shape, case.draft, case.second, CONTEXT, paths.noise("draft"))

    return Trees(draft, limit)


def grown_trees(make: Callable[[], Grower], budget: Budget, source: ToyLM, limit: int = LIMIT) -> Trees:
    """Of a grower; `make` gives a new one for each outcome, so that none remembers another."""

    def draft(paths: Branches) -> TokenTree:
        return grow_tree(make(), source, budget, paths.noise("draft"))

    return Trees(draft, limit)


def examine(
    verifier: Verifier, drawing: Drawing, shape: Widths, case: Case, limit: int = LIMIT, trees: Trees | None = None
) -> Result:
    """One combination. Raises `UnsupportedDraws` where the verifier refuses. `trees`: drawn already."""
    trees = drawn_trees(drawing, shape, case, limit) if trees is None else trees
    probs, count = verified(verifier, trees, case.target, limit)
    return Result(
        verifier.name, drawing.law, drawing.name, shape, case.name, count, distance(probs, case.target, len(shape) + 1)
    )


def output_distribution(
    verifier: Verifier, drawing: Drawing, shape: Widths, case: Case, limit: int = LIMIT
) -> tuple[Sequences, int]:
    """How likely each text of one step is, over all drafts and all verifications, and the number of outcomes."""
    return verified(verifier, drawn_trees(drawing, shape, case, limit), case.target, limit)


def grown_distribution(
    verifier: Verifier, make: Callable[[], Grower], budget: Budget, case: Case, limit: int = LIMIT
) -> tuple[Sequences, int]:
    """The same for the trees of a grower."""
    return verified(verifier, grown_trees(make, budget, case.draft, limit), case.target, limit)


def grow_tree(
    grower: Grower, draft: ToyLM, budget: Budget, noise: Noise | None, context: Sequence[int] = CONTEXT
) -> TokenTree:
    source = ToySource(draft)
    source.begin(0, _Text(np.array(context)))
    return grower.grow(source, [0], [int(context[-1])], [budget], [noise])[0]


def step_distribution(
    verifier: Verifier, draft: Callable[[Branches], TokenTree], target: ToyLM, limit: int = LIMIT
) -> tuple[Sequences, int]:
    """How likely each text is that comes of the trees that `draft` makes, and the number of outcomes."""
    return verified(verifier, branches(draft, limit), target, limit)


def verified(verifier: Verifier, trees: Iterable[Weighted], target: ToyLM, limit: int = LIMIT) -> tuple[Sequences, int]:
    """The same of trees that are there."""

    def emitted(paths: Branches, tree: TokenTree, rows: TableRows) -> tuple[int, ...]:
        verdict = verifier.verify(tree, rows, paths.noise("verify"))
        return (*(int(tree.tokens[node]) for node in verdict.path), verdict.next_token)

    probs: Sequences = {}
    count = 0
    for tree, weight in trees:
        rows = TableRows(target, CONTEXT, tree)
        for tokens, probability in branches(partial(emitted, tree=tree, rows=rows), limit):
            probs[tokens] = probs.get(tokens, 0.0) + weight * probability
            count += 1
            if count > limit:
                raise InputError(f"more than {limit} outcomes; choose a smaller tree or raise the limit")
    return probs, count


@dataclass(frozen=True, slots=True)
class _Text:
    """All of `protocols.Context` that a toy source reads."""

    tokens: NDArray[np.int64]
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    temperature: float = 1.0
    prediction: tuple[int, ...] = ()

    def draft_rows(self, logits: Tensor, paths: Sequence[Sequence[int]], width: int) -> list[QRow]:
        raise AssertionError("a toy's distributions are tables")

    def continuations(self) -> list[list[int]]:
        return []


def distance(probs: Sequences, target: ToyLM, length: int, after: tuple[int, ...] = ()) -> float:
    """Largest difference of a sequence's probability, once the target has completed all to one length."""
    difference = plain_distribution(target, length, after)
    for tokens, weight in probs.items():
        for rest, probability in plain_distribution(target, length - len(tokens), (*after, *tokens)).items():
            key = (*tokens, *rest)
            difference[key] = difference.get(key, 0.0) - weight * probability
    return max(map(abs, difference.values()))


def plain_distribution(target: ToyLM, length: int, after: tuple[int, ...] = ()) -> Sequences:
    """How likely each text of the next `length` tokens of plain decoding is."""
    probs: Sequences = {(): 1.0}
    for _ in range(length):
        probs = {
            (*tokens, token): weight * float(p)
            for tokens, weight in probs.items()
            for token, p in enumerate(target.probs((*CONTEXT, *after, *tokens)))
            if p > 0
        }
    return probs


def evidence(results: Sequence[Result]) -> dict[str, Any]:
    """For the report: the largest difference of each law, and the first failures."""
    laws = sorted({str(r.law) for r in results})
    return {
        "tolerance": TOLERANCE, "combinations": len(results), "outcomes": sum(r.outcomes for r in results),
        "laws": [
            {"law": law, "combinations": sum(r.law == law for r in results),
             "largest_difference": max(r.difference for r in results if r.law == law)}
            for law in laws
        ],
        "failures": [
            {"law": str(r.law), "drawing": r.drawing, "shape": list(r.shape), "case": r.case,
             "difference": r.difference}
            for r in results if not r.passed
        ][:20],
    }  # fmt: skip
