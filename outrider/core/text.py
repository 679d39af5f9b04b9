"""Token ids to text while they come: pieces that join to exactly what decoding all tokens at once gives.

Holds back what a later token may still change (an unfinished character, the beginning of a stop string). Decodes a
short window a token instead of the whole output; knows nothing of prompts, so a prompt can never match a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from outrider.core.errors import InputError

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what decoders show for bytes that are not (yet) a character
CONTEXT = 8  # tokens a new window starts with
WINDOW = 24  # tokens after which a new window is begun


class TextStream:
    """Changes state with every `push`. Joined pieces, `finish` included, are `text`: the decoded tokens, cut before the
    stop string that completed first (of several completed by one token, the one that starts first), or behind it."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = (), include_stop: bool = False
    ) -> None:
        if any(not s for s in stop):
            raise InputError("a stop string is empty: leave it out or give it at least one character")
        self.stopped = False  # the last pushed token completed a stop string
        self.stop = ""  # that one
        self._include_stop = include_stop
        self._decode = decode
        self._stop = tuple(stop)
        self._byte_tokens: frozenset[int] = getattr(decode, "byte_tokens", frozenset())
        self._finished = False
        self._window: list[int] = []  # the last tokens
        self._shown = 0  # characters of the window's text that are in `_pieces` already
        self._byte_run = 0  # how many of the last tokens are one unbroken run of byte tokens
        self._seen = ""  # the window's text after the last push
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All that was emitted so far."""
        return "".join(self._pieces)

    @property
    def waits(self) -> bool:
        """Whether tokens may come later than they were said: there is no stop string that they could complete."""
        return not self._stop

    def push(self, token: int) -> str:
        """The text that is now certain; often a word, sometimes nothing."""
        return self._push((token,))

    def extend(self, tokens: Sequence[int]) -> str:
        """`push` of each of them, decoded together where nothing has to be found out in between."""
        size = 1 if self._stop or self._byte_tokens else WINDOW
        return "".join(self._push(tokens[first : first + size]) for first in range(0, len(tokens), size))

    def _push(self, tokens: Sequence[int]) -> str:
        """Several only where there are neither stop strings nor tokens of single bytes."""
        if self.stopped or self._finished:
            raise RuntimeError("this text has ended: no token may follow a stop string or finish()")
        self._window.extend(tokens)
        window = self._decode(self._window)
        # A token without text (a special one) does not end a run: decoders join the bytes on both its sides.
        in_run = tokens[-1] in self._byte_tokens or (self._byte_run and window == self._seen)
        self._byte_run = self._byte_run + 1 if in_run else 0
        self._seen = window
        if (found := self._find_stop(window)) is not None:
            self.stopped, (cut, self.stop) = True, found
            return self._emit(window[: cut + len(self.stop) * self._include_stop])
        settled = self._settled(window)
        piece = self._emit(settled[: len(settled) - self._held(settled)])
        if len(self._window) > WINDOW and settled == window:
            self._slide(window)
        return piece

    def finish(self) -> str:
        """Flush what was held back; nothing more will come. After a stop string there is nothing to flush."""
        if self.stopped or self._finished:
            return ""
        self._finished = True
        return self._emit(self._decode(self._window))

    def _emit(self, certain: str) -> str:
        piece = certain[self._shown :]
        if piece:
            self._shown = len(certain)
            self._pieces.append(piece)
        return piece

    def _find_stop(self, window: str) -> tuple[int, str] | None:
        """Where the text ends, and with what. What was emitted cannot be part of it: every beginning is held back."""
        visible = window.rstrip(UNFINISHED)
        found = [(at, s) for s in self._stop if (at := visible.find(s, self._shown)) >= 0]
        return min(found, default=None)

    def _settled(self, window: str) -> str:
        """The part of the window's text that no later token can change."""
        if self._byte_run:  # one bad byte spoils its whole run, good characters before it too
            window = self._decode(self._window[: -self._byte_run])
        return window.rstrip(UNFINISHED)

    def _held(self, settled: str) -> int:
        """Length of the longest ending that begins a stop string."""
        longest = 0
        fresh = settled[self._shown :]
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(fresh)), longest, -1):
                if fresh.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _slide(self, window: str) -> None:
        """Begin a shorter window, but only where decoding from there gives the same ending.

        It does not inside a character; and text is needed in it, because some decoders strip the first word's space.
        """
        context = self._window[-CONTEXT:]
        tail = self._decode(context)
        dropped = len(window) - len(tail)
        if tail and dropped <= self._shown and window.endswith(tail):
            self._window = context
            self._shown -= dropped


class TokenDecoder:
    """A tokenizer's decode without tidying of spaces; `whole` is the same with special tokens shown."""

    def __init__(self, tokenizer: Any, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        names = [f"<0x{byte:02X}>" for byte in range(256)]  # byte-fallback vocabularies name their byte tokens so
        ids = zip(names, tokenizer.convert_tokens_to_ids(names), strict=True)
        self.byte_tokens = frozenset(i for name, i in ids if i is not None and _name(tokenizer, i) == name)

    def __call__(self, tokens: Sequence[int]) -> str:
        text = self._tokenizer.decode(
            tokens, skip_special_tokens=self._skip_special, clean_up_tokenization_spaces=False
        )
        return str(text)

    @cached_property
    def whole(self) -> TokenDecoder:
        return TokenDecoder(self._tokenizer, skip_special=False)


def token_decoder(tokenizer: Any) -> TokenDecoder:
    """What a `TextStream` decodes with; build it once a tokenizer."""
    return TokenDecoder(tokenizer)


def _name(tokenizer: Any, token: int) -> str:
    return str(tokenizer.convert_ids_to_tokens(token))
