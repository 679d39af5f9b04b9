"""Anthropic's client drives messages and count_tokens, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from outrider.api import Outrider
from tests.serve.conftest import Served

HELLO = [{"role": "user", "content": "Say something."}]
WEATHER = {"name": "weather", "description": "", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="any", max_retries=0) as made:
        yield made


def test_a_message_is_the_engines_text_whole_and_streamed(client: anthropic.Anthropic, engine: Outrider) -> None:
    wanted = engine.chat(HELLO, temperature=0.8, seed=4, max_new_tokens=20)
    asked = {"model": "small", "messages": HELLO, "max_tokens": 20, "extra_body": {"seed": 4, "temperature": 0.8}}
    whole = client.messages.create(**asked)
    assert whole.content[0].text == wanted.text and whole.usage.output_tokens == len(wanted.token_ids)
    assert whole.stop_reason == ("max_tokens" if wanted.finish_reason == "length" else "end_turn")
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == wanted.text
        final = stream.get_final_message()
    assert final.content[0].text == wanted.text and final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_a_stop_sequence_is_named(client: anthropic.Anthropic, engine: Outrider) -> None:
    text = engine.chat(HELLO, max_new_tokens=20).text
    word = text[len(text) // 2 :][:3]
    found = client.messages.create(
        model="small", messages=HELLO, max_tokens=20, stop_sequences=[word], extra_body={"temperature": 0}
    )
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", word)
    assert found.content[0].text == text[: text.index(word)]


def test_blocks_of_a_conversation_with_tools_are_read(client: anthropic.Anthropic) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Looking."},
                                          {"type": "tool_use", "id": "t1", "name": "weather", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}]},
    ]  # fmt: skip
    found = client.messages.create(model="small", messages=messages, max_tokens=4, system="Be brief.", tools=[WEATHER])
    assert found.usage.output_tokens <= 4
    counted = client.messages.count_tokens(model="small", messages=messages, system="Be brief.", tools=[WEATHER])
    assert counted.input_tokens == found.usage.input_tokens + found.usage.cache_read_input_tokens


def test_faults_come_in_anthropics_form(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", messages=HELLO, max_tokens=4)
    with pytest.raises(anthropic.BadRequestError, match="invalid_request_error"):
        client.messages.create(model="small", messages=HELLO, max_tokens=4, extra_body={"temperature": 7})
    image = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.create(model="small", messages=image, max_tokens=4)
    assert [one.id for one in client.models.list()] == ["small"]
