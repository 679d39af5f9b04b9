"""STAND: after each n-gram the mean of the target's distributions, drawn from without replacement in a static shape.

Paper: arXiv 2506.04708. Lossless: with noise every child is a draw that carries its row; without (greedy requests, the
invariant rule) the likeliest successors are point masses. Entries hold probabilities at temperature 1, averaged as
probabilities, and are re-tempered when read, so that requests of any temperature share them. By default only committed
positions and the prompt teach. Cost: about 120 bytes an entry, one entry an order and position, microseconds a step,
and one top-10 over the rows that teach.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from outrider.core.noise import StreamNoise
from outrider.core.proposals import Proposals
from outrider.core.protocols import Context, Noise
from outrider.core.records import Budget, Chunk, Needs, StepRecord
from outrider.core.tree import Draw, QRow, TokenTree, fixed
from outrider.draft.table import ngram_distributions as distributions
from outrider.draft.table.ngram_table import (
    SPAN,
    Table,
    clear,
    new_owner,
    new_table,
    restore,
    stored,
    windows_of_text,
    windows_of_tree,
)
from outrider.draft.table.odds import Odds, chance_of, new_odds, reset, restore_odds, stored_odds
from outrider.draft.table.positions import Positions, parse, positions
from outrider.draft.table.top_rows import top_of

# The 80 places that lay on accepted paths most often, best first, over answers of SmolLM2-135M-Instruct to 22 prompts
# of all six groups: `most_accepted` makes one from your own counts.
DEFAULT_SHAPE = """
    0 00 000 0000 1 00000 000000 0000000 00000000 2 3 01 4 10 001 5 6 7 8 02 100 03 30 1000 0001 9 11 40 20 010
    00001 200 300 0100 10000 04 50 002 0010 00100 01000 000001 21 80 00010 000100 001000 100000 05 003 020 0002
    0000001 0001000 12 60 70 011 040 2000 000010 0000100 1000000 00000001 00001000 10000000 06 07 13 14 41 004 030
    0011 010000 0000010 0010000 0100000 00000010 00000100
"""


@dataclass(slots=True)
class _Seat:
    context: Context
    reader: distributions.Reader
    greedy: bool


@dataclass(slots=True)
class Stand:
    """`sampled`: candidates are drawn, for a coupled rule; else they are the likeliest. `scope` says who shares."""

    vocab_size: int
    sampled: bool = True
    longest: int = 4
    shortest: int = 1
    candidates: int = 10
    learn_prompt: bool = True
    learn_rejected: bool = False
    scope: Literal["shared", "prompt", "private"] = "shared"
    memory_bytes: int = 64 << 20
    shape: Positions = field(default_factory=lambda: positions(parse(DEFAULT_SHAPE)))
    name: str = "stand"
    shared_noise: bool = False
    _table: Table = field(init=False)
    _odds: Odds = field(default_factory=lambda: new_odds(SPAN))
    _seats: dict[int, _Seat] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._table = new_table(self.memory_bytes, self.candidates)

    @property
    def needs(self) -> Needs:
        return Needs(logits=self.learn_prompt, top=self.candidates)

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    def begin(self, slot: int, context: Context) -> None:
        greedy = context.temperature <= 0
        inverse_temperature = 1.0 if greedy else 1.0 / context.temperature
        owner = new_owner(self.scope, context.prompt)
        reader = distributions.Reader(owner, self.longest, self.shortest, inverse_temperature)
        self._seats[slot] = _Seat(context, reader, greedy)

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks if self.learn_prompt else ():
            if (top := top_of(chunk.scores, self.candidates)) is not None:
                seat = self._seats[chunk.slot]
                windows = windows_of_text(seat.context.tokens, chunk.start, chunk.start + len(chunk.tokens))
                self._learn(seat, windows, top.ids, top.logprobs)

    def end(self, slot: int) -> None:
        self._seats.pop(slot, None)

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        return Proposals([self._grow(self._seats[s], b, n) for s, b, n in zip(slots, budgets, noise, strict=True)])

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        for slot, record in zip(slots, records, strict=True):
            self._follow(self._seats[slot], record)

    def _follow(self, seat: _Seat, record: StepRecord) -> None:
        """Changes the table: what the target said along the accepted path."""
        tree, emitted = record.tree, len(record.emitted)
        if not emitted or (top := top_of(record.scores, self.candidates)) is None:
            return
        tokens = seat.context.tokens
        pending = len(tokens) - 1 - emitted  # its place in the text
        windows = windows_of_tree(_tail(tokens, pending), tree.tokens, tree.parents)
        # the last accepted token may lie behind the end of the text
        path = np.array((0, *record.verdict.path), dtype=np.int64)[:emitted]
        distributions.count_offers(self._table, self._odds, seat.reader, windows[path], tokens[pending + 1 :])
        if self.learn_rejected:
            path = np.concatenate([np.setdiff1d(np.arange(len(tree)), path), path])
        self._learn(seat, windows[path], top.ids[path], top.logprobs[path])

    def memory(self) -> dict[str, NDArray[Any]]:
        return {**stored(self._table), **stored_odds(self._odds)}

    def remember(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        restore(self._table, arrays, self.vocab_size, largest=1.0 + 1e-3)
        restore_odds(self._odds, arrays)

    def forget(self) -> None:
        clear(self._table)
        reset(self._odds)

    def distribution(self, slot: int, after: Sequence[int] = ()) -> QRow:
        """The distribution that the slot drafts with after these tokens; empty where no context is known."""
        window = _tail(np.array((*self._seats[slot].context.tokens[-SPAN:].tolist(), *after), dtype=np.int64), -1)
        ids, probs = np.empty(self.candidates, dtype=np.int64), np.empty(self.candidates)
        _, size = distributions.read(self._table, self._seats[slot].reader, window, ids, probs)
        return QRow(ids[:size], probs[:size])

    def _learn(
        self, seat: _Seat, windows: NDArray[np.int64], ids: NDArray[np.int32], logprobs: NDArray[np.float32]
    ) -> None:  # fmt: skip
        probs = np.exp(logprobs.astype(np.float64))
        distributions.learn(self._table, seat.reader.owner, windows, ids, probs, self.longest, self.shortest)

    def _grow(self, seat: _Seat, budget: Budget, noise: Noise) -> TokenTree:
        tokens, s = seat.context.tokens, self.shape
        tail = _tail(tokens, len(tokens) - 1)
        drawn = self.sampled and not seat.greedy
        if drawn and not isinstance(noise, StreamNoise):
            return self._sampled_tree(fill_by_noise(self._table, self._odds, seat.reader, tail, s, budget, noise))
        step = noise.key if isinstance(noise, StreamNoise) else 0
        filled = distributions.fill(
            self._table, self._odds, seat.reader, tail, s.parents, s.ranks, s.depths, budget.nodes, budget.depth,
            drawn, np.uint64(step),
        )  # fmt: skip
        if drawn:
            return self._sampled_tree(filled)
        return fixed(filled.tokens, filled.parents, self.name, filled.weights)

    def _sampled_tree(self, filled: distributions.Filled) -> TokenTree:
        ids, probs, lengths = distributions.rows(filled)
        draws: list[list[Draw]] = [[] for _ in filled.tokens]
        each = zip(filled.tokens.tolist(), filled.parents.tolist(), lengths.tolist(), strict=True)
        for node, (token, parent, length) in enumerate(each):
            if node:
                draws[parent].append(Draw(token, node, QRow(ids[node, :length], probs[node, :length])))
        origins = ("",) + (self.name,) * (len(draws) - 1)
        return TokenTree(filled.tokens, filled.parents, tuple(map(tuple, draws)), origins, filled.weights)


def fill_by_noise(
    table: Table, odds: Odds, reader: distributions.Reader, tail: NDArray[np.int64], shape: Positions, budget: Budget,
    noise: Noise,
) -> distributions.Filled:  # fmt: skip
    """The reference of `ngram_distributions.fill` with draws: one call of the noise for each, whatever noise it is."""
    width = table.ids.shape[1]
    out = distributions.blank(budget.nodes, width, int(tail[-1]))
    stands, windows, left, orders = {0: 0}, {0: tail}, dict[int, NDArray[np.float64]](), dict[int, int]()
    for place in range(1, len(shape) + 1):
        parent = stands.get(int(shape.parents[place]), -1)
        if len(stands) > budget.nodes or parent < 0 or shape.depths[place] > budget.depth:
            continue
        if parent not in left:
            orders[parent], size = distributions.read(
                table, reader, windows[parent], out.ids[parent], out.probs[parent]
            )
            left[parent], out.sizes[parent] = out.probs[parent, :size].copy(), size
        rank = int(shape.ranks[place])
        if rank >= out.sizes[parent]:
            continue
        pick = noise.draw(left[parent], parent, rank)
        left[parent][pick] = 0.0
        node = stands[place] = len(stands)
        token = int(out.ids[parent, pick])
        out.tokens[node], out.parents[node], out.picks[node], out.ranks[node] = token, parent, pick, rank
        chance = chance_of(odds, orders[parent] - 1, pick, out.probs[parent, pick])
        out.weights[node] = out.weights[parent] * chance
        windows[node] = np.append(windows[parent][1:], token)
    return distributions.cut(out, len(stands))


def _tail(tokens: NDArray[np.int64], last: int) -> NDArray[np.int64]:
    """[4] the tokens up to place `last`, -1 before the text begins."""
    last %= len(tokens)
    if last >= SPAN - 1:
        return tokens[last - SPAN + 1 : last + 1]
    window = np.full(SPAN, -1, dtype=np.int64)
    window[SPAN - 1 - last :] = tokens[: last + 1]
    return window
