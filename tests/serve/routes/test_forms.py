"""Answers held to a form, forced calls, and traces, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest

from outrider.serve.constraints import form_of_text
from outrider.serve.forms.chat import ChatForm
from tests.serve.conftest import Served

HELLO = [{"role": "user", "content": "Say something."}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    pytest.importorskip("xgrammar")
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def test_an_answer_keeps_to_its_schema(client: openai.OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    found = client.chat.completions.create(
        model="small", messages=HELLO, max_tokens=40, temperature=0, response_format=wanted
    )
    assert json.loads(found.choices[0].message.content)["a"] in (1, 2)
    for extra in ({"structured_outputs": {"choice": ["yes", "no"]}}, {"guided_choice": ["yes", "no"]},
                  {"guided_regex": "(yes|no)"}):  # fmt: skip
        said = client.chat.completions.create(model="small", messages=HELLO, max_tokens=20, extra_body=extra)
        assert said.choices[0].message.content in ("yes", "no")


def test_a_forced_call_is_a_call_whole_and_streamed(client: openai.OpenAI) -> None:
    asked = {
        "model": "small", "messages": HELLO, "max_tokens": 60, "temperature": 0, "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }  # fmt: skip
    found = client.chat.completions.create(**asked).choices[0]
    (call,) = found.message.tool_calls
    assert (call.function.name, found.finish_reason) == ("weather", "tool_calls")
    assert json.loads(call.function.arguments)["a"] in (1, 2)
    names, arguments = [], ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            names += [piece.function.name] if piece.function.name else []
            arguments += piece.function.arguments or ""
    assert names == ["weather"] and json.loads(arguments) == json.loads(call.function.arguments)


def test_what_cannot_be_compiled_or_is_asked_twice_is_refused(client: openai.OpenAI) -> None:
    wrong = [{"guided_regex": "("}, {"guided_choice": ["a"], "guided_regex": "b"}, {"response_format": {"type": "x"}}]
    for extra in (*wrong, {"structured_outputs": {"json": {}, "regex": "a"}}):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="small", messages=HELLO, max_tokens=4, extra_body=extra)


def test_a_trace_has_every_step_of_a_request_that_asked_for_it(client: openai.OpenAI, served: Served) -> None:
    found = client.chat.completions.create(
        model="small", messages=HELLO, max_tokens=12, temperature=0, extra_body={"outrider": {"trace": True}}
    )
    trace = client.get(f"{served.url}/v1/outrider/trace/{found.id}", cast_to=dict)
    assert len(trace["trace"]["steps"]) == found.timings["steps"]
    assert len(trace["token_ids"]) == found.usage.completion_tokens
    with pytest.raises(openai.NotFoundError):
        client.get(f"{served.url}/v1/outrider/trace/nothing", cast_to=dict)


def test_the_dialects_mean_the_same() -> None:
    def read(**fields: object) -> dict[str, object]:
        return form_of_text(ChatForm.model_validate({"messages": HELLO, **fields}))

    schema = json.dumps(SCHEMA)
    assert read(response_format={"type": "text"}) == {} and read() == {}
    assert read(response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}}) == {"json_schema": schema}
    assert read(structured_outputs={"json": SCHEMA}) == read(json_schema=SCHEMA) == read(guided_json=schema)
    assert read(grammar='root ::= "a"') == read(guided_grammar='root ::= "a"') == {"grammar": 'root ::= "a"'}
