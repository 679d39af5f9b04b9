"""The form of `/v1/messages`: Anthropic's, and the fields of our own beside them."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field

from outrider.core.errors import InputError
from outrider.serve.forms.base import Form, Part
from outrider.serve.forms.sampling import Count, Sampling


class Turn(Part):
    role: Annotated[str, Field(pattern="^(user|assistant|system)$")]
    content: str | list[dict[str, Any]]


class AnthropicTool(Part):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class Conversing(Form):
    """What counting tokens and answering both read."""

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def plain(self) -> list[dict[str, Any]]:
        """As chat templates read it."""
        out: list[dict[str, Any]] = []
        if self.system:
            out.append({"role": "system", "content": _text(self.system, "system")})
        for place, turn in enumerate(self.messages):
            if isinstance(turn.content, str):
                out.append({"role": turn.role, "content": turn.content})
            else:
                out += _turns(turn.role, turn.content, f"messages.{place}")
        return out

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        if self.tool_choice is not None and self.tool_choice.get("type") == "none":
            return []
        return [
            {"type": "function", "function": {"name": tool.name, "description": tool.description or "",
                                              "parameters": tool.input_schema or {"type": "object"}}}
            for tool in self.tools or ()
        ]  # fmt: skip

    @property
    def forced_tool(self) -> str | None:
        choice = self.tool_choice or {"type": "auto"}
        kind, name = choice.get("type"), choice.get("name")
        if kind in ("auto", "none"):
            return None
        if kind == "any" and self.tools:
            return "*"
        if kind == "tool" and name in [tool.name for tool in self.tools or ()]:
            return str(name)
        raise InputError("tool_choice: its type is auto, any, none, or tool with the name of one of the tools")

    @property
    def template(self) -> dict[str, Any]:
        """Qwen's templates switch reasoning by this name."""
        more = dict(self.chat_template_kwargs or {})
        if self.thinking is not None:
            more.setdefault("enable_thinking", self.thinking.get("type") != "disabled")
        return more


class MessagesForm(Conversing, Sampling):
    max_tokens: Count
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    stop_sequences: Annotated[list[str], Field(max_length=64)] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


class CountForm(Conversing):
    """What `/v1/messages/count_tokens` reads."""


def _turns(role: str, blocks: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Results of tools stand before the text of their turn, as messages apart."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    out: list[dict[str, Any]] = []
    for place, block in enumerate(blocks):
        kind, here = block.get("type"), f"{name}.content.{place}"
        if kind == "text":
            texts.append(_text([block], here))
        elif kind == "thinking":
            reasoning.append(str(block.get("thinking", "")))
        elif kind == "redacted_thinking":
            continue
        elif kind == "tool_use" and role == "assistant" and isinstance(block.get("name"), str):
            function = {"name": block["name"], "arguments": block.get("input") or {}}
            calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            said = block.get("content") or ""
            if not isinstance(said, str | list):
                said = json.dumps(said)
            out.append(
                {"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": _text(said, here)}
            )
        else:
            raise InputError(f"{here} is of type {str(kind)[:40]!r}, which is not read here; leave it out")
    if texts or calls or not out:
        message: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
        if calls:
            message["tool_calls"] = calls
        if reasoning:
            message["reasoning_content"] = "\n".join(reasoning)
        out.append(message)
    return out


def _text(content: str | list[Any], name: str) -> str:
    if isinstance(content, str):
        return content
    texts = [
        block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None for block in content
    ]
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"{name}: only text is read; leave the other blocks out")
    return "\n".join(str(text) for text in texts)
