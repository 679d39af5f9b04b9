"""What the ids of a tokenizer mean, as bytes, and whether two models mean the same by theirs.

Displayed token strings are conventions (byte-level alphabets, leading-space marks, byte fallback); bytes are what two
tokenizers have in common. Special tokens have none: they are names, not text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from outrider.core.errors import InputError
from outrider.models.load import LoadedModel

SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"  # how sentencepiece shows a space
BYTE_NAME = re.compile(r"<0x([0-9A-F]{2})>")
BEFORE = ("\n", ".", "a")  # texts behind which a stretch is encoded as one in the middle of a text


def same_vocabulary(target: LoadedModel, draft: LoadedModel) -> bool:
    """Whether every token id means the same to both, however many rows a model pads its embedding to.

    Raises where that cannot be so and no text can go between them, because a tokenizer is missing.
    """
    if target.tokenizer is not None and draft.tokenizer is not None:
        return bool(target.tokenizer.get_vocab() == draft.tokenizer.get_vocab())
    rows, drafted = (m.model.config.get_text_config().vocab_size for m in (target, draft))
    if rows != drafted:
        raise InputError(
            f"{draft.name!r} has {drafted} tokens and {target.name!r} has {rows}, and without both tokenizers no text "
            f"can go between them; use a draft model with the vocabulary of {target.name!r}"
        )
    return True


class TokenizerBytes:
    """A tokenizer seen as bytes."""

    def __init__(self, tokenizer: Any, size: int = 0) -> None:
        """`size`: rows of the model, which may be more than the tokenizer has tokens."""
        self._tokenizer = tokenizer
        self.pieces = token_bytes(tokenizer, size)  # per id; empty for special tokens and ids without a token
        special = {int(i) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        special.update(map(int, tokenizer.all_special_ids))
        self.names = {str(tokenizer.convert_ids_to_tokens(i)): i for i in sorted(special)}

    @cached_property
    def start(self) -> tuple[int, ...]:
        """What the tokenizer puts in front of every text."""
        ids = list(self._tokenizer("a")["input_ids"])
        begin = self._tokenizer.bos_token_id
        return (begin,) if begin is not None and ids[:1] == [begin] else ()

    def encode(self, text: bytes, first: bool = False) -> list[int]:
        """Ids without special tokens. `first`: the text begins here, where some tokenizers add a space.

        Bytes that are no character (yet) become byte tokens, where the vocabulary has them.
        """
        ids: list[int] = []
        for stretch in _stretches(text):
            if isinstance(stretch, str):
                ids += self._encode(stretch, first and not ids)
            else:
                ids += [self._bytes[byte] for byte in stretch if byte in self._bytes]
        return ids

    @cached_property
    def _bytes(self) -> dict[int, int]:
        return {piece[0]: i for i, piece in enumerate(self.pieces) if len(piece) == 1}

    def _encode(self, text: str, first: bool) -> list[int]:
        ids, wanted = self._ids(text), text.encode()
        if first or self._joined(ids) == wanted:
            return ids
        for before in BEFORE:  # the added space goes before this, and both are cut off
            behind = self._ids(before + text)
            for cut in range(1, min(len(behind), 4)):
                if self._joined(behind[cut:]) == wanted:
                    return behind[cut:]
        return ids

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def _joined(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.pieces[i] for i in ids)


def token_bytes(tokenizer: Any, size: int = 0) -> list[bytes]:
    """The bytes that each id stands for in the middle of a text; none for special tokens and ids without a token."""
    count = max(len(tokenizer), size)
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    added = {int(i): token for i, token in tokenizer.added_tokens_decoder.items()}
    silent = {int(i) for i, token in added.items() if token.special} | set(map(int, tokenizer.all_special_ids))
    spell = _byte_level if _is_byte_level(tokenizer, names) else _sentencepiece
    pieces = [b""] * count
    for i, name in enumerate(names):
        if name is not None and i not in silent:
            pieces[i] = added[i].content.encode() if i in added else spell(name)
    return pieces


def _is_byte_level(tokenizer: Any, names: Sequence[str | None]) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return "ByteLevel" in repr(backend.decoder)
    return ALPHABET.keys() <= set(names)


def _byte_level(name: str) -> bytes:
    if all(character in ALPHABET for character in name):
        return bytes(ALPHABET[character] for character in name)
    return name.encode()


def _sentencepiece(name: str) -> bytes:
    if byte := BYTE_NAME.fullmatch(name):
        return bytes([int(byte[1], 16)])
    return name.replace(SPACE_MARK, " ").encode()


def _alphabet() -> dict[str, int]:
    """Byte-level tokenizers show a byte as its Latin-1 character where that is visible, the rest as later ones."""
    shown = sorted(ByteLevel.alphabet())
    visible = {character: ord(character) for character in shown if ord(character) < 256}
    hidden = sorted(set(range(256)) - set(visible.values()))
    return visible | dict(zip(shown[len(visible) :], hidden, strict=True))


ALPHABET = _alphabet()


def _stretches(text: bytes) -> Iterator[str | bytes]:
    """Whole characters as text, and what lies between them as bytes."""
    while text:
        try:
            yield text.decode()
            return
        except UnicodeDecodeError as error:
            if error.start:
                yield text[: error.start].decode()
            yield text[error.start : error.end]
            text = text[error.end :]
