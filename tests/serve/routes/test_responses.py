"""OpenAI's client drives the responses route, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from outrider.api import Outrider
from outrider.serve.answer.blocks import Blocks
from outrider.serve.parse.pieces import CallArguments, CallBegins, Piece, Said
from outrider.serve.parse.reader import Parsed
from tests.serve.conftest import Served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def test_a_response_is_the_engines_text_whole_and_streamed(client: openai.OpenAI, engine: Outrider) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    wanted = engine.chat(messages, max_new_tokens=20)
    asked = {"model": "small", "instructions": "Be brief.", "input": "Hi", "max_output_tokens": 20, "temperature": 0}
    whole = client.responses.create(**asked)
    assert whole.output_text == wanted.text and whole.usage.output_tokens == len(wanted.token_ids)
    assert whole.status == ("incomplete" if wanted.finish_reason == "length" else "completed")
    pieces, kinds, last = [], [], None
    for event in client.responses.create(**asked, stream=True):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            pieces.append(event.delta)
        last = event
    assert "".join(pieces) == wanted.text == last.response.output_text
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == f"response.{whole.status}"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 1


def test_what_was_said_before_comes_with_the_request(client: openai.OpenAI, engine: Outrider) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]},
        {"role": "user", "content": "Again"},
    ]
    messages = [{"role": r, "content": c} for r, c in (("user", "Hi"), ("assistant", "Hello."), ("user", "Again"))]
    found = client.responses.create(model="small", input=items, max_output_tokens=8, temperature=0)
    assert found.output_text == engine.chat(messages, max_new_tokens=8).text


def test_state_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="small", input="Hi", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.create(model="small", input="Hi", background=True)


def test_blocks_open_and_close_in_the_order_of_the_pieces() -> None:
    parsed = Parsed()
    said: list[Piece] = [
        Said("hm", "reasoning"), Said("\n"), CallBegins(0, "weather"), CallArguments(0, "{"), CallArguments(0, "}"),
    ]  # fmt: skip
    for piece in said:
        parsed.add(piece)
    blocks = Blocks(parsed)
    changes = [*blocks.feed(said), *blocks.finish()]
    assert [(one.action, one.block.kind) for one in changes] == [
        ("open", "reasoning"), ("more", "reasoning"), ("close", "reasoning"),
        ("open", "call"), ("more", "call"), ("more", "call"), ("close", "call"),
    ]  # fmt: skip
    assert blocks.blocks[1].text == "{}"
    empty = Blocks(Parsed())
    assert [one.action for one in empty.finish()] == ["open", "close"]
