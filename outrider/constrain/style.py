"""Style: a small multiple of a style corpus' n-gram log-probabilities, added to the target's logits (arXiv 2601.16224).

    l'(v) = l(v) + strength * sum over n of a_n log P~_n(v | the last n - 1 tokens)        n = 1 .. 3, as far as seen

This CHANGES what the model says, by design; the paper itself finds it useful in a narrow range of small strengths only.
Speculation stays exact with respect to the changed distribution, since the bias is added to every node's row from the
node's own path, after penalties and before the temperature.

The weights a_n are shared out among the orders whose context the corpus has, so more orders never mean a stronger bias.
P~_n = (1 - e) P_n + e S, with S the unigram distribution, each token counted once more than it occurs: no token is ever
ruled out. Special tokens, the end of text among them, keep the probability that the model gave them; the bias moves
probability among the others only. Cost: a few passes over the vocabulary a row, and a look-up of the few successors of
a context.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.errors import InputError

STRENGTH = 0.1
WEIGHTS = (0.1, 0.3, 0.6)  # a_n
SMOOTHING = 0.05  # e


@dataclass(frozen=True, slots=True)
class _Successors:
    """What followed each context of one length, as sparse rows."""

    contexts: NDArray[np.int64]  # [C], ascending
    starts: NDArray[np.int64]  # [C + 1]
    ids: NDArray[np.int64]  # [M]
    gains: NDArray[np.float32]  # [M], log P~_n against what an unseen successor has, log e S

    def after(self, context: int) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        at = int(self.contexts.searchsorted(context))
        if at == len(self.contexts) or self.contexts[at] != context:
            return None
        row = slice(self.starts[at], self.starts[at + 1])
        return self.ids[row], self.gains[row]


@dataclass(frozen=True, slots=True)
class Style:
    """A `protocols.Constraint`. Make it with `from_file`, `from_texts` or `from_tokens`; it does not change state."""

    strength: float
    vocab_size: int
    tokens: int  # size of the corpus
    special: tuple[int, ...]
    _dense: tuple[Tensor, Tensor, Tensor] = field(repr=False)  # [V] each: the bias where one, two or three orders apply
    _sparse: tuple[_Successors, _Successors] = field(repr=False)  # after one token, and after two
    _shares: tuple[tuple[float, ...], ...] = field(repr=False)  # [orders - 1][n - 1]: a_n shared out
    _on: dict[torch.device, tuple[Tensor, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def from_file(cls, path: str | Path, tokenizer: Any, vocab_size: int, strength: float = STRENGTH) -> Style:
        """A UTF-8 text file, or every .txt and .md file of a folder; each file is a text of its own."""
        place = Path(path)
        files = sorted(f for f in place.rglob("*") if f.suffix in (".txt", ".md")) if place.is_dir() else [place]
        if not files:
            raise InputError(f"{place}: the folder has no .txt or .md file to take a style from")
        return cls.from_texts([_read(file) for file in files], tokenizer, vocab_size, strength)

    @classmethod
    def from_texts(
        cls, texts: Iterable[str], tokenizer: Any, vocab_size: int, strength: float = STRENGTH
    ) -> Style:  # fmt: skip
        documents = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
        return cls.from_tokens(documents, vocab_size, strength, special=tokenizer.all_special_ids)

    @classmethod
    def from_tokens(
        cls, documents: Iterable[Sequence[int]], vocab_size: int, strength: float = STRENGTH, *,
        special: Iterable[int] = (), weights: Sequence[float] = WEIGHTS, smoothing: float = SMOOTHING,
    ) -> Style:  # fmt: skip
        """Counts n-grams within each document. `vocab_size` is the width of the target's rows."""
        if not (math.isfinite(strength) and strength >= 0):
            raise InputError(f"the style strength is {strength}; use 0 or more, such as {STRENGTH}")
        if not 0 < smoothing < 1:
            raise InputError(f"the smoothing is {smoothing}; use a number between 0 and 1, such as {SMOOTHING}")
        if len(weights) != 3 or min(weights) < 0 or weights[0] <= 0:
            raise InputError(f"the order weights are {tuple(weights)}; give three, the first above 0 and none below")
        texts = [np.asarray(document, dtype=np.int64) for document in documents]
        corpus = np.concatenate([np.empty(0, dtype=np.int64), *texts])
        if not len(corpus):
            raise InputError("the style corpus is empty; give at least one word of text")
        if corpus.min() < 0 or corpus.max() >= vocab_size:
            raise InputError(f"the style corpus has token ids outside 0..{vocab_size - 1}; use the target's tokenizer")
        left_out = tuple(sorted({int(token) for token in special if 0 <= int(token) < vocab_size}))

        counts = np.bincount(corpus, minlength=vocab_size).astype(np.float64)
        smooth = (counts + 1) / (len(corpus) + vocab_size)  # S
        first = np.log((1 - smoothing) * counts / len(corpus) + smoothing * smooth)
        unseen = np.log(smoothing * smooth)
        shares = tuple(tuple(w / sum(weights[:k]) for w in weights[:k]) for k in (1, 2, 3))
        dense = []
        for share in shares:
            bias = strength * (share[0] * first + sum(share[1:]) * unseen)
            bias[list(left_out)] = 0.0
            dense.append(torch.from_numpy(bias.astype(np.float32)))
        sparse = [_count(texts, n, vocab_size, smooth, smoothing, left_out) for n in (2, 3)]
        return cls(
            strength, vocab_size, len(corpus), left_out, (dense[0], dense[1], dense[2]), (sparse[0], sparse[1]), shares
        )  # fmt: skip

    def describe(self) -> str:
        """One line for whoever reads the text: it is no longer the model's own."""
        return (
            f"style prior of {self.tokens} tokens, strength {self.strength:g}: the model's distribution is changed, "
            "speculation is exact with respect to the changed one"
        )

    def reshape(self, tokens: NDArray[np.int64], logits: Tensor) -> Tensor:
        """[V] -> [V]; the caller's row is not written to."""
        if self.strength == 0:
            return logits
        if logits.numel() != self.vocab_size:
            raise InputError(f"this style is for rows of {self.vocab_size} tokens, not {logits.numel()}; make it anew")
        scores = logits + self.bias(tokens, logits.device)
        if not self.special:
            return scores
        # What the other tokens have together stays what it was, so that the special ones keep their probability.
        special = list(self.special)
        before, after = logits.clone(), scores.clone()
        before[special] = after[special] = -math.inf
        shift = torch.logsumexp(before, 0) - torch.logsumexp(after, 0)
        scores += torch.where(torch.isfinite(shift), shift, 0.0)
        scores[special] = logits[special]
        return scores

    def bias(self, tokens: NDArray[np.int64], device: torch.device | str = "cpu") -> Tensor:
        """[V] float32, what is added after these tokens; 0 for special ones. Depends on the last two only."""
        rows = []
        for n, successors in enumerate(self._sparse, 1):
            found = successors.after(_pack(tokens[-n:], self.vocab_size)) if len(tokens) >= n else None
            if found is None:
                break
            rows.append(found)
        bias = self._at(torch.device(device))[len(rows)].clone()
        for (ids, gains), share in zip(rows, self._shares[len(rows)][1:], strict=True):
            bias[torch.from_numpy(ids).to(bias.device)] += torch.from_numpy(self.strength * share * gains).to(
                bias.device
            )
        return bias

    def _at(self, device: torch.device) -> tuple[Tensor, ...]:
        if device not in self._on:
            self._on[device] = tuple(part.to(device) for part in self._dense)
        return self._on[device]


def _pack(context: Sequence[int] | NDArray[np.int64], vocab_size: int) -> int:
    packed = 0
    for token in context:
        packed = packed * vocab_size + int(token)
    return packed


def _count(
    texts: Sequence[NDArray[np.int64]], n: int, vocab_size: int, smooth: NDArray[np.float64], smoothing: float,
    left_out: Sequence[int],
) -> _Successors:  # fmt: skip
    """The n-grams of all texts as rows by context."""
    places = [np.arange(len(text) - n + 1) for text in texts]
    context = np.concatenate(
        [sum((text[at + i] * vocab_size ** (n - 2 - i) for i in range(n - 1)), np.zeros_like(at))
         for text, at in zip(texts, places, strict=True)]
    )  # fmt: skip
    last = np.concatenate([text[at + n - 1] for text, at in zip(texts, places, strict=True)])
    order = np.lexsort((last, context))
    pairs = np.stack([context[order], last[order]])
    new = np.ones(pairs.shape[1], dtype=bool)
    new[1:] = (pairs[:, 1:] != pairs[:, :-1]).any(axis=0)
    firsts = np.nonzero(new)[0]
    counts = np.diff(np.append(firsts, pairs.shape[1]))
    (owners, ids) = pairs[:, firsts]
    contexts, starts, inverse = np.unique(owners, return_index=True, return_inverse=True)
    totals = np.bincount(inverse, weights=counts, minlength=len(contexts))
    share = counts / totals[inverse]
    gains = np.log((1 - smoothing) * share / (smoothing * smooth[ids]) + 1)
    gains[np.isin(ids, left_out)] = 0.0
    return _Successors(contexts, np.append(starts, len(ids)), ids, gains.astype(np.float32))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{file}: not UTF-8 text; convert it first") from None
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}); give a text file or a folder of them") from None
