"""Jacobi: a window of guesses that the target itself improves from step to step, without any other drafter.

Jacobi decoding (arXiv 2305.10427) keeps a window of W guessed tokens, verifies it as a chain and takes the target's own
predictions behind the rejected one, made on the old text, as the next guesses. Under sampling it is speculative Jacobi
decoding (arXiv 2410.01699): the guesses are the target's processed *distributions* of the step before, and each token
is drawn afresh from its distribution when it is proposed, so a coupled rule accepts it as it would any draft model's.

Lossless: a token is a point mass, or a draw whose row is the distribution it was drawn from, given everything before
this step. Tokens appended at the end begin in another way (`init`): what followed in the text before, a repetition, or
a uniform draw from recent tokens. Cost: no parameters, W more rows a step and one pass over the vocabulary for each. A
guess is seldom right before the text in front of it is, so it pays only where rows are nearly free.
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
from outrider.core.tree import NOTHING, Draw, QRow, TokenTree
from outrider.draft.table.places import places
from outrider.draft.table.top_rows import likeliest, picked

RECENT = 64  # tokens that a random guess is drawn from
_KEEP = 0.98  # how fast old steps are forgotten in the estimate of acceptance

Guess = int | QRow  # a token, or the distribution that it is drawn from when it is proposed


@dataclass(slots=True)
class _Window:
    context: Context
    guesses: list[Guess] = field(default_factory=list)  # for the positions behind the pending token
    tokens: list[int] = field(default_factory=list)  # proposed last


@dataclass(slots=True)
class Jacobi:
    """`sampled` keeps distributions and draws from them; else, and in greedy requests, guesses are the likeliest.

    `init` is how tokens at the end of the window begin: "copy" what followed an earlier occurrence of the last two
    tokens or the last one, "repeat" the last token, or "random" recent tokens.
    """

    window: int = 16
    init: str = "copy"
    sampled: bool = False
    width: int = 64  # likeliest tokens that a distribution keeps
    name: str = "jacobi"
    needs: Needs = field(default_factory=Needs)
    shared_noise: bool = False
    _slots: dict[int, _Window] = field(default_factory=dict)
    _tried: NDArray[np.float64] = field(init=False)  # [W] steps that reached each depth, and those that passed it
    _passed: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self._tried, self._passed = np.full(self.window, 2.0), np.full(self.window, 1.0)

    def begin(self, slot: int, context: Context) -> None:
        self._slots[slot] = _Window(context)

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        """Reads nothing but the text."""

    def end(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        return Proposals([self._draw(self._slots[s], b, n) for s, b, n in zip(slots, budgets, noise, strict=True)])

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        for slot, record in zip(slots, records, strict=True):
            self._follow(self._slots[slot], record)

    def _follow(self, window: _Window, record: StepRecord) -> None:
        """Changes the window: the guesses that the step made better move up to where the text now ends."""
        gain = record.gain
        proposed, window.tokens = window.tokens, []
        if not proposed:  # a plain step: the text moved on by one token
            del window.guesses[:gain]
            return
        tree, path = record.tree, record.verdict.path
        tokens = np.array([tree.tokens[0], *proposed])
        where = places(tokens, np.arange(-1, len(proposed)), tree.tokens, tree.parents)[1:]
        accepted = 0
        while accepted < min(len(path), len(proposed)) and path[accepted] == where[accepted]:
            accepted += 1
        self._count(accepted, len(proposed))
        # The row after the token at depth k predicts depth k + 1, and the pending token now stands at depth `gain`.
        rows = where[gain - 1 :]
        window.guesses = self._refresh(window.context, record, rows[rows != NOTHING], proposed[gain:])

    def _refresh(
        self, context: Context, record: StepRecord, rows: NDArray[np.int64], path: Sequence[int]
    ) -> list[Guess]:
        logits = record.scores.logits
        assert logits is not None
        if not len(rows):
            return []
        if self.sampled and context.temperature > 0:
            paths = [path[:i] for i in range(len(rows))]
            return list(context.draft_rows(picked(logits, rows), paths, self.width))
        return likeliest(logits, rows).tolist()

    def _draw(self, window: _Window, budget: Budget, noise: Noise) -> TokenTree:
        """Every distribution is fixed before anything is drawn from it; fresh guesses may look at the tokens before."""
        length = min(budget.nodes, budget.depth, self.window)
        text = window.context.tokens
        tokens, rows = [int(text[-1])], list[QRow | None]()
        for guess in window.guesses[:length]:
            self._take(guess, tokens, rows, noise)
        if missing := length - len(rows):
            for guess in self._fresh(text, tokens[1:], missing):
                self._take(guess, tokens, rows, noise)
        window.tokens = tokens[1:]
        draws = tuple((Draw(token, i, row),) for i, (token, row) in enumerate(zip(tokens[1:], rows, strict=True), 1))
        weights = np.ones(length + 1)
        np.cumprod(self._passed[:length] / self._tried[:length], out=weights[1:])
        origins = ("", *(self.name,) * length)
        return TokenTree(np.array(tokens), np.arange(-1, length), (*draws, ()), origins, weights)

    def _take(self, guess: Guess, tokens: list[int], rows: list[QRow | None], noise: Noise) -> None:
        if isinstance(guess, QRow):
            tokens.append(int(guess.ids[noise.draw(guess.probs, len(rows), 0)]))
            rows.append(guess)
        else:
            tokens.append(guess)
            rows.append(None)

    def _fresh(self, text: NDArray[np.int64], drafted: list[int], count: int) -> Sequence[Guess]:
        """Guesses for positions that the target has not predicted yet."""
        if self.init == "copy":
            return continuation(text, np.array(drafted, dtype=np.int64), count).tolist()
        if self.init == "repeat":
            return [drafted[-1] if drafted else int(text[-1])] * count
        recent = np.unique(text[-RECENT:])
        return [QRow(recent, np.full(len(recent), 1.0 / len(recent)))] * count

    def _count(self, accepted: int, count: int) -> None:
        reached = min(accepted + 1, count)
        for seen in (self._tried, self._passed):
            seen[:reached] *= _KEEP
        self._tried[:reached] += 1
        self._passed[:accepted] += 1


@compiled
def continuation(text: NDArray[np.int64], drafted: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """[count] what followed the latest earlier place of the last two tokens, else of the last one, else repetitions.

    `drafted` stands behind `text`, and the copy goes on as a copy of itself when it reaches the end: a loop continues.
    """
    size, ahead = len(text), len(drafted)
    last = drafted[ahead - 1] if ahead else text[size - 1]
    before = drafted[ahead - 2] if ahead > 1 else (text[size - 2 + ahead] if size - 2 + ahead >= 0 else -1)
    one = two = -1
    for end in range(size - 1, 0, -1):
        if text[end - 1] == last:
            one = max(one, end)
            if end > 1 and text[end - 2] == before:
                two = end
                break
    place = two if two >= 0 else one
    out = np.empty(ahead + count, dtype=np.int64)
    out[:ahead] = drafted
    for i in range(count):
        if place < 0:
            out[ahead + i] = last
        else:
            out[ahead + i] = text[place + i] if place + i < size else out[place + i - size]
    return out[ahead:]
