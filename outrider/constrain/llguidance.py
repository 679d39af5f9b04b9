"""Forms compiled by llguidance: an Earley parser over lazily built lexers, with limits on what one step may cost.

The second library: for Lark grammars, and for what xgrammar cannot hold to. Exact for what it compiles, and it refuses
what it knows it cannot hold to. A state is a matcher, copied where a token is added. Costs about a millisecond a form
and tens of microseconds a mask; a form whose steps would cost more than its limits ends the request with an error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from outrider.constrain.grammar import Unsupported, Words
from outrider.core.errors import InputError, OutriderError

OPTIONS = '%llguidance {"no_forcing": true}\n'  # else a mask holds only the usual tokens of what is bound to follow
State = Any  # a matcher of llguidance's


class GrammarFailed(OutriderError):
    """A form that was compiled, but that cannot be followed within the library's limits."""


@dataclass(frozen=True, slots=True, eq=False)
class Guidance:
    """One compiled form. Every answer is a function of the state."""

    first: State  # before any token
    words: Words
    vocab_size: int
    _silent: frozenset[int]
    _runs: dict[bytes, list[int]] = field(default_factory=dict)  # forced text -> its tokens

    def start(self, prompt: Sequence[int]) -> State:
        return self.first.deep_copy()

    def advance(self, state: State, token: int) -> State:
        if not self.allows(state, token):
            return None
        after = state.deep_copy()
        if not after.consume_token(token):
            raise GrammarFailed(f"the form cannot be followed any further: {_first_line(after.get_error())}")
        return after

    def mask(self, states: Sequence[State]) -> NDArray[np.int32]:
        rows = np.zeros((len(states), -(-(self.vocab_size + 1) // 32)), dtype=np.int32)  # the library's end is one more
        for row, state in zip(rows, states, strict=True):
            state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if state.is_error():
                raise GrammarFailed(f"the form cannot be followed any further: {_first_line(state.get_error())}")
        rows[:, self.vocab_size // 32] &= np.int32((1 << self.vocab_size % 32) - 1)
        return np.ascontiguousarray(rows[:, : -(-self.vocab_size // 32)])

    def allows(self, state: State, token: int) -> bool:
        if token in self._silent or not 0 <= token < self.vocab_size:
            return False
        return bool(state.validate_tokens([token]))

    def forced(self, state: State) -> Sequence[int]:
        text = state.compute_ff_bytes()
        if not text:
            return ()
        if text not in self._runs:
            self._runs[text] = self.words.encode(text)
        return self._runs[text]

    def complete(self, state: State) -> bool:
        return bool(state.is_accepting())


class GuidanceCompiler:
    def __init__(self, words: Words, vocab_size: int) -> None:
        self._words, self._size = words, vocab_size
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Seen(words, vocab_size)), n_vocab=vocab_size + 1
        )
        self._silent = frozenset(i for i in range(vocab_size) if i >= len(words.pieces) or not words.pieces[i])

    def compile(self, form: str, given: str | tuple[str, ...], free_spacing: bool) -> Guidance:
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(self._tokenizer, _source(form, given, free_spacing), log_level=0, limits=limits)
        if matcher.is_error():
            why = _first_line(matcher.get_error())
            kind = Unsupported if "nimplemented" in why or "nsupported" in why else InputError
            raise kind(f"{form} cannot be compiled: {why}")
        return Guidance(matcher, self._words, self._size, self._silent)


def _source(form: str, given: str | tuple[str, ...], free_spacing: bool) -> str:
    make = llguidance.LLMatcher.grammar_from_lark
    match form, given:
        case "json_schema", str():
            schema: Any = json.loads(given)
            if isinstance(schema, bool):
                schema = {} if schema else {"not": {}}
            fixed = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
            spacing = {"whitespace_flexible": True} if free_spacing else fixed
            return make(f"{OPTIONS}start: %json " + json.dumps(schema | {"x-guidance": spacing}))
        case "regex", str():
            return make(f"{OPTIONS}start: /{llguidance.regex_to_lark(given, use_ascii='dsw')}/")
        case "grammar", str():
            if "::=" in given:
                raise Unsupported("grammar is in EBNF, which llguidance does not read; write it in Lark (start: ...)")
            if "%llguidance" in given:
                raise InputError(
                    "grammar sets options with %llguidance, which Outrider sets itself; leave that line out"
                )
            return make(OPTIONS + given)
        case "structural_tag", _:
            raise Unsupported("structural_tag needs xgrammar: pip install xgrammar")
        case _:
            return make(f"{OPTIONS}start: " + " | ".join(map(json.dumps, given)))


class _Seen:
    """The tokenizer as the library asks for it."""

    def __init__(self, words: Words, vocab_size: int) -> None:
        pieces = list(words.pieces[:vocab_size])
        pieces += [b""] * (vocab_size - len(pieces))
        # Ids without text need bytes of their own: they are marked as special ones, which no form names.
        self.tokens = [piece or b"\xff[%d]" % i for i, piece in enumerate(pieces)] + [b"\xff[end]"]
        self.special_token_ids = [i for i, piece in enumerate(pieces) if not piece] + [vocab_size]
        self.eos_token_id, self.bos_token_id = vocab_size, None
        self._words = words

    def __call__(self, text: bytes | str) -> list[int]:
        return self._words.encode(text.encode() if isinstance(text, str) else text)


def _first_line(message: str) -> str:
    return (message.strip().splitlines() or ["no reason given"])[0][:300]
