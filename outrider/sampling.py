"""Sampling: raw logits to the law that is sampled from, per tree node, from the node's own path, in float32.

The order is repetition penalty, presence and frequency penalties, logit bias, bad words, minimum length, constraint,
temperature, top-k, top-p, min-p; the draft's rows and the target's go through the same code. Temperature 0 applies all
that can move the argmax and skips the rest. Draws nothing: choosing a token is the verifier's part. On the host rows
are numpy's, so that no thread of torch's wakes between two steps of a runtime with threads of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.errors import EmptySupport, InputError
from outrider.native.torch_threads import torch_threads
from outrider.noise import MASK, text_hash
from outrider.params import SamplingParams
from outrider.protocols import Constraint
from outrider.tree import QRow, TokenTree

__all__ = ["History", "SamplingParams", "TargetRows", "keep_min_p", "keep_top_k", "keep_top_p"]

_PREFIX = 256  # tokens top-p looks at before it looks further; on CPU a prefix is far cheaper than a full sort


class History:
    """One sequence's tokens and what its parameters do to a row of logits. Only `append` changes it."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        vocab_size: int,
        stop_ids: frozenset[int] = frozenset(),  # all ids that end the text: banned below the minimum length
        constraint: Constraint | None = None,
    ) -> None:
        self.prompt: Sequence[int] = tuple(int(token) for token in prompt)
        self.output: list[int] = []  # grows through `append` only
        self.params = params
        self.vocab_size = vocab_size
        self.constraint = constraint
        self._tokens = _Growing(self.prompt)
        self.hash = text_hash(self._tokens.view)  # of prompt and output; what noise is keyed by
        self._seen = _Tally(self.prompt, vocab_size) if params.repetition_penalty != 1 else None
        self._said = _Tally((), vocab_size) if params.presence_penalty or params.frequency_penalty else None
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        self._stop_ids = [token for token in sorted(stop_ids) if token < vocab_size]
        self._banned = sorted({word[0] for word in params.bad_words if len(word) == 1})
        self._endings: dict[tuple[int, ...], list[int]] = {}  # a bad word less its last id -> the ids that end it
        for word in params.bad_words:
            if len(word) > 1:
                self._endings.setdefault(word[:-1], []).append(word[-1])
        self._prefix_lengths = sorted({len(prefix) for prefix in self._endings})
        edits = (self._seen is not None, self._said is not None, params.logit_bias, params.bad_words)
        self._always = any(edits) or constraint is not None  # something changes every row before the temperature
        for name, ids in (
            ("logit_bias", params.logit_bias),
            ("bad_words", sum(params.bad_words, ())),
            ("prediction", params.prediction),
            ("stop_token_ids", params.stop_token_ids),
        ):
            if (largest := max(ids, default=0)) >= vocab_size:
                raise InputError(f"{name} names token id {largest}: this model has the ids 0..{vocab_size - 1}")

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Prompt and output, a view: do not keep it across steps."""
        return self._tokens.view

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
        new = [int(token) for token in tokens]
        self.hash = self.hash + text_hash(new, len(self.tokens)) & MASK
        self.output.extend(new)
        self._tokens.extend(new)
        for tally in (self._seen, self._said):
            if tally is not None:
                tally.add(new)

    def reshapes(self, path: Sequence[int] = ()) -> bool:
        """Whether anything besides temperature and truncation changes the row after `path`."""
        return self._always or self._too_short(path)

    def process(self, logits: Tensor, path: Sequence[int] = ()) -> Tensor:
        """[V] processed logits after `path` (the tokens below the pending one), float32, banned ids at -inf.

        The caller's row is never written to; it is returned as it is where there is nothing to do.
        """
        reshaped = self.reshapes(path)
        scores = self._reshape(_copied(logits), path) if reshaped else logits.float()
        return scores if self.params.greedy else self.warp(scores)

    def warp(self, scores: Tensor) -> Tensor:
        """Temperature and truncation of [V] scores, or of [rows, V] on a GPU."""
        p = self.params
        return keep_min_p(keep_top_p(keep_top_k(_divided(scores, p.temperature), p.top_k), p.top_p), p.min_p)

    def draft_rows(self, logits: Tensor, paths: Sequence[Sequence[int]], width: int) -> list[QRow]:
        """The draft's law after each path: warped as the target's rows are, cut to the `width` likeliest, renormalised.

        At temperature 0 it is the law at temperature 1. Likeliest first, ties by lower id. Rows of another width than
        the target's are cut or filled up, so that nothing is proposed that the target cannot say. All rows leave the
        device at once.
        """
        scores = self._process_all(_as_wide(logits, self.vocab_size), paths)
        values, ids = _highest(scores, min(width + 1, self.vocab_size))
        if values.shape[1] > width:
            for row in np.flatnonzero((values[:, width] == values[:, width - 1]) & (values[:, width] > -math.inf)):
                surely = ids[row][values[row] > values[row, width]]  # of the equals the lower ids stay
                tied = np.flatnonzero(scores[row].cpu().numpy() == values[row, width])
                ids[row, :width] = np.concatenate([surely, tied[: width - len(surely)]])
            values, ids = values[:, :width], ids[:, :width]
        order = np.lexsort((ids, -values))
        ids, values = np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1).astype(np.float64)
        weights = np.exp(values - values[:, :1])
        probs, alive = weights / weights.sum(1, keepdims=True), (weights > 0).sum(1)  # the dead stand last
        return [QRow(ids[row, :count], probs[row, :count]) for row, count in enumerate(alive)]

    def _process_all(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """[rows, V] `process` of each row, in one go where every row is only divided by the temperature."""
        p = self.params
        if p.top_k or p.top_p < 1 or p.min_p or any(self.reshapes(path) for path in paths):
            rows = [self.process(row, path) for row, path in zip(logits, paths, strict=True)]
            together = _cheap_together(logits)
            return torch.stack(rows) if together else torch.from_numpy(np.stack([row.numpy() for row in rows]))
        return _divided(logits.float(), 1.0 if p.greedy else p.temperature)

    def _reshape(self, scores: Tensor, path: Sequence[int]) -> Tensor:
        """All that comes before the temperature; writes to `scores`."""
        p = self.params
        if self._seen is not None:
            ids = self._seen.plus(path)[0].to(scores.device)
            picked = scores[ids]
            scores[ids] = torch.where(picked < 0, picked * p.repetition_penalty, picked / p.repetition_penalty)
        if self._said is not None:
            ids, counts = self._said.plus(path)
            penalty = p.presence_penalty + p.frequency_penalty * counts.float()
            scores[ids.to(scores.device)] -= penalty.to(scores.device)
        if p.logit_bias:
            scores[self._bias_ids.to(scores.device)] += self._bias.to(scores.device)
        banned = self._bans(path)
        if banned:
            scores[torch.tensor(banned, device=scores.device)] = -math.inf
        if self.constraint is not None:
            with torch_threads(torch.get_num_threads() if _cheap_together(scores) else 1):
                scores = self.constraint.reshape(self._with(path), scores).float()
        if (banned or p.logit_bias or self.constraint is not None) and not bool(_top(scores) > -math.inf):
            raise EmptySupport(
                f"no token is left to follow token {self.generated + len(path)} of the output: "
                "loosen logit_bias, bad_words, min_new_tokens or the constraint"
            )
        return scores

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


class TargetRows:
    """The target's processed law at each node of one tree, computed when asked for and kept."""

    def __init__(
        self, logits: Tensor, tree: TokenTree, history: History, likeliest: Sequence[int] | None = None
    ) -> None:  # fmt: skip
        self._logits = logits  # [rows, V], raw, never written to
        self._likeliest = likeliest  # the argmax of each raw row, where it is known already
        self._tree = tree
        self._history = history
        self._probs: dict[int, Tensor] = {}
        self._argmax: dict[int, int] = {}

    @property
    def greedy(self) -> bool:
        return self._history.params.greedy

    def probs(self, node: int) -> Tensor:
        """[V] float32. At temperature 0 all of it stands on the argmax."""
        if node not in self._probs:
            if self.greedy:
                law = torch.zeros(self._logits.shape[1], device=self._logits.device)
                law[self.argmax(node)] = 1.0
            else:
                law = torch.softmax(self._process(node), 0)
            self._probs[node] = law
        return self._probs[node]

    def together(self) -> Tensor | None:
        """[rows, V] on a GPU, where one row costs as much as all; None elsewhere, and where rows are reshaped."""
        history = self._history
        if self.greedy or not _cheap_together(self._logits):
            return None
        if any(history.reshapes(self._tree.path_tokens(node)) for node in range(len(self._tree))):
            return None
        return torch.softmax(history.warp(self._logits.float()), -1)

    def argmax(self, node: int) -> int:
        """The likeliest token, the lowest id among equals."""
        if node not in self._argmax:
            reshaped = self._history.reshapes(self._tree.path_tokens(node))
            if not reshaped and self._likeliest is not None:
                self._argmax[node] = self._likeliest[node]
            elif self._logits.device.type == "cpu":
                row = self._process(node) if reshaped else self._logits[node]
                self._argmax[node] = int(row.numpy().argmax() if row.dtype is torch.float32 else row.argmax())
            elif reshaped:
                self._argmax[node] = int(self._process(node).argmax())
            else:  # one transfer for the whole tree
                self._argmax.update(enumerate(self._logits.argmax(1).tolist()))
        return self._argmax[node]

    def logprobs(self, node: int) -> tuple[Tensor, Tensor]:
        """Raw and processed log-probabilities, [V] float32 each.

        Processed ones are of the law that is sampled from; at temperature 0, of the processed logits (penalties, bias,
        bans and constraint included) at temperature 1.
        """
        return torch.log_softmax(self._logits[node].float(), 0), torch.log_softmax(self._process(node), 0)

    def _process(self, node: int) -> Tensor:
        return self._history.process(self._logits[node], self._tree.path_tokens(node))


def keep_top_k(scores: Tensor, k: int) -> Tensor:
    """The k highest; all that equal the k-th stay, as in transformers. 0 keeps everything."""
    if not 0 < k < scores.shape[-1]:
        return scores
    return _at_least(scores, torch.topk(scores, k).values[..., -1:])


def keep_top_p(scores: Tensor, p: float) -> Tensor:
    """The fewest likeliest tokens whose probability reaches p; among equals at the boundary the lowest ids stay.

    A token stays while the probability before it is below p. That is decided by sorted values alone, so on the host a
    sorted prefix that reaches p is enough, and which of the equals stay is settled afterwards by id.
    """
    if p >= 1:
        return scores
    if _cheap_together(scores):  # sorting is cheap and asking for a value is not
        return _top_p_together(scores, p)
    row = scores.numpy()
    top = row.max()
    total = np.exp(row - top).sum(dtype=np.float64)
    values = torch.topk(scores, min(_PREFIX, len(row))).values.numpy()
    reached = np.exp(values - top).cumsum(dtype=np.float64) / total
    if reached[-1] < p:
        values = np.sort(row)[::-1]
        reached = np.exp(values - top).cumsum(dtype=np.float64) / total
    kept = 1 + np.count_nonzero(reached[:-1] < p)
    floor = values[kept - 1]
    out = row < floor
    if len(row) - np.count_nonzero(out) > kept:
        out[np.flatnonzero(row == floor)[kept - np.count_nonzero(row > floor) :]] = True
    return torch.from_numpy(np.where(out, -math.inf, row))


def _top_p_together(scores: Tensor, p: float) -> Tensor:
    values = torch.sort(scores, descending=True).values
    odds = (values - values[..., :1]).exp_()
    reached = odds.cumsum(-1, dtype=torch.float64) / odds.sum(-1, keepdim=True, dtype=torch.float64)
    kept = 1 + (reached[..., :-1] < p).sum(-1, keepdim=True)
    floor = values.gather(-1, kept - 1)
    tied = scores == floor
    out = (scores < floor) | (tied & (tied.cumsum(-1) > kept - (scores > floor).sum(-1, keepdim=True)))
    return scores.masked_fill(out, -math.inf)


def keep_min_p(scores: Tensor, min_p: float) -> Tensor:
    """Tokens at least `min_p` times as likely as the likeliest. 0 keeps everything."""
    return _at_least(scores, _top(scores) + math.log(min_p)) if min_p else scores


def _cheap_together(scores: Tensor) -> bool:
    """On a GPU many rows cost as much as one, and asking for a value costs a wait."""
    return scores.device.type != "cpu"


def _copied(logits: Tensor) -> Tensor:
    """In float32."""
    on_host = not _cheap_together(logits)
    return torch.from_numpy(logits.float().numpy().copy()) if on_host else logits.to(torch.float32, copy=True)


def _divided(scores: Tensor, by: float) -> Tensor:
    if by == 1:
        return scores
    return scores / by if _cheap_together(scores) else torch.from_numpy(scores.numpy() / by)


def _top(scores: Tensor) -> Tensor:
    """[..., 1]: the largest."""
    if _cheap_together(scores):
        return scores.amax(-1, keepdim=True)
    return torch.from_numpy(scores.numpy().max(-1, keepdims=True))


def _at_least(scores: Tensor, floor: Tensor) -> Tensor:
    """-inf for what is below."""
    if _cheap_together(scores):
        return scores.masked_fill(scores < floor, -math.inf)
    row = scores.numpy()
    return torch.from_numpy(np.where(row < floor.numpy(), -math.inf, row))


def _as_wide(logits: Tensor, width: int) -> Tensor:
    """[rows, width]: cut, or filled up with what cannot be said."""
    if logits.shape[1] >= width:
        return logits[:, :width]
    missing = width - logits.shape[1]
    if _cheap_together(logits):
        return torch.nn.functional.pad(logits, (0, missing), value=-math.inf)
    return torch.from_numpy(np.pad(logits.float().numpy(), ((0, 0), (0, missing)), constant_values=-math.inf))


def _highest(scores: Tensor, count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The values and ids of the `count` highest of each row, on the host."""
    if _cheap_together(scores):
        found = torch.topk(scores, count)
        return found.values.cpu().numpy(), found.indices.cpu().numpy()
    rows = [torch.topk(row, count) for row in scores]
    return np.stack([row.values.numpy() for row in rows]), np.stack([row.indices.numpy() for row in rows])


class _Growing:
    """Integers in a buffer that doubles: appending is O(1) amortised, `view` copies nothing."""

    def __init__(self, values: Sequence[int] = ()) -> None:
        self._data = np.array(values, dtype=np.int64)
        self._size = len(values)

    @property
    def view(self) -> NDArray[np.int64]:
        return self._data[: self._size]

    def extend(self, values: Sequence[int]) -> None:
        size = self._size + len(values)
        if size > len(self._data):
            grown = np.empty(max(64, 2 * size), dtype=np.int64)
            grown[: self._size] = self.view
            self._data = grown
        self._data[self._size : size] = values
        self._size = size


class _Tally:
    """Distinct ids below `limit` and how often each occurred, so that a penalty never scans the context."""

    def __init__(self, tokens: Sequence[int], limit: int) -> None:
        self._limit = limit
        self._place: dict[int, int] = {}
        self._ids = _Growing()
        self._counts = _Growing()
        self.add(tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Changes state."""
        fresh = dict.fromkeys(t for t in tokens if t < self._limit and t not in self._place)
        self._place.update({t: len(self._place) + i for i, t in enumerate(fresh)})
        self._ids.extend(list(fresh))
        self._counts.extend([0] * len(fresh))
        np.add.at(self._counts.view, [self._place[t] for t in tokens if t < self._limit], 1)

    def plus(self, path: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Ids and counts as they would be with `path` appended: the same numbers, so the same bits, as after it is."""
        ids, counts = self._ids.view, self._counts.view
        if len(path):
            fresh = [t for t in dict.fromkeys(path) if t < self._limit and t not in self._place]
            place = {t: len(ids) + i for i, t in enumerate(fresh)}
            ids = np.concatenate([ids, np.array(fresh, dtype=np.int64)])
            counts = np.concatenate([counts, np.zeros(len(fresh), dtype=np.int64)])
            np.add.at(counts, [place.get(t, self._place.get(t, -1)) for t in path if t < self._limit], 1)
        return torch.from_numpy(ids), torch.from_numpy(counts)
