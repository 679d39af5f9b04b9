"""A text is decoded when somebody asks, several tokens at once, and is the same text; stop strings do not wait."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.generation import Delivery, FinishReason
from outrider.core.params import SamplingParams
from outrider.core.protocols import Recipe
from outrider.core.records import Budget
from outrider.core.text import TextStream
from outrider.runtime.slots import SlotTarget
from outrider.verify.invariant import Invariant
from tests.runtime.toy_backend import NGram, ToyBackend

VOCAB = 26
TOKENS = 40


class Letters:
    """A decoder that counts what it is asked for; it fails where that text holds a token that it does not know."""

    def __init__(self, unknown: int = -1) -> None:
        self.calls, self.unknown = 0, unknown

    def __call__(self, tokens: Sequence[int]) -> str:
        self.calls += 1
        if self.unknown in tokens:
            raise ValueError(f"no such token: {self.unknown}")
        return "".join(chr(97 + token) for token in tokens)


def engine_with(decode: Any) -> Engine:
    recipe = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))
    return Engine(SlotTarget(ToyBackend(NGram(VOCAB, back=2)), max_slots=4), recipe, decode=decode, strict=True)


def asked(**given: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=TOKENS, temperature=1.0, seed=5, **given)


def letters(tokens: Sequence[int]) -> str:
    return "".join(chr(97 + token) for token in tokens)


def halves(tokens: Sequence[int]) -> str:
    """Characters of two tokens each; an odd one out is not finished."""
    pairs = [chr(256 + 16 * a + b) for a, b in list(pairwise(tokens))[::2]]
    return "".join(pairs) + "\N{REPLACEMENT CHARACTER}" * (len(tokens) % 2)


@given(st.lists(st.integers(0, 15), max_size=90), st.data(), st.sampled_from([letters, halves]), st.booleans())
@settings(max_examples=200, deadline=None)
def test_tokens_together_make_the_text_of_one_by_one(
    tokens: list[int], data: st.DataObject, decode: Any, stops: bool
) -> None:
    whole = decode(tokens)
    stream = TextStream(decode, ["zzz"] if stops else ())
    pieces, at = [], 0
    while at < len(tokens):
        count = data.draw(st.integers(1, 60))
        pieces.append(stream.extend(tokens[at : at + count]))
        at += count
        assert whole.startswith("".join(pieces))
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text == whole


def test_nothing_is_decoded_before_somebody_asks() -> None:
    decode = Letters()
    engine = engine_with(decode)
    handles = [engine.submit([1, 2, 3], asked(n=2)), engine.submit([4], asked())]
    for _ in range(TOKENS // 2):
        engine.step()
    assert decode.calls == 0
    assert handles[1].partial()[0].text == letters(handles[1].partial()[0].token_ids)
    looked = decode.calls
    assert 0 < looked < TOKENS // 4
    results = [one for handle in handles for one in handle.results()]
    assert all(one.text == letters(one.token_ids) and len(one.token_ids) == TOKENS for one in results)
    assert decode.calls < 3 * TOKENS // 2


def test_a_stop_string_ends_the_text_with_the_token_that_completes_it() -> None:
    (free,) = engine_with(letters).submit([1, 2, 3], asked()).results()
    stop = free.text[10:13]
    first = free.text.index(stop)
    (cut,) = engine_with(letters).submit([1, 2, 3], asked(stop=(stop,))).results()
    assert (cut.text, cut.stop, cut.finish_reason) == (free.text[:first], stop, FinishReason.STOP)
    assert cut.token_ids == free.token_ids[: first + len(stop)]


def test_an_id_that_ends_the_text_is_no_part_of_it() -> None:
    (free,) = engine_with(letters).submit([1, 2, 3], asked()).results()
    last = free.token_ids[12]
    (cut,) = engine_with(letters).submit([1, 2, 3], asked(stop_token_ids=(last,))).results()
    assert cut.token_ids == free.token_ids[: free.token_ids.index(last) + 1]
    assert cut.text == letters(cut.token_ids[:-1])


def test_a_token_that_cannot_be_decoded_ends_its_own_request() -> None:
    (free,) = engine_with(letters).submit([1, 2, 3], asked()).results()
    (other,) = engine_with(letters).submit([4], asked(min_new_tokens=1)).results()
    unknown = next(token for token in free.token_ids if token not in other.token_ids)
    engine = engine_with(Letters(unknown))
    told: list[Delivery] = []
    bad, good = engine.submit([1, 2, 3], asked(), listener=told.append), engine.submit([4], asked())
    assert good.result().token_ids == other.token_ids
    with pytest.raises(ValueError, match="no such token"):
        bad.result()
    assert isinstance(told[-1].error, ValueError) and told[-1].last
    assert len(bad.partial()[0].token_ids) <= free.token_ids.index(unknown) + 2


def test_readers_of_other_threads_and_the_listener_get_the_whole_text_once() -> None:
    engine = engine_with(letters)
    told: list[Delivery] = []
    handles = [engine.submit([i + 1], asked(), listener=told.append) for i in range(3)]
    streamed: dict[int, str] = {}
    over = threading.Event()

    def read(place: int) -> None:
        streamed[place] = "".join(handles[place].pieces())

    def look() -> None:
        while not over.is_set():
            for handle in handles:
                text = handle.partial()[0].text
                assert handle.partial()[0].text.startswith(text)

    readers = [threading.Thread(target=read, args=(place,)) for place in range(3)]
    looker = threading.Thread(target=look)
    for thread in (*readers, looker):
        thread.start()
    for thread in readers:
        thread.join()
    over.set()
    looker.join()
    for place, handle in enumerate(handles):
        whole = letters(handle.result().token_ids)
        heard = "".join(one.text for one in told if one.request == handle.id)
        assert streamed[place] == heard == handle.result().text == whole
