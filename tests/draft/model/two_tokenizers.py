"""Tokenizers over the same bytes with different merges, small vocabularies by hand, and models that know their text."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from outrider.core.tree import QRow
from outrider.models.vocabulary import TokenizerBytes

CORPUS = [
    "the thermometer there showed them that the other weather gathered together",
    "a token is a run of bytes; another tokenizer runs its own runs of bytes, untold otherwise",
    "Grüße aus Köln und München, schöne größere Straßen, naïve cafés, 日本語 und 🙂🙃",
    "def follow(self, tokens): return [token for token in tokens if token > 0]\n\n    pass\n",
]
SPECIAL = ["<end>", "<turn>"]


def byte_level(size: int, corpus: Sequence[str] = CORPUS) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", additional_special_tokens=["<turn>"])


def sentencepiece(size: int, corpus: Sequence[str] = CORPUS) -> PreTrainedTokenizerFast:
    """Spaces as marks, one added at the beginning, unknown characters as byte tokens."""
    learnt = Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    learnt.train_from_iterator(corpus[:2], trainers.BpeTrainer(vocab_size=size))
    names = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *learnt.get_vocab()]
    merges = [tuple(pair) for pair in json.loads(learnt.to_str())["model"]["merges"]]
    vocabulary = {name: i for i, name in enumerate(names)}
    made = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", unk_token="<unk>")


class ByHand:
    """A vocabulary of a few pieces; text is spelled longest piece first."""

    start: tuple[int, ...] = ()

    def __init__(self, *pieces: bytes) -> None:
        self.pieces, self.names = list(pieces), dict[str, int]()

    def encode(self, text: bytes, first: bool = False) -> list[int]:
        ids = []
        while text:
            fitting = [i for i, piece in enumerate(self.pieces) if piece and text.startswith(piece)]
            ids.append(max(fitting, key=lambda i: len(self.pieces[i])))
            text = text[len(self.pieces[ids[-1]]) :]
        return ids


class Knows:
    """A model (for `ToyTarget`) that says one text, in whatever way its tokenizer spells it from where it stands."""

    def __init__(self, vocabulary: TokenizerBytes, text: bytes, sure: float = 0.98) -> None:
        self.vocabulary, self.text, self.sure = vocabulary, text, sure
        self.vocab = len(vocabulary.pieces)
        self._ids = vocabulary.encode(text, True)

    def probs(self, context: Sequence[int]) -> np.ndarray:
        ids = [int(i) for i in context]
        said = b"".join(self.vocabulary.pieces[i] for i in ids)
        probs = np.full(self.vocab, (1 - self.sure) / self.vocab)
        if ids == self._ids[: len(ids)]:
            following = self._ids[len(ids) : len(ids) + 1]
        elif self.text.startswith(said.lstrip()):
            following = self.vocabulary.encode(self.text[len(said.lstrip()) :])[:1]
        else:
            following = []
        for token in following:
            probs[token] += self.sure
        return probs / probs.sum()


class Text:
    """A context whose sampling settings change nothing."""

    prompt, output, temperature, prediction = (), (), 1.0, ()

    def __init__(self, *tokens: int) -> None:
        self.tokens = np.array(tokens)

    def draft_rows(self, logits, paths, width):
        (row,) = logits.double().numpy()
        ids = np.nonzero(np.isfinite(row))[0]
        return [QRow(ids, np.exp(row[ids]))]


def joined(vocabulary, ids) -> bytes:
    return b"".join(vocabulary.pieces[i] for i in ids)


COARSE, FINE, MARKED = (TokenizerBytes(t) for t in (byte_level(700), byte_level(330), sentencepiece(420)))
