"""What may be handed in as a prompt: every good form is read, every bad one is an `InputError` that names it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from outrider.core.errors import InputError
from outrider.core.inputs import checked_messages, checked_text, items_of, prompt_list, token_ids

TEXT = {"type": "text", "text": "Hi"}


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        (("a",), ["a"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([np.int64(1), 2], [[1, 2]]),
        (np.array([1, 2]), [[1, 2]]),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([{"role": "user"}], [[{"role": "user"}]]),
        ([[{"role": "user"}], "b"], [[{"role": "user"}], "b"]),
        ((text for text in "ab"), ["a", "b"]),
    ],
)
def test_one_prompt_or_several_are_told_apart(given: Any, prompts: list[Any]) -> None:
    assert prompt_list(given) == prompts


@pytest.mark.parametrize("given", [None, 5, 2.5, {"role": "user"}, object(), np.array(3)])
def test_what_is_no_prompt_is_named(given: Any) -> None:
    for read in (prompt_list, items_of):
        with pytest.raises(InputError, match="cannot use .* as a prompt; give a text, token ids or") as caught:
            read(given)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", [b"Hi", bytearray(b"Hi"), memoryview(b"Hi")])
def test_bytes_are_no_token_ids(given: Any) -> None:
    for read in (prompt_list, items_of):
        with pytest.raises(InputError, match="bytes; decode them"):
            read(given)


def test_token_ids_are_whole_numbers_and_never_rounded() -> None:
    ids = token_ids([1, np.int64(2), torch.tensor(3)])
    assert ids == [1, 2, 3] and {type(i) for i in ids} == {int}
    for bad in (1.5, "1", True, None, [1], b"1", np.float32(1), torch.tensor(1.0), torch.tensor([1])):
        with pytest.raises(InputError, match="item 2 of the prompt is .* no token id"):
            token_ids([7, bad])


def test_half_a_surrogate_pair_is_named_with_a_remedy_that_works() -> None:
    broken = "a\U0001f600b\ud83d"
    with pytest.raises(InputError, match=r"the text has half a surrogate pair \('\\ud83d'\) at character 4") as caught:
        checked_text(broken, "the text")
    remedy = str(caught.value).split("mend it: ")[1]
    mended = eval(remedy, {"text": broken})
    assert checked_text(mended, "") == mended == "a\U0001f600b\ufffd"


def test_content_of_text_parts_is_their_text_and_other_keys_stay() -> None:
    messages = [
        {"role": "system", "content": "Be brief.", "name": "x"},
        {"role": "user", "content": [TEXT, {"type": "text", "text": "there"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]},
    ]
    assert checked_messages(messages) == [messages[0], {"role": "user", "content": "Hi\nthere"}, messages[2]]
    assert isinstance(messages[1]["content"], list), "the caller's messages are as before"


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "there are no chat messages"),
        (None, "cannot use None as chat messages"),
        (5, "cannot use 5 as chat messages"),
        (b"Hi", "cannot use b'Hi' as chat messages"),
        ({"role": "user", "content": "Hi"}, "as chat messages; give a list such as"),
        (["Hi"], "chat message 1 is 'Hi'"),
        ([{"role": "user", "content": "Hi"}, None], "chat message 2 is None"),
        ([{"content": "Hi"}], "chat message 1 has no role"),
        ([{"role": 1, "content": "Hi"}], "chat message 1 has no role"),
        ([{"role": "user"}], "chat message 1 has no content"),
        ([{"role": "user", "content": None}], "chat message 1 has no content"),
        ([{"role": "user", "content": 5}], "chat message 1 has 5 as content"),
        ([{"role": "user", "content": b"Hi"}], "chat message 1 has b'Hi' as content"),
        ([{"role": "user", "content": []}], "chat message 1 has .* as content"),
        ([{"role": "user", "content": "\ud800"}], "chat message 1 has half a surrogate"),
        (
            [{"role": "user", "content": [TEXT, {"type": "image_url"}]}],
            "part 2 of chat message 1 is of type 'image_url'",
        ),
        ([{"role": "user", "content": ["Hi"]}], "part 1 of chat message 1 is 'Hi'"),
        ([{"role": "user", "content": [{"text": "Hi"}]}], "part 1 of chat message 1 is .* write it as"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "part 1 of chat message 1 is .* write it as"),
        ([{"role": "user", "content": [{"type": "text", "text": "\udc00"}]}], "part 1 of chat message 1 has half"),
    ],
    ids=repr,
)
def test_bad_messages_are_named_by_their_number_and_part(messages: Any, named: str) -> None:
    with pytest.raises(InputError, match=named) as caught:
        checked_messages(messages)
    assert "\n" not in str(caught.value) and str(caught.value).isprintable()
