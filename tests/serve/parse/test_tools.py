"""Calls of tools are found in every form, however the text is cut into pieces, and nothing that is said is lost."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.serve.parse.pieces import Piece, Plain, Said
from outrider.serve.parse.reader import Parsed, Reading, shown_specials
from outrider.serve.parse.reasoning import Reasoning
from outrider.serve.parse.tools import FORMS, ToolForm, Tools, form_of

NAMES = ("weather", "search")
ARGUMENTS = {"city": "Paris", "when": {"days": [1, 2]}, "quote": 'a "b" } \\ {'}
INNER = json.dumps(ARGUMENTS)
ONE = '{"name": "weather", "arguments": ' + INNER + "}"
CASES = {
    "hermes": ("hermes", f"Let me look.\n<tool_call>\n{ONE}\n</tool_call>", "Let me look.\n", ["weather"]),
    "hermes twice": ("hermes", f"<tool_call>{ONE}</tool_call>\n<tool_call>\n{ONE}\n</tool_call>", "", ["weather"] * 2),
    "hermes, arguments first": (
        "hermes", '<tool_call>{"arguments": ' + INNER + ', "name": "search"}</tool_call>', "", ["search"],
    ),
    "hermes, arguments as text": (
        "hermes", '<tool_call>{"name": "search", "arguments": ' + json.dumps(INNER) + "}</tool_call>", "", ["search"],
    ),
    "llama": ("llama", '{"name": "weather", "parameters": ' + INNER + "}", "", ["weather"]),
    "llama, marked": ("llama", '<|python_tag|>{"name": "weather", "parameters": ' + INNER + "}", "", ["weather"]),
    "llama twice": ("llama", "; ".join(['{"name": "search", "parameters": ' + INNER + "}"] * 2), "", ["search"] * 2),
    "mistral": ("mistral", f"[TOOL_CALLS] [{ONE}, {ONE}]", "", ["weather"] * 2),
    "mistral, newer": ("mistral", f"Yes.[TOOL_CALLS]weather[ARGS]{INNER}[TOOL_CALLS]search[ARGS]{INNER}", "Yes.",
                       ["weather", "search"]),
}  # fmt: skip
OTHERS = [
    ("hermes", "A <tool_call> is no call, and </tool_call> neither."),
    ("hermes", "1 < 2 and <tool"),
    ("llama", '{"answer": 42} is JSON, not a call'),
    ("llama", '{"name": "unknown", "parameters": {}}'),
    ("mistral", "[TOOL] is no marker, [TOOL_CALLS"),
]


def parse(parser: Tools | Reasoning, pieces: list[str]) -> Parsed:
    parsed = Parsed()
    found: list[Piece] = [piece for text in pieces for piece in parser.feed(text)]
    for piece in [*found, *parser.finish()]:
        parsed.add(piece)
    return parsed


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@given(places=st.lists(st.integers(0, 1000), max_size=30))
def test_calls_are_found_however_the_text_is_cut(case: tuple[str, str, str, list[str]], places: list[int]) -> None:
    form, text, content, names = case
    parsed = parse(Tools(FORMS[form], NAMES), cut(text, places))
    assert parsed.content.rstrip() == content.rstrip()
    assert [call.name for call in parsed.calls] == names
    assert all(json.loads(call.arguments) == ARGUMENTS for call in parsed.calls)


@pytest.mark.parametrize(("form", "text"), OTHERS)
@given(places=st.lists(st.integers(0, 1000), max_size=30))
def test_what_is_no_call_is_the_answer_unchanged(form: str, text: str, places: list[int]) -> None:
    parsed = parse(Tools(FORMS[form], NAMES), cut(text, places))
    assert (parsed.content, parsed.calls) == (text, [])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@given(text=st.text(alphabet='<>/tool_ca["]{}:,\\ \nTOOL_CALLSname', max_size=60))
def test_any_text_is_read_without_a_fault(form: ToolForm, text: str) -> None:
    parse(Tools(form, NAMES), list(text))


def test_arguments_stream_before_the_call_has_ended() -> None:
    parser = Tools(FORMS["hermes"], NAMES)
    pieces = parser.feed('<tool_call>{"name": "weather", "arguments": {"city": "Pa')
    assert [type(piece).__name__ for piece in pieces] == ["CallBegins", "CallArguments"]
    parsed = Parsed()
    for piece in [*pieces, *parser.feed('ris"}}</tool_call>')]:
        parsed.add(piece)
    assert parsed.calls[0].arguments == '{"city": "Paris"}'


def test_a_call_without_arguments_has_an_empty_object() -> None:
    assert (
        parse(Tools(FORMS["hermes"], NAMES), ['<tool_call>{"name": "weather"}</tool_call>']).calls[0].arguments == "{}"
    )


@pytest.mark.parametrize(
    ("text", "begun", "reasoning", "content"),
    [
        ("<think>\nhm, 1 < 2\n</think>\n\nYes.", False, "hm, 1 < 2", "Yes."),
        ("\n<think>a</think>b", False, "a", "b"),
        ("hm\n</think>\n\nYes.", True, "hm", "Yes."),
        ("cut off", True, "cut off", ""),
        ("No <think>ing</think> here.", False, "", "No <think>ing</think> here."),
        ("<thi", False, "", "<thi"),
        ("<think></think>\nfine", False, "", "fine"),
    ],
)
@given(places=st.lists(st.integers(0, 100), max_size=20))
def test_reasoning_is_told_apart_however_it_is_cut(
    text: str, begun: bool, reasoning: str, content: str, places: list[int]
) -> None:
    parsed = parse(Reasoning(Plain(), begun), cut(text, places))
    assert (parsed.reasoning, parsed.content) == (reasoning, content)


def test_templates_say_which_form_they_teach() -> None:
    assert form_of("... <tool_call>\n{{ tool }}").name == "hermes" and form_of(None).name == "hermes"
    assert form_of("{% if x %}[TOOL_CALLS]").name == "mistral"
    assert form_of('Respond with {"name": n, "parameters": p}').name == "llama"


def test_special_tokens_are_shown_for_markers_only() -> None:
    assert shown_specials(FORMS["hermes"], ["<|im_end|>"]) is None
    hidden = shown_specials(FORMS["mistral"], ["[TOOL_CALLS]", "[ARGS]", "</s>"])
    assert hidden == ("</s>",)
    parser = Reading(FORMS["mistral"], NAMES, hidden=hidden).parser()
    pieces = [*parser.feed("Hi</s> there"), *parser.finish()]
    assert "".join(piece.text for piece in pieces if isinstance(piece, Said)) == "Hi there"
