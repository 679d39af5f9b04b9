"""Streamed pieces join to exactly the decoded tokens, cut before the first stop string, for every kind of decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from outrider.core import text as text_module
from outrider.core.errors import InputError
from outrider.core.text import UNFINISHED, TextStream, TokenDecoder, token_decoder

Decode = Callable[[Sequence[int]], str]

ALPHABET = "ab .\n<éß漢字한🙂👩‍💻🇫🇷" + UNFINISHED
TEXTS = st.text(ALPHABET, max_size=30)
SPECIAL = 1 << 40  # a token without text
BYTE_RUNS = st.binary(min_size=1, max_size=4).map(lambda b: int.from_bytes(b"\x01" + b))


def byte_level(tokens: Sequence[int]) -> str:
    """A token is one to four bytes behind a leading 1; characters may be split anywhere."""
    joined = b"".join(t.to_bytes((t.bit_length() + 7) // 8)[1:] for t in tokens if t != SPECIAL)
    return joined.decode("utf-8", errors="replace")


@st.composite
def byte_level_tokens(draw: st.DrawFn) -> list[int]:
    """Real text cut at random bytes, with special tokens and sometimes bytes that are no text at all."""
    data = draw(TEXTS).encode()
    tokens: list[int] = []
    while data:
        size = draw(st.integers(1, 4))
        tokens.append(int.from_bytes(b"\x01" + data[:size]))
        data = data[size:]
    extra = st.lists(st.tuples(st.integers(0, 40), st.one_of(st.just(SPECIAL), BYTE_RUNS)), max_size=4)
    for at, token in draw(extra):
        tokens.insert(at, token)
    return tokens


def sentencepiece() -> TokenDecoder:
    """Words that carry their leading space, a first space that is stripped, and byte tokens for the rest."""
    pieces = ["<unk>", "<s>", "▁", "▁▁", "▁a", "a", "b", ".", "▁the", "é", "<0x41x>"]
    names = pieces + [f"<0x{byte:02X}>" for byte in range(256)]
    backend = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[], unk_token="<unk>"))
    backend.add_special_tokens(["<s>"])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    from transformers import PreTrainedTokenizerFast

    return token_decoder(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"))


SENTENCEPIECE = sentencepiece()
SENTENCEPIECE_SPECIAL = 1
FIRST_BYTE = min(SENTENCEPIECE.byte_tokens)
SENTENCEPIECE_TOKENS = st.lists(
    st.one_of(
        st.lists(st.integers(0, 10), min_size=1, max_size=12),
        st.sampled_from(ALPHABET).map(lambda c: [FIRST_BYTE + b for b in c.encode()]),
        st.integers(0, 255).map(lambda b: [FIRST_BYTE + b]),
    ),
    max_size=12,
).map(lambda runs: [t for run in runs for t in run])


def reference(decode: Decode, tokens: Sequence[int], stop: Sequence[str]) -> tuple[str, int | None]:
    """Decode everything after every token: the text, and how many tokens were taken when a stop completed."""
    for count in range(1, len(tokens) + 1):
        seen = decode(tokens[:count]).rstrip(UNFINISHED)
        if starts := [seen.index(s) for s in stop if s in seen]:
            return seen[: min(starts)], count
    return decode(tokens), None


def check(decode: Decode, tokens: Sequence[int], stop: Sequence[str]) -> None:
    expected, ended = reference(decode, tokens, stop)
    stream, pieces = TextStream(decode, stop), []
    for count, token in enumerate(tokens, 1):
        pieces.append(stream.push(token))
        assert stream.text == "".join(pieces)
        assert stream.stopped == (count == ended)
        if stream.stopped:
            break
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text == expected


def stops_for(texts: st.SearchStrategy[str]) -> st.SearchStrategy[list[str]]:
    return st.lists(texts.filter(lambda s: bool(s) and UNFINISHED not in s), max_size=3)


STOPS = stops_for(st.text("ab .<漢🙂", min_size=1, max_size=3))


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that slide often, so that short examples reach every way of sliding."""
    monkeypatch.setattr(text_module, "CONTEXT", 2)
    monkeypatch.setattr(text_module, "WINDOW", 3)


@settings(max_examples=400)
@given(byte_level_tokens(), STOPS)
def test_byte_level_pieces_join_to_the_decoded_text(tokens: list[int], stop: list[str]) -> None:
    check(byte_level, tokens, stop)


@settings(max_examples=400)
@given(SENTENCEPIECE_TOKENS, STOPS)
def test_sentencepiece_pieces_join_to_the_decoded_text(tokens: list[int], stop: list[str]) -> None:
    check(SENTENCEPIECE, tokens, stop)


@settings(max_examples=200)
@given(byte_level_tokens(), st.data())
def test_a_stop_string_cut_from_the_text_itself_is_found(tokens: list[int], data: st.DataObject) -> None:
    whole = byte_level(tokens)
    start = data.draw(st.integers(0, max(0, len(whole) - 1)))
    stop = whole[start : start + data.draw(st.integers(1, 12))]
    if stop and UNFINISHED not in stop:
        check(byte_level, tokens, [stop, "never in it"])


@settings(max_examples=200)
@given(byte_level_tokens(), STOPS, st.integers(0, 40))
def test_cancellation_keeps_every_character(tokens: list[int], stop: list[str], cut: int) -> None:
    check(byte_level, tokens[:cut], stop)


@pytest.mark.parametrize("texts", [st.text(max_size=60), st.text("🙂👩‍💻漢é \n", max_size=40)])
def test_embedded_tokenizer_pieces_join_to_the_decoded_text(texts: st.SearchStrategy[str], smollm2_decoder) -> None:  # type: ignore[no-untyped-def]
    decode, encode = smollm2_decoder

    @settings(max_examples=150, deadline=None)
    @given(texts, st.lists(st.text("ab 🙂\n", min_size=1, max_size=3), max_size=2), st.lists(st.integers(0, 49151)))
    def holds(text: str, stop: list[str], noise: list[int]) -> None:
        check(decode, encode(text) + noise, stop)

    holds()


@pytest.fixture(scope="module")
def smollm2_decoder(smollm2):  # type: ignore[no-untyped-def]
    tokenizer = smollm2.tokenizer
    return token_decoder(tokenizer), lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"])


def tokens_of(text: str, size: int = 1) -> list[int]:
    data = text.encode()
    return [int.from_bytes(b"\x01" + data[i : i + size]) for i in range(0, len(data), size)]


def test_half_a_character_is_never_shown() -> None:
    stream = TextStream(byte_level)
    assert [stream.push(t) for t in tokens_of("é🙂")] == ["", "é", "", "", "", "🙂"]


def test_a_special_token_does_not_end_a_run_of_byte_tokens() -> None:
    special, (a, bad) = SENTENCEPIECE_SPECIAL, (FIRST_BYTE + 0x61, FIRST_BYTE + 0xFF)
    assert SENTENCEPIECE([a, special, bad]) == 2 * UNFINISHED  # so the good first byte must not be shown early
    check(SENTENCEPIECE, [a, special, bad], [])
    check(SENTENCEPIECE, [a, special, special, 5, bad], [])


def test_trailing_bad_bytes_come_with_finish() -> None:
    stream = TextStream(byte_level)
    assert stream.push(0x1F0) == ""
    assert stream.finish() == UNFINISHED == stream.text
    assert stream.finish() == ""


def test_a_possible_stop_is_held_back_and_released_when_it_fails() -> None:
    stream = TextStream(byte_level, ["</s>"])
    assert [stream.push(t) for t in tokens_of("a</b")] == ["a", "", "", "</b"]
    assert not stream.stopped


def test_a_stop_inside_the_last_token_cuts_the_text_before_it() -> None:
    stream = TextStream(byte_level, ["\n\n"])
    assert "".join(stream.push(t) for t in tokens_of("one\n\ntwo", 4)) == "one"
    assert stream.stopped and stream.finish() == "" and stream.text == "one"


def test_of_stops_completed_by_one_token_the_first_to_start_wins() -> None:
    stream = TextStream(byte_level, ["cd", "bcde"])
    assert [stream.push(t) for t in tokens_of("abcdef", 4)[:1]] == ["ab"]  # only cd is complete
    stream = TextStream(byte_level, ["cd", "bcd"])
    assert stream.push(tokens_of("abcd", 4)[0]) == "a"


def test_nothing_may_follow_the_end() -> None:
    stopped, finished = TextStream(byte_level, ["a"]), TextStream(byte_level)
    stopped.push(0x161)
    finished.finish()
    for stream in (stopped, finished):
        with pytest.raises(RuntimeError, match="ended"):
            stream.push(0x162)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InputError, match="stop string is empty"):
        TextStream(byte_level, [""])


def test_a_token_costs_a_bounded_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real window sizes
    sizes: list[int] = []

    def counted(tokens: Sequence[int]) -> str:
        sizes.append(len(tokens))
        return byte_level(tokens)

    stream = TextStream(counted, ["\n\n\n"])
    tokens = tokens_of("Twelve naïve emoji 🙂 in a row. " * 60)
    for token in tokens:
        stream.push(token)
    assert max(sizes) < 40 and len(sizes) < 1.3 * len(tokens)


def test_special_tokens_and_double_spaces_stay_as_the_tokenizer_has_them(smollm2_decoder) -> None:  # type: ignore[no-untyped-def]
    decode, encode = smollm2_decoder
    assert decode([*encode("a  b , c ."), 2]) == "a  b , c ."  # 2 ends a chat turn
