"""Superposed drafts: several short continuations from one row a token, which reads a mixture of their last tokens.

arXiv 2405.18400. A pass reads the embeddings of the drafts' last tokens, each weighted by how likely its draft is, and
says one distribution for all of them; how often n-grams occur says whose continuation a token is. The state behind such
a row is that of no single draft, so it is a side row (`side.py`), and what it says is a guess. Cost: one row a token,
whatever the number of drafts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.protocols import Target
from outrider.core.records import NO_NEEDS, Piece, Scores
from outrider.core.rows.side import chains
from outrider.core.tree import chain

Path = tuple[int, ...]
Floats = NDArray[np.float64]
Embed = Callable[[Tensor], Tensor]  # ids [n] -> what the model reads for them, [n, hidden]


@dataclass(frozen=True, slots=True)
class Superposition:
    """How drafts are made; the numbers are the paper's."""

    drafts: int = 3
    tokens: int = 0  # likeliest ones that may go on with a draft; 0: as many as there are drafts
    alpha: float = 0.54  # of the n-grams' say
    temperature: float = 0.06
    orders: tuple[float, ...] = (0.01, 0.04, 0.15, 0.18, 0.12)  # weights of n-grams of 2, 3, ... tokens
    floor: float = 0.01  # of the model's say, where n-grams are silent; 0: the paper's penalty instead
    penalty: float = 200.0  # of a draft that no n-gram goes on with


class Grams(Protocol):
    """How often texts go on in some way."""

    def count(self, query: NDArray[np.int64], /) -> int: ...  # occurrences of these tokens one behind another


@dataclass(slots=True)
class TextGrams:
    """Of the n-grams of one text, which is counted as it grows."""

    most: int = 4  # tokens of an n-gram
    _seen: list[int] = field(default_factory=list)
    _counts: Counter[Path] = field(default_factory=Counter)

    def read(self, tokens: Sequence[int] | NDArray[np.int64]) -> None:
        """Changes state: the text is this now; what was read of it before is its beginning."""
        for token in tokens[len(self._seen) :]:
            self._seen.append(int(token))
            for size in range(1, min(self.most, len(self._seen)) + 1):
                self._counts[tuple(self._seen[-size:])] += 1

    def count(self, query: NDArray[np.int64], /) -> int:
        return self._counts[tuple(query.tolist())]


@dataclass(frozen=True, slots=True)
class Drafts:
    """Continuations, the best first."""

    paths: tuple[Path, ...]
    scores: Floats  # log-scores; only their differences mean something
    finished: tuple[tuple[Path, float], ...] = ()  # those that ended the text

    @property
    def weights(self) -> Floats:
        """Shares of the mixture."""
        return shares_of(self.scores)


@dataclass(frozen=True, slots=True)
class Start:
    """Where the drafts of one slot begin."""

    slot: int
    lead: Sequence[int]  # tokens behind what the slot holds, the pending one last
    text: Sequence[int]  # all tokens before the drafts: n-grams reach into them
    grams: Grams
    depth: int


def unroll(
    target: Target, starts: Sequence[Start], embed: Embed, how: Superposition, ends: frozenset[int]
) -> Iterator[list[Drafts]]:
    """Changes state: the slots run their lead, and rows that nothing is to keep. The drafts after each token."""
    pieces = [Piece(one.slot, tree=chain(one.lead[0], one.lead[1:])) for one in starts]
    found = [first(_last(scores), how, ends) for scores in target.run(pieces, NO_NEEDS)]
    vectors = [list[Tensor]() for _ in starts]
    yield list(found)
    for depth in range(1, max((one.depth for one in starts), default=0)):
        going = [i for i, one in enumerate(starts) if depth < one.depth and found[i].paths]
        if not going:
            return
        pieces = []
        for i in going:
            one, drafts = starts[i], found[i]
            rows = embed(torch.tensor([path[-1] for path in drafts.paths], device=target.device))
            shares = torch.from_numpy(drafts.weights).to(rows.device, rows.dtype)
            vectors[i].append(shares @ rows)
            side = chains([len(one.lead) - 1], [depth], torch.stack(vectors[i]))
            pieces.append(
                Piece(one.slot, tree=chain(one.lead[0], one.lead[1:]), done=len(one.lead) + depth - 1, side=side)
            )
        for i, scores in zip(going, target.run(pieces, NO_NEEDS), strict=True):
            assert scores.side is not None
            found[i] = further(found[i], _last(scores.side), starts[i], how, ends)
        yield list(found)


def first(logits: Tensor, how: Superposition, ends: frozenset[int]) -> Drafts:
    """From one distribution: the likeliest tokens, so that no two drafts are the same."""
    ids, chances = likeliest(logits, how.temperature, how.drafts)
    found = [((int(token),), float(np.log(chance))) for token, chance in zip(ids, chances, strict=True)]
    return _sorted(found, how, ends)


def further(drafts: Drafts, logits: Tensor, start: Start, how: Superposition, ends: frozenset[int]) -> Drafts:
    """Each draft with each of the likeliest tokens, the best of all."""
    ids, chances = likeliest(logits, how.temperature, how.tokens or how.drafts)
    found = []
    for path, score in zip(drafts.paths, drafts.scores, strict=True):
        said = said_by_grams(start.grams, [*start.text, *path], ids, how.orders) + how.floor * chances
        scores = joined(chances, said, how)
        found += [((*path, int(token)), score + more) for token, more in zip(ids, scores, strict=True)]
    return _sorted(found, how, ends, drafts.finished)


def joined(chances: Floats, said: Floats, how: Superposition) -> Floats:
    """(1 - alpha) log f + alpha log g; without any g, a penalty."""
    if how.alpha == 0:
        return np.log(chances)
    if not said.any():
        return (1 - how.alpha) * np.log(chances) - how.penalty
    with np.errstate(divide="ignore"):
        return (1 - how.alpha) * np.log(chances) + how.alpha * np.log(said)


def said_by_grams(grams: Grams, text: Sequence[int], ids: NDArray[np.int64], orders: Sequence[float]) -> Floats:
    """How often each token follows the text's last ones, over the orders whose context occurs."""
    said = np.zeros(len(ids))
    for before, weight in enumerate(orders, 1):
        if before > len(text):
            break
        context = np.array(text[-before:], dtype=np.int64)
        if not (seen := grams.count(context)):
            break  # nor does a longer one
        said += weight * np.array([grams.count(np.append(context, token)) for token in ids]) / seen
    return said


def likeliest(logits: Tensor, temperature: float, count: int) -> tuple[NDArray[np.int64], Floats]:
    """Ids of the largest logits, and their chances at this temperature among each other."""
    values, ids = torch.topk(logits.double(), min(count, len(logits)))
    return ids.cpu().numpy(), shares_of(values.cpu().numpy() / temperature)


def _sorted(
    found: Sequence[tuple[Path, float]], how: Superposition, ends: frozenset[int],
    finished: Sequence[tuple[Path, float]] = (),
) -> Drafts:  # fmt: skip
    """The best drafts that go on, and the best of those that have ended."""
    best = sorted((one for one in found if one[1] > -np.inf), key=lambda one: -one[1])[: 2 * how.drafts]
    over = sorted((*finished, *(one for one in best if one[0][-1] in ends)), key=lambda one: -one[1])[: how.drafts]
    alive = [one for one in best if one[0][-1] not in ends][: how.drafts]
    return Drafts(tuple(path for path, _ in alive), np.array([score for _, score in alive]), tuple(over))


def shares_of(scores: Floats) -> Floats:
    """What each of these log-scores is of all; none is quite 0."""
    shares = np.exp(scores - scores.max(initial=-np.inf)) if len(scores) else scores
    return np.maximum(shares / shares.sum(), np.finfo(np.float64).tiny) if len(scores) else shares


def _last(scores: Scores) -> Tensor:
    assert scores.logits is not None
    return scores.logits[-1]
