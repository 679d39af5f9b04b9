"""What an automaton lets one sequence say: the state of its text, and of the nodes of the tree that is looked at.

Stop ids are no matter of the automaton: the text may end where the automaton is complete, with any id that ends it, and
nowhere else. Below an illegal token, or one that ends the text, nothing is restricted: nothing there becomes text.
Draws nothing and holds no distribution; where the masks go is for `core/sampling.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.numeric.compiled import compiled
from outrider.core.protocols import Automaton, Suggests
from outrider.core.tree import TokenTree

WORD = 32  # tokens in one integer of a mask


class Legal:
    """Changes state in `append` only: of the states of nodes those behind the token stay, the rest is forgotten."""

    def __init__(
        self,
        automaton: Automaton,
        prompt: Sequence[int],
        vocab_size: int,
        stop_ids: Iterable[int] = (),  # all ids that end the text
        also_text: Iterable[int] = (),  # those among them that the automaton may allow as text, too
    ) -> None:
        self.automaton = automaton
        self._suggests = automaton if isinstance(automaton, Suggests) else None  # asking that takes microseconds
        self.vocab_size = vocab_size
        self._stops = [token for token in sorted(stop_ids) if token < vocab_size]
        self._ends = frozenset(self._stops)
        self._texts = frozenset(also_text) & self._ends
        self._ever = ~as_words(self._ends - self._texts, vocab_size)  # as text
        self._end_words = as_words(self._ends, vocab_size)
        self._state: Any = automaton.start(prompt)
        self._states: dict[tuple[int, ...], Any] = {}  # by path; None: nothing said there can be text
        self._rows: dict[tuple[int, ...], NDArray[np.int32]] = {}
        self._ways: dict[tuple[int, ...], list[list[int]]] = {}  # on from a path: drafter and engine ask alike

    def append(self, token: int) -> None:
        """This token became text."""
        known = self._states.get((token,))
        self._state = self._after(self._state, token) if known is None else known
        self._states = {path[1:]: state for path, state in self._states.items() if path[0] == token and len(path) > 1}
        self._rows.clear()
        self._ways.clear()

    def allows(self, token: int, path: Sequence[int] = ()) -> bool:
        """Whether the token may follow `path`. Asked of a text's own nodes, whose masks are wanted all the same."""
        key = tuple(path)
        state = self._at(key)
        if state is None or not 0 <= token < self.vocab_size:
            return state is None
        if self._states.get((*key, token)) is not None:
            return True
        row = self.mask(key)
        return row is not None and bool(row[token // WORD] >> token % WORD & 1)

    def continues(self, token: int, path: Sequence[int] = ()) -> bool:
        """Whether the token may follow `path`, and `path` does not end the text: what is behind that is never said.

        Asked of candidates: the state behind one that may is kept, for those that hang on it."""
        key = tuple(path)
        state = self._at(key)
        if state is None or not 0 <= token < self.vocab_size:
            return False
        if token in self._ends and self.automaton.complete(state):
            return True
        if token in self._ends and token not in self._texts:
            return False
        if self._stops:  # else a text that can only end has no state behind it
            return self._at((*key, token)) is not None
        return self.automaton.allows(state, token)

    def mass(self, probs: Tensor, path: Sequence[int] = ()) -> float:
        """What of these probabilities [V] stands on tokens that may follow `path`."""
        row = self.mask(path)
        if row is None:
            return 1.0
        if probs.device.type == "cpu":
            return float(_mass(probs.numpy(), row))
        return float(probs.masked_fill(~_bits(row, probs), 0.0).sum())

    def largest(self, scores: NDArray[np.float32], path: Sequence[int] = ()) -> int:
        """The largest of these scores [V] whose token may follow `path`, the lowest id among equals; -1: none."""
        row = self.mask(path)
        return int(scores.argmax() if row is None else _largest(scores, row))

    def mask(self, path: Sequence[int] = ()) -> NDArray[np.int32] | None:
        """[words] bit t % 32 of word t // 32: token t may follow `path`. None: nothing is restricted there."""
        key = tuple(path)
        if key not in self._rows and self._at(key) is not None:
            self._fill([key])
        return self._rows.get(key)

    def masks(self, tree: TokenTree) -> NDArray[np.int32]:
        """[nodes, words] of a whole tree, asked of the automaton in one call."""
        paths = [tuple(tree.path_tokens(node)) for node in range(len(tree))]
        self._fill([path for path in dict.fromkeys(paths) if path not in self._rows and self._at(path) is not None])
        free = np.full(len(self._ever), -1, dtype=np.int32)
        return np.stack([self._rows.get(path, free) for path in paths])

    def forced(self, path: Sequence[int] = ()) -> list[int]:
        """Tokens that are bound to follow `path`, the end of the text included where nothing else may come."""
        key = tuple(path)
        if (state := self._at(key)) is None:
            return []
        run = [int(token) for token in self.automaton.forced(state)]
        state = self._at((*key, *run))
        if state is not None and len(self._stops) == 1 and self.automaton.complete(state):
            row = self.mask((*key, *run))
            if row is not None and np.bitwise_count(row.view(np.uint32)).sum() == 1:  # of integers it counts |x|'s
                run += self._stops
        return run

    def continuations(self, path: Sequence[int] = ()) -> list[list[int]]:
        """What is worth drafting behind `path`: what is bound to follow, or what the automaton suggests."""
        key = tuple(path)
        if key not in self._ways:
            if (state := self._at(key)) is not None and self._suggests is not None:
                self._ways[key] = [list(run) for run in self._suggests.continuations(state)]
            else:
                run = self.forced(key)
                self._ways[key] = [run] if run else []
        return self._ways[key]

    @property
    def complete(self) -> bool:
        """Whether the text may end here, or has ended."""
        return self._state is None or bool(self.automaton.complete(self._state))

    @property
    def exhausted(self) -> bool:
        """Whether the text is complete, nothing may follow, and there is no id that ends it."""
        return self._spent(self._state)

    def _at(self, path: tuple[int, ...]) -> Any:
        if not path:
            return self._state
        if path not in self._states:
            state = self._after(self._at(path[:-1]), path[-1])
            self._states[path] = None if self._spent(state) else state  # the text ends there
        return self._states[path]

    def _spent(self, state: Any) -> bool:
        if self._stops or state is None or not self.automaton.complete(state):
            return False
        return not (self.automaton.mask([state])[0] & self._ever).any()

    def _after(self, state: Any, token: int) -> Any:
        if state is None or (token in self._ends and (token not in self._texts or self.automaton.complete(state))):
            return None
        return self.automaton.advance(state, token)

    def _fill(self, paths: Sequence[tuple[int, ...]]) -> None:
        if not paths:
            return
        states = [self._at(path) for path in paths]
        rows = self.automaton.mask(states) & self._ever
        for path, state, row in zip(paths, states, rows, strict=True):
            if self.automaton.complete(state):
                row |= self._end_words
            self._rows[path] = row


def ban(scores: Tensor, row: NDArray[np.int32]) -> Tensor:
    """Changes `scores`, [V] float32 or [rows, V] with as many masks: what may not be said is -inf."""
    if scores.device.type == "cpu":
        for line, bits in zip(
            scores.numpy().reshape(-1, scores.shape[-1]), row.reshape(-1, row.shape[-1]), strict=True
        ):
            _ban(line, bits)
        return scores
    return scores.masked_fill_(~_bits(row, scores), -torch.inf)


def _bits(row: NDArray[np.int32], scores: Tensor) -> Tensor:
    """[V] or [rows, V], where the scores are: a bit a token is what crosses."""
    words = torch.from_numpy(row).to(scores.device)
    shifts = torch.arange(WORD, device=scores.device, dtype=torch.int32)
    return (words[..., None] >> shifts & 1).flatten(-2)[..., : scores.shape[-1]].bool()


@compiled
def _mass(probs, words):  # type: ignore[no-untyped-def]
    size = len(probs)
    sums = np.zeros(32)  # a sum a bit, so that whole words are added at once
    for at in range(size // 32):
        word, first = words[at], 32 * at
        if word == -1:
            for bit in range(32):
                sums[bit] += probs[first + bit]
        elif word != 0:
            for bit in range(32):
                if (word >> bit) & 1:
                    sums[bit] += probs[first + bit]
    for token in range(size // 32 * 32, size):
        if (words[token // 32] >> (token % 32)) & 1:
            sums[token % 32] += probs[token]
    return sums.sum()


@compiled
def _largest(scores, words):  # type: ignore[no-untyped-def]
    best, found = -np.inf, -1
    for at in range((len(scores) + 31) // 32):
        word, first = words[at], 32 * at
        if word != 0:
            for bit in range(min(32, len(scores) - first)):
                if scores[first + bit] > best and (word >> bit) & 1:
                    best, found = scores[first + bit], first + bit
    return found


@compiled
def _ban(scores, words):  # type: ignore[no-untyped-def]
    size = len(scores)
    for at in range((size + 31) // 32):
        word = words[at]
        if word != -1:
            for bit in range(min(32, size - 32 * at)):
                if not (word >> bit) & 1:
                    scores[32 * at + bit] = -np.inf


def as_words(tokens: Iterable[int], vocab_size: int) -> NDArray[np.int32]:
    """[words] with the bits of these tokens."""
    bits = np.zeros(-(-vocab_size // WORD) * WORD, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
