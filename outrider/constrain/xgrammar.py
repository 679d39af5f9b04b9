"""Forms compiled by xgrammar: push-down automata over bytes, whose masks are mostly known before a text begins.

XGrammar (arXiv 2411.15100). Exact for what it compiles; what it is known to pass over in a schema is refused here. One
matcher a text walks to the state that is asked about, back and forth along its tokens: a copy of it would cost as much
as the text is long. Costs milliseconds a form, a microsecond a token walked, and up to 100 microseconds a mask.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xgrammar
from numpy.typing import NDArray

from outrider.constrain.grammar import Unsupported, Words
from outrider.constrain.limits import check_repetitions
from outrider.core.errors import InputError

KEPT_BYTES = 256 << 20  # of compiled grammars inside the library
THREADS = 2
# What xgrammar reads and does not hold to: JSON of that schema might break it.
PASSED_OVER = frozenset(
    "uniqueItems contains minContains maxContains multipleOf not if then else dependentSchemas dependentRequired "
    "unevaluatedItems contentEncoding contentSchema $dynamicRef".split()
)
BOUNDED, PRINTABLE = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\\r\n]"


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """A place in a text: the token that led there, and the place before it."""

    walker: Walker
    before: State | None
    token: int
    depth: int  # tokens of the text so far


@dataclass(slots=True, eq=False)
class Walker:
    """The matcher of one text and its alternatives, and where it stands. Only `to` and `go_on` move it."""

    matcher: Any
    at: State = field(init=False)

    def __post_init__(self) -> None:
        self.at = State(self, None, -1, 0)

    def to(self, state: State) -> Any:
        """The matcher, moved back to where the ways part and on from there."""
        here, there, back, ahead = self.at, state, 0, []
        while here is not there:
            if here.depth >= there.depth:
                assert here.before is not None
                here, back = here.before, back + 1
            else:
                assert there.before is not None
                ahead.append(there.token)
                there = there.before
        if back:
            self.matcher.rollback(back)
        for token in reversed(ahead):
            self.matcher.accept_token(token)
        self.at = state
        return self.matcher

    def go_on(self, state: State, token: int) -> State | None:
        if not self.to(state).accept_token(token):
            return None
        self.at = State(self, state, token, state.depth + 1)
        return self.at


@dataclass(frozen=True, slots=True, eq=False)
class XGrammar:
    """One compiled form. Every answer is a function of the state."""

    compiled: Any
    words: Words
    vocab_size: int
    _silent: frozenset[int]  # ids that are no text
    _runs: dict[str, list[int]] = field(default_factory=dict)  # forced text -> its tokens

    def start(self, prompt: Sequence[int]) -> State:
        return Walker(xgrammar.GrammarMatcher(self.compiled, override_stop_tokens=[self.vocab_size])).at

    def advance(self, state: State, token: int) -> State | None:
        return state.walker.go_on(state, token) if self._may(state, token) else None

    def mask(self, states: Sequence[State]) -> NDArray[np.int32]:
        kept, words = -(-self.vocab_size // 32), self.vocab_size // 32 + 1  # the library's end is one id more
        rows = np.full((len(states), words), -1, dtype=np.int32)
        for row, state in enumerate(states):
            state.walker.to(state).fill_next_token_bitmask(rows, row)
        if kept == words:
            rows[:, -1] &= np.int32((1 << self.vocab_size % 32) - 1)
        return np.ascontiguousarray(rows[:, :kept])

    def allows(self, state: State, token: int) -> bool:
        return self.advance(state, token) is not None

    def forced(self, state: State) -> Sequence[int]:
        try:
            text = state.walker.to(state).find_jump_forward_string()
        except UnicodeDecodeError:  # in the middle of a character
            return ()
        if not text:
            return ()
        if text not in self._runs:
            self._runs[text] = self.words.encode(text.encode())
        return self._runs[text]

    def complete(self, state: State) -> bool:
        return bool(state.walker.to(state).is_completed())

    def _may(self, state: State, token: int) -> bool:
        """Whether the token is text; one that is not may still be named by a structural tag."""
        if token not in self._silent:
            return 0 <= token < self.vocab_size
        return bool(self.mask([state])[0, token // 32] >> token % 32 & 1)


class XGrammarCompiler:
    def __init__(self, words: Words, vocab_size: int) -> None:
        self._words, self._size = words, vocab_size
        pieces = [*words.pieces[:vocab_size]]
        pieces += [b""] * (vocab_size + 1 - len(pieces))  # the last id is the library's end: Outrider has ends apart
        info = xgrammar.TokenizerInfo(
            pieces, xgrammar.VocabType.RAW, vocab_size=vocab_size + 1, stop_token_ids=[vocab_size]
        )
        self._silent = frozenset(i for i, piece in enumerate(pieces) if not piece)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=THREADS, cache_limit_bytes=KEPT_BYTES)

    def compile(self, form: str, given: str | tuple[str, ...], free_spacing: bool) -> XGrammar:
        try:
            check_repetitions(form, given)
        except InputError as error:
            raise Unsupported(str(error)) from None
        try:
            compiled = self._compiled(form, given, free_spacing)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{form} cannot be compiled: {_why(error)}") from None
        return XGrammar(compiled, self._words, self._size, self._silent)

    def _compiled(self, form: str, given: str | tuple[str, ...], free_spacing: bool) -> Any:
        make = self._compiler
        match form, given:
            case "json_schema", str():
                _refuse(given)
                return make.compile_grammar(_of_schema(given, free_spacing))
            case "regex", str():
                return make.compile_regex(given)
            case "grammar", str():
                return make.compile_grammar(given) if "::=" in given else make.compile_lark(given)
            case "structural_tag", str():
                _refuse(given)
                return make.compile_structural_tag(_spelt_out(json.loads(given), free_spacing))
            case _:
                return make.compile_grammar("root ::= " + " | ".join(map(_literal, given)))


def _of_schema(schema: str, free_spacing: bool) -> str:
    """As a grammar. The library's strings of bounded length may hold control characters, which JSON's may not."""
    grammar = str(xgrammar.Grammar.from_json_schema(schema, any_whitespace=free_spacing))
    return grammar.replace(BOUNDED, PRINTABLE)


def _spelt_out(tag: Any, free_spacing: bool) -> Any:
    """The tag with each schema written as a grammar: the library would leave its white space free."""
    if isinstance(tag, list):
        return [_spelt_out(one, free_spacing) for one in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") == "json_schema" and set(tag) == {"type", "json_schema"}:
        return {"type": "grammar", "grammar": _of_schema(json.dumps(tag["json_schema"]), free_spacing)}
    return {key: _spelt_out(value, free_spacing) for key, value in tag.items()}


def _refuse(source: str) -> None:
    if found := sorted({key for key in _keywords(json.loads(source)) if key in PASSED_OVER}):
        raise Unsupported(
            f"json_schema uses {', '.join(found)}, which xgrammar cannot hold a text to; leave it out, check it later"
        )


def _keywords(schema: Any) -> Iterator[str]:
    """Keywords, but not the names of properties or what stands in constants."""
    if isinstance(schema, list):
        for one in schema:
            yield from _keywords(one)
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        yield key
        if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
            for inner in value.values():
                yield from _keywords(inner)
        elif key not in ("const", "enum", "default", "examples"):
            yield from _keywords(value)


def _literal(text: str) -> str:
    return '"' + "".join(c if c.isascii() and c.isalnum() else f"\\U{ord(c):08x}" for c in text) + '"'


def _why(error: Exception) -> str:
    """Without the place in the library's source."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return first.split(": ", 1)[1] if first.startswith("[") and ": " in first else first
