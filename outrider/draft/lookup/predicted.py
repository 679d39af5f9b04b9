"""Predicted output: draft from a text that the caller expects, such as the file before an edit or a filled template.

Lossless: candidates are point masses. A pointer walks along the prediction while the output agrees with it. After an
insertion, deletion or replacement it is set anew by the longest run of recent tokens found in the prediction, ties to
the nearest place ahead: `CERTAIN` tokens near the pointer settle it, `CERTAIN_AFAR` anywhere. Until then a few guesses
share the budget: go on here, one further, or at the best place found; how often each kind of guess was right so far is
its weight. Cost: one pass over the prediction in a step that is out of step with it, else O(1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.core.numeric.compiled import compiled
from outrider.core.proposals import Proposals
from outrider.core.protocols import Context, Noise
from outrider.core.records import Budget, Chunk, Needs, StepRecord
from outrider.core.tree import TokenTree, fixed, root
from outrider.draft.lookup.suffix import Evidence, learn

NEAR = 64  # tokens ahead of the pointer within which a short run is believed
CERTAIN, CERTAIN_AFAR = 3, 8  # run lengths that move the pointer: near it, and anywhere
_LONGEST = 32  # tokens of a run that are compared; a longer one is no more certain
_RUNS = 7  # classes of run length: 0, 1, 2, 3, 4-7, 8-15, longer
_PRIOR = 4.0  # observations that the first guess of a class counts for


@dataclass(slots=True)
class _Aligned:
    """One sequence and where it stands in its prediction. `follow` changes state."""

    context: Context
    prediction: NDArray[np.int64]
    evidence: Evidence
    pointer: int = 0  # what is expected next; out of step: where the output left the prediction
    run: int = CERTAIN  # tokens in a row that agreed; 0: out of step. Nothing said yet counts as agreeing
    read: int = 0  # tokens of the output that were followed
    proposed: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]] | None = None

    @property
    def output(self) -> NDArray[np.int64]:
        return self.context.tokens[len(self.context.prompt) :]

    def follow(self) -> None:
        if not len(self.prediction):
            return
        output = self.output
        self.pointer, self.run = follow(self.prediction, output, self.read, self.pointer, self.run)
        self.read = len(output)


@dataclass(slots=True)
class Predicted:
    name: str = "predicted"
    needs: Needs = field(default_factory=Needs)
    shared_noise: bool = False
    _slots: dict[int, _Aligned] = field(default_factory=dict)

    def begin(self, slot: int, context: Context) -> None:
        self._slots[slot] = _Aligned(context, np.array(context.prediction, dtype=np.int64), first_guess())
        self._slots[slot].follow()

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        """Reads nothing but the text."""

    def end(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        return Proposals([self._tree(self._slots[slot], budget) for slot, budget in zip(slots, budgets, strict=True)])

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        for slot, record in zip(slots, records, strict=True):
            aligned = self._slots[slot]
            if aligned.proposed is not None:
                learn(aligned.evidence, *aligned.proposed, np.array(record.emitted, dtype=np.int64))
                aligned.proposed = None
            aligned.follow()

    def confidence(self, slot: int) -> int:
        """Tokens in a row that agree with the prediction; 0 where it is not known where the output stands in it."""
        aligned = self._slots[slot]
        return aligned.run if aligned.pointer < len(aligned.prediction) else 0

    def _tree(self, aligned: _Aligned, budget: Budget) -> TokenTree:
        pending = int(aligned.context.tokens[-1])
        if not len(aligned.prediction):
            return root(pending)
        tokens, parents, weights, cells = grow(
            aligned.prediction, aligned.output, aligned.pointer, aligned.run, aligned.evidence, pending,
            budget.nodes, budget.depth,
        )  # fmt: skip
        aligned.proposed = tokens, parents, cells
        return fixed(tokens, parents, self.name, weights) if len(tokens) > 1 else root(pending)


@compiled
def follow(
    prediction: NDArray[np.int64], output: NDArray[np.int64], read: int, pointer: int, run: int
) -> tuple[int, int]:
    """The pointer and its run after the tokens output[read:]."""
    for token in output[read:]:
        if run and pointer < len(prediction) and prediction[pointer] == token:
            pointer += 1
            run += 1
        else:
            run = 0
    if not run:
        place, found = search(prediction, output, pointer)
        if found >= (CERTAIN if near(place, pointer) else CERTAIN_AFAR):
            return place, found
    return pointer, run


@compiled
def near(place: int, pointer: int) -> bool:
    return 0 <= place - pointer <= NEAR


@compiled
def search(prediction: NDArray[np.int64], output: NDArray[np.int64], pointer: int) -> tuple[int, int]:
    """Where the longest run of the last tokens ends in the prediction, and its length; of equals the first ahead."""
    best, longest = -1, 0
    size, said = len(prediction), len(output)
    for i in range(size if said else 0):
        end = pointer + i  # places ahead of the pointer first, nearest first, then those before it
        end = end if end < size else end - size
        run = 0
        while run < min(said, end + 1, _LONGEST) and prediction[end - run] == output[said - 1 - run]:
            run += 1
        if run > longest:
            best, longest = end + 1, run
    return best, longest


@compiled
def grow(prediction, output, pointer, run, evidence, pending, nodes, deepest):  # type: ignore[no-untyped-def]
    """The likeliest continuations: tokens, parents, weights, evidence classes. In step it is one chain."""
    tokens, parents = np.empty(nodes + 1, np.int64), np.empty(nodes + 1, np.int64)
    weights, cells = np.empty(nodes + 1, np.float64), np.empty(nodes + 1, np.int64)
    tokens[0], parents[0], weights[0], cells[0] = pending, -1, 1.0, -1
    guesses = np.zeros((3, 5), np.int64)  # place, run, far away, node, depth
    guesses[0, 0], guesses[0, 1], count = pointer, run, 1
    if not run:
        place, found = search(prediction, output, pointer)
        guesses[1, 0] = pointer + 1
        guesses[2, 0], guesses[2, 1], guesses[2, 2] = place, found, not near(place, pointer)
        count = 3 if found else 2
    reach = np.ones(3)  # chance that all of a guess up to its node is right
    made = 1
    while made <= nodes:
        chosen, best, best_cell = -1, 0.0, 0
        for i in range(count):
            place, matched, far, node, depth = guesses[i]
            if place < len(prediction) and depth < deepest:
                cell = classify(matched, far)
                weight = reach[i] * evidence[cell, 0] / evidence[cell, 1]
                if weight > best:
                    chosen, best, best_cell = i, weight, cell
        if chosen < 0:
            break
        place, node = guesses[chosen, 0], guesses[chosen, 3]
        child = node + 1
        while child < made and not (parents[child] == node and tokens[child] == prediction[place]):
            child += 1
        if child == made:
            tokens[made], parents[made], weights[made], cells[made] = prediction[place], node, best, best_cell
            made += 1
        reach[chosen] = best
        guesses[chosen, 0] += 1
        guesses[chosen, 1] += 1
        guesses[chosen, 3] = child
        guesses[chosen, 4] += 1
    return tokens[:made], parents[:made], weights[:made], cells[:made]


@compiled
def classify(run: int, far: int) -> int:
    """The class of "the next token after a run of this length", near the pointer or far from it."""
    if run >= CERTAIN_AFAR:
        far = 0
    long = run if run <= 3 else 4 if run <= 7 else 5 if run <= 15 else 6
    return far * _RUNS + long


def first_guess() -> Evidence:
    evidence = np.empty((2 * _RUNS, 2))
    evidence[:, 1] = _PRIOR
    evidence[:_RUNS, 0] = np.array([0.3, 0.5, 0.7, 0.85, 0.9, 0.95, 0.97]) * _PRIOR
    evidence[_RUNS:, 0] = np.array([0.1, 0.2, 0.4, 0.6, 0.8, 0.95, 0.97]) * _PRIOR
    return evidence
