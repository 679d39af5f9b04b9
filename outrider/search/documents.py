"""Documents for a question: the model writes what could stand in them, word sequences of the corpus only.

Paper: SEAL (arXiv 2204.10628). A beam search under the corpus's own continuations gives n-grams with the probability
that the model gives them behind the question; those of the question itself are added, and rated by the model as well.
With F occurrences among N tokens an n-gram is worth

    w = max(0, log (P (1 - P0) / (P0 (1 - P)))) ** 2,    P0 = (F + 5) / (N + 5)

and a document the sum over those of its n-grams that do not overlap, best first, each times 1 - b + b * (share of its
distinct tokens that are new). LOSSY by nature: a ranking. Unlike the paper's, n-grams that occur more than 1,500 times
rate no document at all. Cost: one pass for each token of the n-grams' length, all beams in one growing tree.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.core.errors import InputError
from outrider.core.protocols import Target
from outrider.core.records import NO_NEEDS, Piece
from outrider.core.schedule import run_all
from outrider.core.tree import fixed, from_paths

Gram = tuple[int, ...]
BEAMS, LENGTH = 15, 10
OF_QUESTION = 3  # tokens of the question that stand together
SMOOTHING, EXPONENT, NEW = 5, 2.0, 0.8
COMMON = 1500  # occurrences above which an n-gram says nothing of a document
CANDIDATES = 1500  # documents that are rated fully


class Corpus(Protocol):
    """A compact store."""

    @property
    def tokens(self) -> int: ...
    @property
    def everything(self) -> Hashable: ...
    def narrow(self, state: Any, token: int) -> Any | None: ...
    def following(self, state: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
    def occurrences(self, state: Any) -> int: ...
    def places(self, state: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...


@dataclass(frozen=True, slots=True)
class Key:
    """An n-gram of the corpus, as the model and the corpus see it."""

    tokens: Gram
    log_prob: float
    count: int
    weight: float


@dataclass(frozen=True, slots=True)
class Found:
    """A document, and what of it counted."""

    document: int
    score: float
    keys: tuple[Key, ...]


def asking(question: str) -> str:
    """A prompt behind which a model writes what could stand in a document."""
    return f"Question: {question.strip()}\nThe passage that answers it, word for word:"


def find(
    target: Target, prompt: Sequence[int], question: Sequence[int], corpus: Corpus, top: int = 10, *,
    beams: int = BEAMS, length: int = LENGTH,
) -> list[Found]:  # fmt: skip
    """The best documents, the best first. `prompt` asks for a passage; `question` are the tokens of the question alone.

    Uses one of the target's slots while it runs.
    """
    if top < 1 or beams < 1 or length < 1:
        raise InputError(f"top {top}, {beams} beams of length {length}: use at least 1 of each")
    grams = written(target, prompt, corpus, beams, length)
    asked = [gram for gram in stretches(question) if gram not in grams and _occurs(corpus, gram)]
    grams |= rated(target, prompt, asked)
    return ranked(corpus, keys(corpus, grams), top)


def written(target: Target, prompt: Sequence[int], corpus: Corpus, beams: int, length: int) -> dict[Gram, float]:
    """N-grams that the model writes, and the logarithm of their probability: all that were in a beam."""
    length = min(length, (target.max_rows - 1) // beams + 1, target.max_context - len(prompt))
    found: dict[Gram, float] = {}
    tokens, parents = [int(prompt[-1])], [-1]
    live: list[tuple[Gram, float, Any]] = [((), 0.0, corpus.everything)]
    first = 0  # node of the first beam
    slot = _prefilled(target, prompt)
    try:
        for _ in range(length):
            tree = fixed(np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64), "beam")
            (scores,) = target.run([Piece(slot, tree=tree, done=first)], NO_NEEDS)
            assert scores.logits is not None
            logprobs = torch.log_softmax(scores.logits.float(), 1).cpu().numpy()
            grown = _grown(live, logprobs, corpus, beams)
            if not grown:
                break
            found |= {gram: log_prob for _, gram, log_prob, _ in grown}
            parents += [first + beam for beam, *_ in grown]
            first = len(tokens)
            tokens += [gram[-1] for _, gram, *_ in grown]
            live = [(gram, log_prob, state) for _, gram, log_prob, state in grown]
    finally:
        target.release(slot)
    return found


def _grown(
    live: Sequence[tuple[Gram, float, Any]], logprobs: NDArray[np.float32], corpus: Corpus, beams: int
) -> list[tuple[int, Gram, float, Any]]:  # fmt: skip
    """The likeliest continuations of all beams: (beam, n-gram, log-probability, its places)."""
    each = [corpus.following(state)[0] for _, _, state in live]
    ids = np.concatenate(each)
    beam = np.repeat(np.arange(len(live)), [len(one) for one in each])
    totals = logprobs[beam, ids] + np.array([log_prob for _, log_prob, _ in live])[beam]
    best = np.argsort(-totals, kind="stable")[:beams]
    grown = []
    for at in best.tolist():
        gram, _, state = live[beam[at]]
        deeper = corpus.narrow(state, int(ids[at]))
        grown.append((int(beam[at]), (*gram, int(ids[at])), float(totals[at]), deeper))
    return grown


def rated(target: Target, prompt: Sequence[int], grams: Sequence[Gram]) -> dict[Gram, float]:
    """The logarithm of the probability that the model gives to each of these behind the prompt."""
    found: dict[Gram, float] = {}
    slot = _prefilled(target, prompt)
    try:
        share = max(1, (target.max_rows - 1) // max((len(gram) for gram in grams), default=1))
        for at in range(0, len(grams), share):
            some = grams[at : at + share]
            tree = from_paths(int(prompt[-1]), some)
            (scores,) = target.run([Piece(slot, tree=tree)], NO_NEEDS)
            assert scores.logits is not None
            logprobs = torch.log_softmax(scores.logits.float(), 1)
            for gram in some:
                node, total = 0, 0.0
                for token in gram:
                    total += float(logprobs[node, token])
                    node = tree.child(node, token)
                found[gram] = total
    finally:
        target.release(slot)
    return found


def stretches(question: Sequence[int], longest: int = OF_QUESTION) -> list[Gram]:
    """All stretches of up to so many tokens, each once."""
    tokens = tuple(int(token) for token in question)
    every = (tokens[i : i + size] for size in range(1, longest + 1) for i in range(len(tokens) - size + 1))
    return list(dict.fromkeys(every))


def keys(corpus: Corpus, grams: dict[Gram, float]) -> list[Key]:
    """Those that are worth anything, the best first."""
    found = []
    for gram, log_prob in grams.items():
        count = corpus.occurrences(_state(corpus, gram))
        weight = worth(log_prob, count, corpus.tokens)
        if weight > 0:
            found.append(Key(gram, log_prob, count, weight))
    return sorted(found, key=lambda key: (-key.weight, key.tokens))


def worth(log_prob: float, count: int, tokens: int) -> float:
    """How much more likely the question makes an n-gram than the corpus does, as squared log odds."""
    usual = min((count + SMOOTHING) / (tokens + SMOOTHING), 1 - 1e-12)
    log_prob = min(log_prob, -1e-12)
    odds = log_prob - math.log(-math.expm1(log_prob))
    return max(0.0, odds - math.log(usual) + math.log1p(-usual)) ** EXPONENT


def ranked(corpus: Corpus, best: Iterable[Key], top: int) -> list[Found]:
    """The documents that these n-grams speak for; `best` come the best first."""
    matches: dict[int, list[tuple[Key, list[int]]]] = defaultdict(list)
    for key in best:
        if key.count > COMMON:
            continue
        numbers, places = corpus.places(_state(corpus, key.tokens))
        of_key: dict[int, list[int]] = defaultdict(list)
        for number, place in zip(numbers.tolist(), places.tolist(), strict=True):
            of_key[number].append(place)
        for number, at in of_key.items():
            matches[number].append((key, sorted(at)))
    hopeful = sorted(matches, key=lambda number: (-sum(key.weight for key, _ in matches[number]), number))
    found = [_rated_document(number, matches[number]) for number in hopeful[:CANDIDATES]]
    return sorted(found, key=lambda one: (-one.score, one.document))[:top]


def _rated_document(number: int, matches: Sequence[tuple[Key, list[int]]]) -> Found:
    taken: set[int] = set()  # places
    seen: set[int] = set()  # tokens
    score, used = 0.0, []
    for key, ends in matches:
        size, kinds = len(key.tokens), set(key.tokens)
        free = next((end for end in ends if not taken.intersection(range(end - size + 1, end + 1))), None)
        if free is None:
            continue
        taken.update(range(free - size + 1, free + 1))
        score += key.weight * (1 - NEW + NEW * len(kinds - seen) / len(kinds))
        seen |= kinds
        used.append(key)
    return Found(number, score, tuple(used))


def _prefilled(target: Target, prompt: Sequence[int]) -> int:
    """A slot that holds the prompt but for its last token."""
    text = [int(token) for token in prompt[:-1]]
    slot = target.acquire(text)
    run_all(target, [(slot, text[target.length(slot) :])])
    return slot


def _state(corpus: Corpus, gram: Gram) -> Any:
    state: Any = corpus.everything
    for token in gram:
        state = corpus.narrow(state, token)
    return state


def _occurs(corpus: Corpus, gram: Gram) -> bool:
    state: Any = corpus.everything
    for token in gram:
        state = corpus.narrow(state, token)
        if state is None:
            return False
    return True
