"""Allowed ids, a stop string that stays, and special tokens that are shown: each changes what it says and no more."""

from __future__ import annotations

import pytest

from outrider.api import Outrider
from outrider.core.errors import InputError
from outrider.core.text import TextStream, TokenDecoder
from outrider.models import LoadedModel


@pytest.mark.parametrize("method", ["plain", "suffix"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_ids_are_said(tiny_llama: LoadedModel, method: str, temperature: float) -> None:
    with Outrider(tiny_llama, method, limits={"max_slots": 2}, runtime="eager") as engine:
        (found,) = engine.generate(
            [[1, 5, 9]], temperature=temperature, seed=3, max_new_tokens=20, allowed_ids=[7, 11, 13]
        )
        banned = {t: -float("inf") for t in range(64) if t not in (7, 11, 13)}
        (same,) = engine.generate([[1, 5, 9]], temperature=temperature, seed=3, max_new_tokens=20, logit_bias=banned)
        assert found.token_ids == same.token_ids and set(found.token_ids) <= {7, 11, 13}
        with pytest.raises(InputError, match="allowed_ids"):
            engine.generate([[1]], allowed_ids=[64])


def test_a_stop_string_stays_where_it_is_asked_for() -> None:
    words = ["a", "bc", "d", "ef"]

    def decode(tokens: object) -> str:
        return "".join(words[token] for token in tokens)  # type: ignore[attr-defined]

    for include, wanted in ((False, "ab"), (True, "abcd")):
        stream = TextStream(decode, ("cd", "zz"), include)
        pieces = [stream.push(token) for token in (0, 1, 2)]
        assert stream.stopped and stream.stop == "cd" and "".join(pieces) == stream.text == wanted


class Tokenizer:
    """Token 9 is special."""

    def convert_tokens_to_ids(self, names: list[str]) -> list[None]:
        return [None] * len(names)

    def decode(self, tokens: list[int], skip_special_tokens: bool, **_: object) -> str:
        return "".join("<s>" if t == 9 else str(t) for t in tokens if t != 9 or not skip_special_tokens)


def test_special_tokens_are_shown_by_the_whole_decoder_only() -> None:
    decoder = TokenDecoder(Tokenizer())
    assert (decoder([1, 9, 2]), decoder.whole([1, 9, 2])) == ("12", "1<s>2")
