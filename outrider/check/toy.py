"""Toy models over a handful of tokens, with tables in float64 as distributions, that play the protocols' roles.

`ToyTarget` keeps the books of a real runtime and asserts that it is used as the protocol says, so an engine that works
on it makes its calls in the right order with the right rows. No neural network, no speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.protocols import Context, Noise
from outrider.core.records import Chunk, Needs, Piece, Scores, StepRecord, Traits
from outrider.core.tree import QRow, TokenTree


@dataclass(frozen=True, slots=True)
class ToyLM:
    """A Dirichlet next-token distribution for each context, the same for equal seeds; made when first asked for."""

    vocab: int = 3
    seed: int = 0
    order: int = 4  # tokens of context that matter
    concentration: float = 1.0  # small: peaked distributions; large: flat ones
    zeros: float = 0.0  # share of tokens that are impossible in a context; one always stays
    allowed: tuple[int, ...] | None = None  # tokens that can occur at all
    top_k: int = 0
    top_p: float = 1.0
    greedy: bool = False  # temperature 0: all probability on the likeliest token
    _table: dict[tuple[int, ...], NDArray[np.float64]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    _rows: dict[tuple[int, ...], QRow] = field(default_factory=dict, init=False, compare=False, repr=False)

    def probs(self, context: Sequence[int]) -> NDArray[np.float64]:
        """[vocab]; do not write to it."""
        key = tuple(int(t) for t in context[-self.order :])
        if key not in self._table:
            self._table[key] = self._make(key)
        return self._table[key]

    def row(self, context: Sequence[int]) -> QRow:
        key = tuple(int(t) for t in context[-self.order :])
        if key not in self._rows:
            self._rows[key] = as_row(self.probs(key))
        return self._rows[key]

    def _make(self, key: tuple[int, ...]) -> NDArray[np.float64]:
        rng = np.random.default_rng([self.seed, len(key), *key])
        p = rng.dirichlet([self.concentration] * self.vocab)
        p[(rng.random(self.vocab) < self.zeros) & (np.arange(self.vocab) != p.argmax())] = 0.0
        if self.allowed is not None:
            p[~np.isin(np.arange(self.vocab), self.allowed)] = 0.0
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order] / p.sum()) - p[order] / p.sum()  # probability ahead of each token
        keep = before < self.top_p
        keep[(1 if self.greedy else self.top_k or self.vocab) :] = False
        p[order[~keep]] = 0.0
        p /= p.sum()
        return p


def as_row(probs: NDArray[np.float64]) -> QRow:
    ids = np.nonzero(probs)[0]
    return QRow(ids, probs[ids])


@dataclass(slots=True)
class TableRows:
    """`protocols.Rows` of one tree from a toy model. `context` ends with the pending token; `asked` logs the nodes."""

    lm: ToyLM
    context: Sequence[int]
    tree: TokenTree
    dtype: torch.dtype = torch.float64
    asked: list[int] = field(default_factory=list)
    _rows: dict[int, Tensor] = field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        return self.lm.greedy

    def probs(self, node: int) -> Tensor:
        self.asked.append(node)
        if node not in self._rows:
            self._rows[node] = torch.tensor(self._table(node), dtype=self.dtype)
        return self._rows[node]

    def argmax(self, node: int) -> int:
        self.asked.append(node)
        return int(self._table(node).argmax())

    def pick(self, node: int, path: Sequence[int], noise: Noise) -> int:
        return noise.pick(self.probs(node), path)

    def together(self) -> None:
        return None

    def _table(self, node: int) -> NDArray[np.float64]:
        return self.lm.probs([*self.context, *self.tree.path_tokens(node)])


@dataclass(slots=True)
class _Slot:
    tokens: list[int] = field(default_factory=list)  # committed
    tree: TokenTree | None = None  # what ran since the last commit


class ToyTarget:
    """`protocols.Target` over a toy model: logits are log p in float64, hidden states are p itself."""

    def __init__(
        self, lm: ToyLM, slots: int = 4, max_context: int = 256, max_rows: int = 128, prompt_rows: int = 3
    ) -> None:
        self.lm, self.vocab_size, self.max_context, self.max_rows = lm, lm.vocab, max_context, max_rows
        self.prompt_rows = prompt_rows
        self.forwards = 0  # passes with a tree in them
        self._capacity = slots
        self._slots: dict[int, _Slot] = {}

    @property
    def traits(self) -> Traits:
        return Traits(slots=self._capacity, mixes=True, same_bits=True, prompt_rows=self.prompt_rows)

    def prepare(self, contexts: Sequence[int], needs: Needs) -> None:
        """There is nothing to make."""

    @property
    def free_slots(self) -> int:
        return self._capacity - len(self._slots)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def fits(self, rows: Mapping[int, int]) -> bool:
        return True

    def acquire(self, tokens: Sequence[int] = (), salt: str = "") -> int:
        assert self.free_slots, "no free slot: the caller must queue"
        slot = next(i for i in range(self._capacity) if i not in self._slots)
        self._slots[slot] = _Slot()
        return slot

    def release(self, slot: int) -> None:
        assert slot in self._slots, f"slot {slot} is not held"
        del self._slots[slot]

    def fork(self, slot: int, length: int | None = None) -> int:
        held = self._held(slot)
        assert held.tree is None, "fork between steps"
        assert length is None or 0 <= length <= len(held.tokens), "a prefix of what is committed"
        twin = self.acquire()
        self._slots[twin] = _Slot(held.tokens[:length])
        return twin

    def truncate(self, slot: int, length: int) -> None:
        held = self._held(slot)
        assert 0 <= length <= len(held.tokens), "a prefix of what is committed"
        del held.tokens[length:]
        held.tree = None

    def length(self, slot: int) -> int:
        return len(self._held(slot).tokens)

    def committed(self, slot: int) -> tuple[int, ...]:
        return tuple(self._held(slot).tokens)

    def run(self, pieces: Sequence[Piece], needs: Needs) -> list[Scores]:
        assert pieces and len({piece.slot for piece in pieces}) == len(pieces), "one piece a slot"
        assert all((piece.tree is None) == (len(piece.tokens) > 0) for piece in pieces), "text or a tree"
        self.forwards += any(piece.tree is not None for piece in pieces)
        rows = sum(len(piece.tokens) for piece in pieces)
        assert rows <= max(self.traits.prompt_rows, len(pieces)), "more rows of text than a pass should have"
        return [self._text(p, needs) if p.tree is None else self._tree(p, p.tree, needs) for p in pieces]

    def _text(self, piece: Piece, needs: Needs) -> Scores:
        held, tokens = self._held(piece.slot), [int(t) for t in piece.tokens]
        assert held.tree is None, "text goes behind what is committed, between steps"
        assert len(held.tokens) + len(tokens) < self.max_context, "the text and its pending token fit the context"
        assert all(0 <= t < self.vocab_size for t in tokens), "tokens of this vocabulary"
        before = len(held.tokens)
        held.tokens += tokens
        ends = range(before + 1, len(held.tokens) + 1)
        return self._scores([held.tokens[:end] for end in ends], needs, needs.logits)

    def _tree(self, piece: Piece, tree: TokenTree, needs: Needs) -> Scores:
        held, ran = self._held(piece.slot), piece.done
        before = held.tree
        assert 0 <= ran < len(tree), "at least one row to run"
        assert ran == 0 or (before is not None and ran <= len(before)), "`done` counts rows run since the commit"
        if ran and before is not None:
            assert (before.tokens[:ran] == tree.tokens[:ran]).all(), "rows already run must not change"
            assert (before.parents[:ran] == tree.parents[:ran]).all(), "rows already run must not change"
        assert len(tree) <= self.max_rows, "more rows than fit behind the prefix"
        assert len(held.tokens) + tree.depth < self.max_context, "the tree passes the end of the context"
        assert ((tree.tokens >= 0) & (tree.tokens < self.vocab_size)).all(), "tokens of this vocabulary"
        held.tree = tree
        head = [*held.tokens, int(tree.tokens[0])]
        return self._scores([head + tree.path_tokens(i) for i in range(ran, len(tree))], needs, True)

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        for slot, path in zip(slots, paths, strict=True):
            held = self._held(slot)
            tree = held.tree
            assert tree is not None, "commit follows a pass over a tree"
            for parent, node in zip([0, *path], path, strict=False):
                assert tree.parents[node] == parent, "a path goes from the first candidate down, parent to child"
            held.tokens.extend(int(tree.tokens[node]) for node in [0, *path])
            held.tree = None

    def _held(self, slot: int) -> _Slot:
        assert slot in self._slots, f"slot {slot} is not held"
        return self._slots[slot]

    def _scores(self, contexts: list[list[int]], needs: Needs, logits: bool) -> Scores:
        rows = torch.from_numpy(np.stack([self.lm.probs(c) for c in contexts]))  # [rows, V]
        return Scores(rows.log() if logits else None, dict.fromkeys(needs.hidden, rows))


class ToySource:
    """`protocols.Source` over a toy model: its distribution is the table, whatever the sampling settings."""

    def __init__(self, lm: ToyLM, name: str = "toy", needs: Needs | None = None) -> None:
        self.lm, self.name, self.needs = lm, name, needs or Needs()
        self._contexts: dict[int, Context] = {}
        self._given: dict[int, int] = {}  # nodes whose distribution was handed out in this step

    def begin(self, slot: int, context: Context) -> None:
        assert slot not in self._contexts, f"slot {slot} has begun already"
        self._contexts[slot] = context

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            text = self._contexts[chunk.slot].tokens[chunk.start : chunk.start + len(chunk.tokens)]
            assert [int(t) for t in chunk.tokens] == text.tolist(), "a chunk is a stretch of the text"

    def end(self, slot: int) -> None:
        del self._contexts[slot]
        self._given.pop(slot, None)

    def start(self, slots: Sequence[int]) -> list[QRow]:
        self._given.update(dict.fromkeys(slots, 1))
        return [self.lm.row(self._contexts[slot].tokens.tolist()) for slot in slots]

    def extend(self, slots: Sequence[int], trees: Sequence[TokenTree], done: Sequence[int]) -> list[list[QRow]]:
        answer = []
        for slot, tree, first in zip(slots, trees, done, strict=True):
            assert 1 <= first <= self._given[slot], "the distributions of earlier nodes must have been asked for"
            head = [int(t) for t in self._contexts[slot].tokens]
            assert head[-1] == tree.tokens[0], "the tree hangs on the pending token"
            answer.append([self.lm.row(head + tree.path_tokens(i)) for i in range(first, len(tree))])
            self._given[slot] = len(tree)
        return answer

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        assert len(slots) == len(records), "a record a slot"
        for slot in slots:
            self._given.pop(slot, None)
