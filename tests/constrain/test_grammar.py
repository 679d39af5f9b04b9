"""Forms compile to automata that allow what the form allows, by whatever tokens; what cannot be held to is named."""

from __future__ import annotations

import json
import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.constrain.grammar import Grammars
from outrider.constrain.tools import read_calls, tool_tag
from outrider.core.errors import InputError, OutriderError
from outrider.core.params import SamplingParams
from outrider.core.protocols import Automaton
from tests.constrain.words import SIZE, WORDS

BOTH = pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "ok": {"enum": [True, "maybe"]}},
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}


def compiled(backend: str = "auto", **form: object) -> Automaton:
    return Grammars(lambda: WORDS, SIZE, backend)(SamplingParams(**form))  # type: ignore[arg-type]


def accepts(automaton: Automaton, ids: list[int]) -> bool:
    state = automaton.start(())
    for token in ids:
        state = automaton.advance(state, token)
        if state is None:
            return False
    return automaton.complete(state)


def said(automaton: Automaton, text: str) -> bool:
    return accepts(automaton, WORDS.encode(text.encode()))


def bits(row: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


@BOTH
def test_json_of_the_schema_is_said_and_nothing_else(backend: str) -> None:
    form = compiled(backend, json_schema=SCHEMA)
    assert said(form, '{"name": "Ann", "age": 31, "ok": "maybe"}')
    for wrong in ('{"name": "Ann", "age": 31}', '{"name": 3', '{"name": "Ann", "age": "x"', "[", '{"name": "A", "b'):
        assert not said(form, wrong)


@BOTH
def test_separators_are_fixed_unless_spacing_is_free(backend: str) -> None:
    tight, spaced = '{"name":"A","age":1,"ok":true}', '{ "name": "A",\n "age": 1, "ok": true }'
    fixed = compiled(backend, json_schema=SCHEMA)
    free = compiled(backend, json_schema=SCHEMA, free_spacing=True)
    assert not said(fixed, tight) and not said(fixed, spaced)
    assert said(free, tight) and said(free, spaced)


@BOTH
@given(text=st.text("ab12-", max_size=6))
@settings(max_examples=60)
def test_a_regular_expression_holds_for_the_whole_text(backend: str, text: str) -> None:
    pattern = r"(ab|\d{2})+-?"
    assert said(_PATTERN[backend], text) == bool(re.fullmatch(pattern, text))


_PATTERN = {name: compiled(name, regex=r"(ab|\d{2})+-?") for name in ("xgrammar", "llguidance")}


@BOTH
def test_choices_are_said_letter_by_letter_whatever_they_are_made_of(backend: str) -> None:
    choices = ['say "no"', "né\n", "\\d+", "a|b"]
    form = compiled(backend, choices=choices)
    for choice in choices:
        assert said(form, choice) and not said(form, choice + "x") and not said(form, choice[:-1])


def test_grammars_are_read_in_both_notations() -> None:
    assert said(compiled(grammar='root ::= "a" b*\nb ::= "12"'), "a1212")
    assert said(compiled(grammar='start: "a" /[0-9]+/ "-"'), "a77-")


@BOTH
def test_masks_single_answers_and_advancing_agree_and_states_are_values(backend: str) -> None:
    form = compiled(backend, json_schema=SCHEMA)
    state = form.start(())
    for token in WORDS.encode(b'{"name": "abab", "age": 12, "ok": true}'):
        (row,) = form.mask([state])
        after = {id: form.advance(state, id) for id in range(SIZE)}
        assert bits(row) == {id for id in range(SIZE) if form.allows(state, id)} == {i for i in after if after[i]}
        assert np.array_equal(form.mask([state])[0], row), "asking changed the state"
        state = after[token]
    assert form.complete(state) and not bits(form.mask([state])[0])


@BOTH
def test_states_of_one_text_are_asked_in_any_order(backend: str) -> None:
    """Neighbours, ancestors and texts that parted long ago, back and forth."""
    form = compiled(backend, json_schema=SCHEMA)
    states = [form.start(())]
    for text in (b'{"name": "abab", "age": 12, "ok": true}', b'{"name": "ab", "age": 71, "ok": "maybe"}'):
        at = states[0]
        for token in WORDS.encode(text):
            at = form.advance(at, token)
            states.append(at)
    rows = [form.mask([state])[0] for state in states]
    order = np.random.default_rng(7).permutation(np.repeat(np.arange(len(states)), 3)).tolist()
    for i in order:
        assert np.array_equal(form.mask([states[i]])[0], rows[i])
    assert np.array_equal(form.mask([states[i] for i in order]), np.stack([rows[i] for i in order]))
    assert sum(form.complete(state) for state in states) == 2


@BOTH
def test_what_is_forced_is_legal_and_long(backend: str) -> None:
    form = compiled(backend, json_schema=SCHEMA)
    state = form.start(())
    forced = list(form.forced(state))
    assert WORDS.decode(forced).startswith('{"name":')
    for token in forced:
        state = form.advance(state, token)
        assert state is not None
    assert not form.forced(state) or WORDS.decode(form.forced(state)) in (' "', '"')


@pytest.mark.parametrize(
    ("form", "named"),
    [
        ({"json_schema": "{"}, "json_schema is no JSON"),
        ({"json_schema": "3"}, "json_schema is JSON, but no object"),
        ({"json_schema": {"type": "strin"}}, "json_schema cannot be compiled"),
        ({"json_schema": {"$ref": "#"}}, "can never be met"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "json_schema cannot be compiled"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "json_schema cannot be compiled"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json_schema": "[" * 100_000}, "nested too deeply"),
        ({"json_schema": '{"items":' * 300 + "{}" + "}" * 300}, "nested more than"),
        ({"regex": "(ab"}, "regex cannot be compiled"),
        ({"grammar": "root ::= root"}, "can never be met"),
        ({"grammar": "root ::= missing"}, "grammar cannot be compiled"),
        ({"grammar": "x" * (2 << 20)}, "grammar has 2.0 MB; give at most 1 MB"),
        ({"choices": [""]}, "at least one character"),
        ({"structural_tag": {"type": "nothing"}}, "structural_tag cannot be compiled"),
        ({"regex": "a", "grammar": "b"}, "regex and grammar were both given"),
    ],
)
def test_what_is_no_form_is_named(form: dict[str, object], named: str) -> None:
    with pytest.raises(InputError, match=re.escape(named)):
        compiled(**form)


@pytest.mark.parametrize(
    "bomb", ["((a{0,100}){0,100}){0,100}", "(.{1,1000}){1,1000}", "a{1,9999999}b", "(((a?){99})*){99}"]
)
def test_an_expression_that_would_take_minutes_ends_in_a_second(bomb: str) -> None:
    begun = time.process_time()
    try:
        form = compiled(regex=bomb)
        state = form.start(())
        for _ in range(40):
            state = form.advance(state, WORDS.pieces.index(b"a"))
            form.mask([state])
    except OutriderError:
        pass
    assert time.process_time() - begun < 10


def test_a_form_is_compiled_once_and_an_error_is_kept_too() -> None:
    grammars = Grammars(lambda: WORDS, SIZE)
    params = SamplingParams(json_schema=SCHEMA)
    assert grammars(params) is grammars(SamplingParams(json_schema=json.dumps(SCHEMA)))
    for _ in range(2):
        with pytest.raises(InputError, match="regex cannot be compiled"):
            grammars(SamplingParams(regex="["))


def test_no_id_without_text_is_ever_allowed() -> None:
    for backend in ("xgrammar", "llguidance"):
        form = compiled(backend, regex="(.|\n)*")
        assert 0 not in bits(form.mask([form.start(())])[0]) and not form.allows(form.start(()), 0)


TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time"}},
]


def test_calls_are_of_the_tools_that_are_there_and_of_the_one_that_is_named() -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"name": "A", "age": 1, "ok": true}}\n</tool_call>'
    auto, required = compiled(structural_tag=tool_tag(TOOLS)), compiled(structural_tag=tool_tag(TOOLS, "required"))
    named = compiled(structural_tag=tool_tag(TOOLS, {"type": "function", "function": {"name": "weather"}}))
    assert all(said(form, call) for form in (auto, required, named))
    assert said(auto, "no call") and said(auto, "one: " + call)
    assert not said(required, "no call") and not said(named, "no call")
    assert said(required, call + "\n" + call) and not said(named, call + "\n" + call)
    assert not said(auto, call.replace("weather", "whether"))
    assert read_calls("one: " + call) == ("one: ", [("weather", '{"name": "A", "age": 1, "ok": true}')])
    assert tool_tag(TOOLS, "none") == tool_tag([]) == ""
    with pytest.raises(InputError, match="did you mean weather"):
        tool_tag(TOOLS, "wether")
