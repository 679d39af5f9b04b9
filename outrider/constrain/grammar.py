"""Forms of a text (JSON schema, expression, grammar, choices, structural tag, quote) to automata, compiled once.

Exact: what an automaton allows is what the form allows, token by token, whatever tokens the text is cut into. Two
libraries compile: xgrammar, and llguidance for what the first one cannot hold to. What neither can is refused by name,
as is what would take them minutes; a mask costs microseconds. Masks are of ids, so one compiler is for one tokenizer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Literal, Protocol

import numpy as np

from outrider.constrain import limits
from outrider.constrain.copy import CopyFrom
from outrider.core.errors import InputError, MissingExtra, OutriderError
from outrider.core.params import SamplingParams
from outrider.core.protocols import Automaton

BackendName = Literal["auto", "xgrammar", "llguidance"]
BACKENDS = ("auto", "xgrammar", "llguidance")
KEPT = 256  # compiled forms


class Words(Protocol):
    """A tokenizer seen as bytes."""

    @property
    def pieces(self) -> Sequence[bytes]: ...  # per id; empty for ids that are no text
    def encode(self, text: bytes, first: bool = False) -> list[int]: ...


class Compiler(Protocol):
    """One library's part: raises `Unsupported` for what it cannot hold to, `InputError` for what is wrong."""

    def compile(self, form: str, given: str | tuple[str, ...], free_spacing: bool) -> Automaton: ...


class Unsupported(InputError):
    """A form that is well-formed, but that a library cannot hold to."""


@dataclass(slots=True)
class _Kept:
    automaton: Automaton | None = None
    error: OutriderError | None = None


class Grammars:
    """Called with a request's parameters, from any thread. Changes state: keeps what it compiled last, errors too."""

    def __init__(self, words: Callable[[], Words], vocab_size: int, backend: str = "auto") -> None:
        if backend not in BACKENDS:
            raise InputError(f"grammar_backend is {backend!r}; use one of {', '.join(BACKENDS)}")
        self._make_words, self.vocab_size, self.backend = words, vocab_size, backend
        self._kept: OrderedDict[tuple[object, ...], _Kept] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, params: SamplingParams) -> Automaton:
        form = params.form
        given = getattr(params, form)
        key = (form, given, params.free_spacing)
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
        if kept is None:
            kept = self._compile(form, given, params.free_spacing)
            with self._lock:
                self._kept[key] = kept
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
        if kept.error is not None:
            raise kept.error
        assert kept.automaton is not None
        return kept.automaton

    def _compile(self, form: str, given: Any, free_spacing: bool) -> _Kept:
        try:
            if form == "quote":
                return _Kept(self._copying(given))
            limits.check(form, given)
            automaton = self._by_a_library(form, given, free_spacing)
            _can_begin(form, automaton)
            return _Kept(automaton)
        except MissingExtra:
            raise  # may be there next time
        except OutriderError as error:
            return _Kept(error=error)

    def _copying(self, marks: bool | tuple[int, int]) -> Automaton:
        try:
            barriers = frozenset(i for i, piece in enumerate(self._words.pieces[: self.vocab_size]) if not piece)
        except InputError:  # no tokenizer: all ids are taken for text
            barriers = frozenset()
        opening, closing = marks if isinstance(marks, tuple) else (None, None)
        return CopyFrom(self.vocab_size, opening, closing, barriers=barriers)

    def _by_a_library(self, form: str, given: str | tuple[str, ...], free_spacing: bool) -> Automaton:
        names = [self.backend] if self.backend != "auto" else [n for n in BACKENDS[1:] if find_spec(n) is not None]
        if missing := [name for name in names if find_spec(name) is None]:
            raise MissingExtra(f"{form} needs the package {missing[0]}: pip install 'outrider[grammar]'")
        if not names:
            raise MissingExtra(f"{form} needs a grammar compiler: pip install 'outrider[grammar]'")
        why: list[str] = []
        for name in names:
            try:
                return self._library(name).compile(form, given, free_spacing)
            except Unsupported as error:
                why.append(str(error))
        raise InputError("; ".join(why))

    def _library(self, name: str) -> Compiler:
        return self._xgrammar if name == "xgrammar" else self._llguidance

    @cached_property
    def _words(self) -> Words:
        return self._make_words()

    @cached_property
    def _xgrammar(self) -> Compiler:
        from outrider.constrain.xgrammar import XGrammarCompiler

        return XGrammarCompiler(self._words, self.vocab_size)

    @cached_property
    def _llguidance(self) -> Compiler:
        from outrider.constrain.llguidance import GuidanceCompiler

        return GuidanceCompiler(self._words, self.vocab_size)


def _can_begin(form: str, automaton: Automaton) -> None:
    state = automaton.start(())
    if not automaton.complete(state) and not np.any(automaton.mask([state])):
        raise InputError(f"{form} can never be met: no text begins as it asks; look for a rule that only names itself")
