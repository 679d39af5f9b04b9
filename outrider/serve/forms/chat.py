"""The form of `/v1/chat/completions`: OpenAI's, and what vLLM and llama.cpp take besides."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from outrider.core.errors import InputError
from outrider.serve.forms.base import Part
from outrider.serve.forms.sampling import MAX_TOP, Count, Sampling


class ChatMessage(Part):
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates read it: a developer is a system, arguments of calls are objects, nothing is null."""
        out = {name: value for name, value in self.model_dump(exclude_none=True).items() if value is not None}
        out["role"] = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        if self.role == "tool" and isinstance(self.content, list):
            out["content"] = "\n".join(str(part.get("text", "")) for part in self.content)
        if self.tool_calls:
            out["tool_calls"] = [_call(call) for call in self.tool_calls]
            out.setdefault("content", "")
        return out


class Tool(Part):
    type: Literal["function"]
    function: dict[str, Any]


class ChatForm(Sampling):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    echo: bool | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise InputError("top_logprobs is given without logprobs; set logprobs to true")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Tools that the model hears of: none where none may be called."""
        if self.tool_choice == "none" or not self.tools:
            return []
        for tool in self.tools:
            if not isinstance(tool.function.get("name"), str):
                raise InputError("tools: every function needs a name")
        return [tool.model_dump() for tool in self.tools]

    @property
    def forced_tool(self) -> str | None:
        """What `tool_choice` demands: "*" for any, a name for that one; None: the model may choose."""
        choice = self.tool_choice
        if choice is None or choice in ("none", "auto"):
            return None
        if not self.tools:
            raise InputError("tool_choice is given without tools")
        if choice == "required":
            return "*"
        function = choice.get("function") if isinstance(choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        known = [tool.function.get("name") for tool in self.tools]
        if not isinstance(name, str) or name not in known:
            raise InputError(f"tool_choice: use none, auto, required or one of the tools ({str(known)[:200]})")
        return name


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InputError('tool_calls of a message: write {"type": "function", "function": {"name": ..., ...}}')
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            raise InputError(f"the arguments of the call of {function['name']!r} are no JSON") from None
    return {**call, "function": {**function, "arguments": arguments}}
