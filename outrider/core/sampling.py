"""Sampling: raw logits to the distribution that is sampled from, for each tree node by its path, in float32.

The order is repetition penalty, presence and frequency penalties, logit bias, bad words, minimum length, allowed ids,
constraint, temperature, bound, top-k, top-p, min-p; the draft's rows and the target's go through the same code.
Temperature 0 applies all that can move the argmax and skips the rest. Draws nothing: choosing a token is the verifier's
part, but for a predicate, which leaves of a row the one token that the target's noise chooses among those that it lets
pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.errors import EmptySupport, InputError
from outrider.core.legal import Legal, as_words, ban
from outrider.core.noise import longer, text_hash
from outrider.core.numeric.tally import Growing, Tally
from outrider.core.numeric.torch_threads import torch_threads
from outrider.core.params import SamplingParams
from outrider.core.protocols import Bound, Constraint, Predicate
from outrider.core.records import SeenRow
from outrider.core.rows.edits import NO_IDS, NO_NUMBERS, RowEdits, edit
from outrider.core.tree import QRow, TokenTree
from outrider.core.warping import (
    as_wide,
    cheap_together,
    copied,
    divided,
    highest,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    largest,
)

__all__ = ["History", "SamplingParams"]


class History:
    """One sequence's tokens and what its parameters do to a row of logits. Only `append` changes it."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        vocab_size: int,
        stop_ids: frozenset[int] = frozenset(),  # all ids that end the text: banned below the minimum length
        constraint: Constraint | None = None,
        legal: Legal | None = None,  # what an automaton lets this sequence say
        bound: Bound | None = None,
        predicate: Predicate | None = None,
    ) -> None:
        self.prompt: Sequence[int] = tuple(int(token) for token in prompt)
        self.output: list[int] = []  # grows through `append` only
        self.params = params
        self.vocab_size = vocab_size
        self.constraint = constraint
        self.legal = legal
        self.bound = bound
        self.predicate = predicate
        self._tokens = Growing(self.prompt)
        self.hash = text_hash(self._tokens.view)  # of prompt and output; what noise is keyed by
        self._seen = Tally(self.prompt, vocab_size) if params.repetition_penalty != 1 else None
        self._said = Tally((), vocab_size) if params.presence_penalty or params.frequency_penalty else None
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self._biases = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self._stop_ids = [token for token in sorted(stop_ids) if token < vocab_size]
        self._banned = sorted({word[0] for word in params.bad_words if len(word) == 1})
        self._others = _others(params.allowed_ids, vocab_size)
        self._endings: dict[tuple[int, ...], list[int]] = {}  # a bad word less its last id -> the ids that end it
        for word in params.bad_words:
            if len(word) > 1:
                self._endings.setdefault(word[:-1], []).append(word[-1])
        self._prefix_lengths = sorted({len(prefix) for prefix in self._endings})
        edits = (self._seen, self._said, params.logit_bias or None, params.bad_words or None, self._others)
        others = (constraint, bound, predicate)
        self._edits = any(one is not None for one in (*edits, *others))  # of the scores, not only a mask over them
        self._always = self._edits or legal is not None  # something changes every row before the temperature
        self.edits_rows = self._always or bool(self._stop_ids and params.min_new_tokens)  # now or at any time
        self.one_by_one = any(one is not None for one in others)  # its rows cannot be done together with others
        for name, ids in (
            ("logit_bias", params.logit_bias),
            ("bad_words", sum(params.bad_words, ())),
            ("allowed_ids", params.allowed_ids),
            ("prediction", params.prediction),
            ("stop_token_ids", params.stop_token_ids),
        ):
            if (largest := max(ids, default=0)) >= vocab_size:
                raise InputError(f"{name} names token id {largest}: this model has the ids 0..{vocab_size - 1}")
        if predicate is not None and (params.top_k or params.top_p < 1 or params.min_p):
            raise InputError("a predicate sees no whole row to cut: leave out top_k, top_p and min_p, or use a grammar")
        if bound is not None:
            bound.begin(self.prompt, params)

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Prompt and output, a view: do not keep it across steps."""
        return self._tokens.view

    def __len__(self) -> int:
        """Tokens of prompt and output."""
        return len(self._tokens)

    @property
    def last(self) -> int:
        return self.output[-1] if self.output else self.prompt[-1]

    @property
    def temperature(self) -> float:
        return self.params.temperature

    @property
    def prediction(self) -> Sequence[int]:
        return self.params.prediction

    @property
    def generated(self) -> int:
        return len(self.output)

    def append(self, tokens: Iterable[int]) -> None:
        """Changes state: these tokens became text."""
        for token in tokens:
            token = int(token)
            self.hash = longer(self.hash, token, len(self._tokens))
            self.output.append(token)
            self._tokens.append(token)
            if self._seen is not None:
                self._seen.add((token,))
            if self._said is not None:
                self._said.add((token,))
            if self.legal is not None:
                self.legal.append(token)

    def continuations(self) -> list[list[int]]:
        """What is worth drafting behind the text, of what an automaton leaves to follow; legal, the likeliest first."""
        return self.legal.continuations() if self.legal is not None else []

    def reshapes(self, path: Sequence[int] = ()) -> bool:
        """Whether anything besides temperature and truncation changes the row after `path`."""
        return self._always or self._too_short(path)

    def keeps(self, token: int, path: Sequence[int]) -> bool:
        """Whether masks are all that changes the row after `path`, and they let this token stay."""
        legal = self.legal is None or self.legal.allows(token, path)
        return legal and not self._edits and not (self._too_short(path) and token in self._stop_ids)

    def likeliest(self, logits: Tensor, path: Sequence[int]) -> int:
        """The argmax of `process` at temperature 0, the lowest id among equals; without it where a mask is all."""
        if self.legal is None or self._edits or self._too_short(path) or logits.device.type != "cpu":
            return int(self.process(logits, path).argmax())
        token = self.legal.largest(logits.float().numpy(), path)
        if token < 0:
            raise self.nothing_left(path)
        return token

    def process(self, logits: Tensor, path: Sequence[int] = ()) -> Tensor:
        """[V] processed logits after `path` (the tokens below the pending one), float32, banned ids at -inf.

        The caller's row is never written to; it is returned as it is where there is nothing to do.
        """
        scores = self.scored(logits, path)
        if self.bound is not None:
            return self._bounded(self.bound, scores, path)
        return scores if self.params.greedy else self.warp(scores)

    def scored(self, logits: Tensor, path: Sequence[int]) -> Tensor:
        """All that comes before the temperature."""
        return self._reshape(copied(logits), path) if self.reshapes(path) else logits.float()

    @property
    def only_divided(self) -> bool:
        """Whether the temperature is all that comes behind `scored`."""
        p = self.params
        return not p.top_k and p.top_p >= 1 and not p.min_p and self.bound is None

    def masks(self, tree: TokenTree) -> NDArray[np.int32] | None:
        """[nodes, words] what may be said at each node, token t by bit t % 32 of word t // 32; None: anything."""
        words = self.legal.masks(tree) if self.legal is not None else None
        if self._others is None:
            return words
        allowed = as_words(self.params.allowed_ids, self.vocab_size)
        return np.tile(allowed, (len(tree), 1)) if words is None else words & allowed

    def warp(self, scores: Tensor) -> Tensor:
        """Temperature and truncation of [V] scores, or of [rows, V] on a GPU."""
        return self._truncate(divided(scores, self.params.temperature))

    def _truncate(self, scores: Tensor) -> Tensor:
        p = self.params
        return keep_min_p(keep_top_p(keep_top_k(scores, p.top_k), p.top_p), p.min_p)

    def _bounded(self, bound: Bound, scores: Tensor, path: Sequence[int]) -> Tensor:
        """`warp`, and between its parts what lowers tokens; at temperature 0 only bans. Writes to `scores`."""
        ids, lower = bound.lowered((*self.output, *path))
        if self.params.greedy:
            lower = np.where(lower == -math.inf, lower, np.float32(0))
        else:
            scores = divided(scores, self.params.temperature)
        scores[torch.from_numpy(ids).to(scores.device)] += torch.from_numpy(lower).to(scores.device)
        if not bool(largest(scores) > -math.inf):
            raise self.nothing_left(path)
        return scores if self.params.greedy else self._truncate(scores)

    def seen(self, logits: Tensor, path: Sequence[int], children: Iterable[int]) -> SeenRow:
        """The row after `path` for a bound: what the model says after the temperature, and what the mask leaves."""
        scores = self._reshape(copied(logits), path, masked=False)
        probs = torch.softmax(scores.double() / (self.params.temperature or 1.0), 0).cpu().numpy()
        legal = self.legal.mask(path) if self.legal is not None else None
        return SeenRow((*self.output, *path), probs, legal, tuple(children))

    def legal_mass(self, logits: Tensor, path: Sequence[int] = ()) -> float:
        """The probability, at the temperature (1 when greedy), of what the automaton lets follow `path`; 1: all."""
        if self.legal is None:
            return 1.0
        scores = self._reshape(copied(logits), path, masked=False) if self._edits else logits.float()
        return self.legal.mass(torch.softmax(divided(scores, self.params.temperature or 1.0), 0), path)

    def draft_rows(self, logits: Tensor, paths: Sequence[Sequence[int]], width: int) -> list[QRow]:
        """The draft's distribution after each path: warped like the target's rows, cut to `width` tokens, renormalised.

        At temperature 0 it is the distribution at temperature 1. Likeliest first, ties by lower id. Rows of another
        width than the target's are cut or filled up, so that nothing is proposed that the target cannot say. All rows
        leave the device at once.
        """
        scores = self._process_all(as_wide(logits, self.vocab_size), paths)
        values, ids = highest(scores, min(width + 1, self.vocab_size))
        if values.shape[1] > width:
            for row in np.flatnonzero((values[:, width] == values[:, width - 1]) & (values[:, width] > -math.inf)):
                surely = ids[row][values[row] > values[row, width]]  # of the equals the lower ids stay
                tied = np.flatnonzero(scores[row].cpu().numpy() == values[row, width])
                ids[row, :width] = np.concatenate([surely, tied[: width - len(surely)]])
            values, ids = values[:, :width], ids[:, :width]
        order = np.lexsort((ids, -values))
        ids, values = np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1).astype(np.float64)
        weights = np.exp(values - values[:, :1])
        probs, alive = (
            weights / weights.sum(1, keepdims=True),
            (weights > 0).sum(1),
        )  # ids without probability stand last
        return [QRow(ids[row, :count], probs[row, :count]) for row, count in enumerate(alive)]

    def _process_all(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """[rows, V] `process` of each row, in one go where every row is only divided by the temperature."""
        p = self.params
        if p.top_k or p.top_p < 1 or p.min_p or any(self.reshapes(path) for path in paths):
            rows = [self.process(row, path) for row, path in zip(logits, paths, strict=True)]
            together = cheap_together(logits)
            return torch.stack(rows) if together else torch.from_numpy(np.stack([row.numpy() for row in rows]))
        return divided(logits.float(), 1.0 if p.greedy else p.temperature)

    def _reshape(self, scores: Tensor, path: Sequence[int], masked: bool = True) -> Tensor:
        """All that comes before the temperature; writes to `scores`. Without the automaton's mask if not `masked`."""
        p, edits = self.params, self.edits(path)
        edit(scores[None], [edits])
        if self._others is not None:
            scores = scores.masked_fill_(self._others.to(scores.device), -math.inf)
        if masked and self.legal is not None and (row := self.legal.mask(path)) is not None:
            scores = ban(scores, row)
        if self.constraint is not None:
            with torch_threads(torch.get_num_threads() if cheap_together(scores) else 1):
                scores = self.constraint.reshape(self._with(path), scores).float()
        restricted = edits.banned or p.logit_bias or p.allowed_ids or self.constraint is not None
        if (restricted or self.legal is not None) and not bool(largest(scores) > -math.inf):
            raise self.nothing_left(path)
        return scores

    def edits(self, path: Sequence[int]) -> RowEdits:
        """What penalties, bias and bans change in the row after `path`; do not keep it across steps."""
        p, seen, said, penalties = self.params, NO_IDS, NO_IDS, NO_NUMBERS
        if self._seen is not None:
            seen, _ = self._seen.plus(path)
        if self._said is not None:
            said, counts = self._said.plus(path)
            penalties = p.presence_penalty + p.frequency_penalty * counts.astype(np.float32)
        return RowEdits(seen, p.repetition_penalty, said, penalties, self._bias_ids, self._biases, self._bans(path))

    def nothing_left(self, path: Sequence[int]) -> EmptySupport:
        return EmptySupport(
            f"no token is left to follow token {self.generated + len(path)} of the output: "
            "loosen logit_bias, bad_words, allowed_ids, min_new_tokens or the constraint",
            (*self.output, *path),
        )

    def _bans(self, path: Sequence[int]) -> list[int]:
        banned = list(self._banned)
        if self._endings:
            tail = tuple(self._with(path, last=self._prefix_lengths[-1]).tolist())
            for length in self._prefix_lengths:
                banned += self._endings.get(tail[-length:], ())
        if self._too_short(path):
            banned += self._stop_ids
        return banned

    def _too_short(self, path: Sequence[int]) -> bool:
        return bool(self._stop_ids) and self.generated + len(path) < self.params.min_new_tokens

    def _with(self, path: Sequence[int], last: int = 0) -> NDArray[np.int64]:
        """Context and path; only as many of the context's tokens as `last` asks for, 0 for all."""
        context = self.tokens[-last:]
        return np.concatenate([context, np.asarray(path, dtype=np.int64)]) if len(path) else context


def _others(allowed: Sequence[int], vocab_size: int) -> Tensor | None:
    """[V] whether a token is banned because it is none of those allowed; None where all are."""
    if not allowed:
        return None
    banned = torch.ones(vocab_size, dtype=torch.bool)
    banned[[token for token in allowed if token < vocab_size]] = False
    return banned
