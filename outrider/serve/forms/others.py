"""The forms of the smaller routes: tokens and templates."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from outrider.serve.forms.base import Form
from outrider.serve.forms.chat import ChatMessage, Tool
from outrider.serve.forms.sampling import Token


class TemplateForm(Form):
    model: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeForm(Form):
    """vLLM's (`prompt` or `messages`) and llama.cpp's (`content`)."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None


class DetokenizeForm(Form):
    model: str | None = None
    tokens: list[Token]
