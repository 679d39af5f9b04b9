"""Token ids as bytes: every kind of tokenizer spells a text back, special tokens stand for nothing, and models are told
apart by what their ids mean."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.api import Outrider
from outrider.core.errors import InputError
from outrider.models import LoadedModel, same_vocabulary
from outrider.models.vocabulary import ALPHABET, TokenizerBytes, token_bytes
from tests.draft.model.two_tokenizers import byte_level, sentencepiece

TOKENIZERS = {"byte-level": byte_level(400), "sentencepiece": sentencepiece(420)}
BYTES = {name: TokenizerBytes(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def test_the_byte_alphabet_has_every_byte_once() -> None:
    assert sorted(ALPHABET.values()) == list(range(256)) and ALPHABET["A"] == 65 and ALPHABET["\u0120"] == 32


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=st.text(max_size=40))
def test_the_pieces_of_a_text_join_to_its_bytes(kind: str, text: str) -> None:
    spelled = BYTES[kind]
    middle = spelled.encode(text.encode())
    assert b"".join(spelled.pieces[i] for i in middle) == text.encode()
    first = b"".join(spelled.pieces[i] for i in spelled.encode(text.encode(), first=True))
    assert first.removeprefix(b" ") == text.encode().removeprefix(b" ")


@given(text=st.binary(max_size=20))
def test_bytes_that_are_no_text_are_spelled_too(text: bytes) -> None:
    for spelled in BYTES.values():
        assert b"".join(spelled.pieces[i] for i in spelled.encode(text)) == text


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_special_tokens_are_names_and_not_text(kind: str) -> None:
    spelled = BYTES[kind]
    assert "<end>" in spelled.names and all(spelled.pieces[i] == b"" for i in spelled.names.values())


def test_added_words_are_text_and_padding_is_nothing() -> None:
    tokenizer = byte_level(300)
    tokenizer.add_tokens(["caf\u00e9 \u2615"])
    pieces = token_bytes(tokenizer, size=len(tokenizer) + 5)
    assert pieces[len(tokenizer) - 1] == "caf\u00e9 \u2615".encode() and pieces[len(tokenizer) :] == [b""] * 5


def test_the_embedded_models_tokens_are_what_it_decodes(smollm2: LoadedModel) -> None:
    spelled = TokenizerBytes(smollm2.tokenizer)
    text = "It\u2019s  42\u00b0 \U0001f642 outside,\n\tthey said. <end>"
    ids = smollm2.tokenizer(text)["input_ids"]
    assert b"".join(spelled.pieces[i] for i in ids) == text.encode() and spelled.encode(text.encode()) == ids
    assert spelled.start == () and spelled.pieces[spelled.names["<|im_end|>"]] == b""


def test_models_are_told_apart_by_what_their_ids_mean(smollm2: LoadedModel, tiny_llama: LoadedModel) -> None:
    assert same_vocabulary(smollm2, smollm2) and same_vocabulary(tiny_llama, tiny_llama)
    assert not same_vocabulary(smollm2, replace(smollm2, tokenizer=TOKENIZERS["byte-level"]))
    with pytest.raises(InputError, match="64 tokens and 'smollm2' has 49152.*use a draft model with the vocabulary"):
        same_vocabulary(smollm2, tiny_llama)


@pytest.fixture(scope="module")
def engine(smollm2: LoadedModel) -> Outrider:
    return Outrider(smollm2, "plain", strict=True, limits={"max_context": 256, "max_slots": 2})


@pytest.mark.parametrize("method", ["draft-model", "specinfer", "omnidraft-ngram"])
def test_a_draft_of_another_vocabulary_drafts_through_text(
    engine: Outrider, tiny_llama: LoadedModel, method: str, monkeypatch, caplog
) -> None:
    """Not refused, said once, and the text is plain's."""
    other = replace(tiny_llama, tokenizer=_of_64_tokens(), name="other")
    monkeypatch.setattr("outrider.api.load_model", lambda name, **_: other)
    engine._parts.drafts.clear()  # of the methods before
    prompt = "one two three one two"
    for _ in range(2):
        recipe = engine.recipe(method, {"draft": "other", "controller": "fixed"})
        drafted = engine.engine.submit(
            engine.encode(prompt), engine._params(None, {"max_new_tokens": 12}), recipe
        ).result()
    assert drafted.token_ids == engine.generate(prompt, max_new_tokens=12)[0].token_ids
    assert drafted.stats.drafted > 0
    assert sum("drafts through text" in record.message for record in caplog.records) == 1


def _of_64_tokens():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [letter for letter, byte in ALPHABET.items() if chr(byte) in "abcdefghijklmnopqrstuvwxyz .,\n"]
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)
