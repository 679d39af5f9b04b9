"""Which bits decide what: no two different decisions have one key, in any requests with one seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from outrider.check.bugs import BUGS
from outrider.check.toy import ToyLM, ToySource, ToyTarget
from outrider.check.toy_methods import toy_recipe, toy_target
from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.noise import TARGET, StreamNoise, key
from outrider.core.protocols import Recipe
from outrider.core.records import Budget
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Running
from outrider.core.tree import TokenTree
from outrider.draft.grown import Grown
from outrider.grow.chain import Chain
from outrider.grow.shared import SharedRace
from outrider.verify.invariant import Invariant
from outrider.verify.rejection import Rejection

Decision = tuple[Any, ...]  # sample, stream, the text before it, and what tells apart the decisions behind one text
PROMPT = (0, 1, 2, 0, 1)


class SharedKey(AssertionError):
    """Two decisions with the same bits."""


@dataclass(slots=True)
class Book:
    """The decision of every key that was used, by its 64 bits."""

    decisions: dict[int, Decision] = field(default_factory=dict)
    times: dict[Decision, int] = field(default_factory=dict)

    def enter(self, bits: int, decision: Decision) -> None:
        if self.decisions.setdefault(bits, decision) != decision:
            raise SharedKey(f"{decision} has the bits of {self.decisions[bits]}")
        self.times[decision] = self.times.get(decision, 0) + 1


@dataclass(frozen=True, slots=True)
class Watched:
    """The real noise, whose keys are written down."""

    noise: StreamNoise
    text: tuple[int, ...]
    book: Book

    def coin(self, p: float, node: int, draw: int) -> bool:
        self._decides(node, draw, 0)
        return self.noise.coin(p, node, draw)

    def draw(self, weights: Tensor | NDArray[np.float64], node: int, draw: int) -> int:
        self._decides(node, draw, 1)
        return self.noise.draw(weights, node, draw)

    def pick(self, probs: Tensor, path: Sequence[int]) -> int:
        self.book.enter(self.noise.target_key(path), (self.noise.sample, TARGET, (*self.text, *path)))
        return self.noise.pick(probs, path)

    def pick_rows(self, probs: Tensor, tree: TokenTree) -> list[int]:
        return [self.pick(row, tree.path_tokens(node)) for node, row in enumerate(probs)]

    def first(self, ids: NDArray[np.int64], probs: NDArray[np.float64], path: Sequence[int], count: int) -> list[int]:
        return self.noise.first(ids, probs, path, count)  # the target's own decision, looked at before it is made

    def _decides(self, node: int, draw: int, use: int) -> None:
        bits = key(node, draw, use, after=self.noise.key)
        self.book.enter(bits, (self.noise.sample, self.noise.stream, self.text, node, draw, use))


@pytest.fixture
def book(monkeypatch: pytest.MonkeyPatch) -> Book:
    """Of all requests of a test."""
    kept, real = Book(), Running.noise

    def watched(running: Running, stream: int) -> Watched:
        noise = real(running, stream)
        assert isinstance(noise, StreamNoise)
        return Watched(noise, tuple(running.history.tokens.tolist()), kept)

    monkeypatch.setattr(Running, "noise", watched)
    return kept


def coupled() -> Engine:
    drafter = Grown(ToySource(ToyLM(3, seed=7)), Chain(), sampled=True)
    return Engine(ToyTarget(ToyLM(3, seed=11)), Recipe("toy", drafter, Rejection(), Fixed(Budget(3, 3))), strict=True)


def invariant() -> Engine:
    drafter = Grown(ToySource(ToyLM(3, seed=7)), SharedRace((2, 1, 1)), sampled=True, shared_noise=True)
    return Engine(ToyTarget(ToyLM(3, seed=11)), Recipe("toy", drafter, Invariant(), Fixed(Budget(6, 3))), strict=True)


def table() -> Engine:
    target = toy_target()
    return Engine(target, toy_recipe("stand", target), strict=True)


def say(engine: Engine, prompt: Sequence[int], tokens: int = 8, n: int = 1) -> list[tuple[int, ...]]:
    params = SamplingParams(max_new_tokens=tokens, temperature=1.0, seed=5, n=n)
    return [tuple(answer.token_ids) for answer in engine.submit(prompt, params).results()]


def chat(engine: Engine, remembered: int) -> Iterator[tuple[int, ...]]:
    """Prompts of a conversation; of turns that are too many the oldest are dropped."""
    turns: list[tuple[int, ...]] = []
    for question in ((0, 1), (2, 2), (1,), (0, 2), (0, 1), (2, 2)):
        turns.append(question)
        prompt = tuple(token for turn in turns[-2 * remembered + 1 :] for token in turn)
        yield prompt
        turns.append(say(engine, prompt)[0])


def everything(engine: Engine) -> None:
    for remembered in (1, 2, 6):
        for _ in chat(engine, remembered):
            pass
    for answer in say(engine, PROMPT, n=4):
        for cut in (1, 3, len(answer)):
            say(engine, (*PROMPT, *answer[:cut]))  # resumed where it was cut
            say(engine, (*PROMPT, *answer[:cut], 2, 1), n=2)  # and on another way from there


@pytest.mark.parametrize("make", [coupled, invariant, table])
def test_no_two_decisions_share_a_key_in_chats_samples_and_forks(make: Callable[[], Engine], book: Book) -> None:
    everything(make())
    assert len(book.decisions) == len(book.times) > 300


def test_target_noise_by_the_position_shares_keys_where_an_oldest_turn_was_dropped(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_position(noise: StreamNoise, path: Sequence[int]) -> int:
        return key(noise.seed, noise.sample, TARGET, noise.position + len(path))

    monkeypatch.setattr(StreamNoise, "target_key", by_position)
    with pytest.raises(SharedKey):
        list(chat(invariant(), 2))


@pytest.mark.parametrize("make", [coupled, table])
def test_noise_by_the_number_of_the_step_shares_keys(
    make: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    _, name, wrong = BUGS["noise-by-step"].place(None, None)  # type: ignore[arg-type]
    monkeypatch.setattr(Running, name, wrong)
    request.getfixturevalue("book")
    with pytest.raises(SharedKey):
        everything(make())


@pytest.mark.parametrize("make", [coupled, invariant, table])
def test_no_decision_is_made_twice_in_a_request(make: Callable[[], Engine], book: Book) -> None:
    say(make(), PROMPT, tokens=40, n=3)
    assert set(book.times.values()) == {1}


@pytest.mark.parametrize("make", [coupled, table])
def test_a_request_that_holds_anothers_output_makes_no_decision_of_it_again(
    make: Callable[[], Engine], book: Book
) -> None:
    engine = make()
    for prompt in chat(engine, 6):
        assert set(book.times.values()) <= {1}, prompt
    assert set(book.times.values()) == {1}


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_stopped_sequence_goes_on_with_the_same_text_under_the_invariant_rule(cut: int) -> None:
    (whole,) = say(invariant(), PROMPT, tokens=12)
    (begun,) = say(invariant(), PROMPT, tokens=cut)
    (rest,) = say(invariant(), (*PROMPT, *begun), tokens=12 - cut)
    assert begun + rest == whole
    plain = Engine(ToyTarget(ToyLM(3, seed=11)), Recipe("plain", None, Invariant(), Fixed(Budget(0, 0))), strict=True)
    assert say(plain, PROMPT, tokens=12) == [whole]
