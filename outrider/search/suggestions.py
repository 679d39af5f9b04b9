"""Suggestions: several short continuations of a text at once, for a user to choose from, growing token by token.

Superposed decoding (arXiv 2405.18400): all of them for one pass a token. LOSSY: the model reads a mixture of the
suggestions, so none of them is what it would have said alone, the less the longer they are. Cost: one pass of the model
a token, whatever the number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider.core.errors import InputError
from outrider.core.protocols import Target
from outrider.core.rows.superposed import Drafts, Embed, Grams, Start, Superposition, TextGrams, shares_of, unroll
from outrider.core.schedule import run_all


@dataclass(frozen=True, slots=True)
class Suggestion:
    tokens: tuple[int, ...]
    share: float  # of the mixture; of one that has ended, as it would be
    ended: bool = False  # the text ends here


def suggestions(
    target: Target, prompt: Sequence[int], embed: Embed, count: int = 5, length: int = 10, *,
    how: Superposition | None = None, grams: Grams | None = None, ends: frozenset[int] = frozenset(),
) -> Iterator[list[Suggestion]]:  # fmt: skip
    """The `count` best so far, after each of `length` tokens. Uses one of the target's slots while it runs.

    `grams` tell whose continuation a token is; without them the n-grams of the prompt do.
    """
    if count < 1 or length < 1:
        raise InputError(f"{count} suggestions of {length} tokens: use at least 1 of each")
    if not target.traits.side_rows:
        raise InputError(
            f"the runtime {target.traits.runtime} does not run rows of mixed embeddings for this model; use the "
            "runtime native, eager or graphs"
        )
    length = min(length, target.max_rows, target.max_context - len(prompt))
    if length < 1:
        raise InputError(f"a prompt of {len(prompt)} tokens leaves no room in a context of {target.max_context}")
    if grams is None:
        grams = TextGrams(most=6)
        grams.read(list(prompt))
    slot = target.acquire(prompt[:-1])
    try:
        run_all(target, [(slot, list(prompt[target.length(slot) : -1]))])
        settings = replace(how or Superposition(), drafts=count)
        start = Start(slot, [int(prompt[-1])], list(prompt[-len(settings.orders) :]), grams, length)
        for (drafts,) in unroll(target, [start], embed, settings, ends):
            yield _best(drafts, count)
    finally:
        target.release(slot)


def _best(drafts: Drafts, count: int) -> list[Suggestion]:
    going = zip(drafts.paths, drafts.scores.tolist(), [False] * count, strict=False)
    best = sorted([*going, *((path, score, True) for path, score in drafts.finished)], key=lambda one: -one[1])[:count]
    shares = shares_of(np.array([score for _, score, _ in best])).tolist()
    return [Suggestion(path, share, ended) for (path, _, ended), share in zip(best, shares, strict=True)]
