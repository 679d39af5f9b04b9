"""The form of `/v1/responses`, without state: what was said before comes with the request."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from outrider.core.errors import InputError
from outrider.serve.forms.chat import ChatMessage
from outrider.serve.forms.sampling import MAX_TOP, Count, Sampling


class ResponsesForm(Sampling):
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None  # nothing is kept in any case
    truncation: str | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_output_tokens or self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return self.top_logprobs

    def check(self) -> None:
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise InputError(f"{name}: this server keeps no conversations; send what was said before as input")
        if self.background:
            raise InputError("background: answers are not kept; leave it out and stream")
        if self.n not in (None, 1):
            raise InputError("n: a response has one text; leave it out")
        if self.truncation not in (None, "disabled"):
            raise InputError("truncation: only disabled is done here; shorten the input")

    def plain(self) -> list[dict[str, Any]]:
        """As chat templates read it."""
        out: list[dict[str, Any]] = []
        if self.instructions:
            out.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*out, {"role": "user", "content": self.input}]
        for place, item in enumerate(self.input):
            out += _messages(item, f"input.{place}", out)
        return out

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        if self.tool_choice == "none":
            return []
        out = []
        for tool in self.tools or ():
            if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
                raise InputError("tools: only functions with a name are called here; leave the others out")
            function = {
                name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None
            }
            out.append({"type": "function", "function": function})
        return out

    @property
    def forced_tool(self) -> str | None:
        choice = self.tool_choice
        if choice in (None, "auto", "none"):
            return None
        names = [tool["function"]["name"] for tool in self.offered_tools]
        if choice == "required" and names:
            return "*"
        name = choice.get("name") if isinstance(choice, dict) else None
        if name in names:
            return str(name)
        raise InputError("tool_choice: use none, auto, required or one of the functions")

    @property
    def template(self) -> dict[str, Any]:
        more = dict(self.chat_template_kwargs or {})
        if self.reasoning is not None and self.reasoning.get("effort") is not None:
            more.setdefault("reasoning_effort", self.reasoning["effort"])
        return more


def _messages(item: dict[str, Any], name: str, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kind = item.get("type") or "message"
    if kind == "message":
        content = item.get("content")
        if isinstance(content, list):
            texts = [part.get("text") if isinstance(part, dict) else None for part in content]
            if not all(isinstance(text, str) for text in texts):
                raise InputError(f"{name}: only text is read; leave the other parts out")
            content = "\n".join(str(text) for text in texts)
        if not isinstance(content, str) or not isinstance(item.get("role"), str):
            raise InputError(f"{name}: a message needs a role and a text as content")
        return [ChatMessage(role=item["role"], content=content).plain()]
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
        if before and before[-1].get("tool_calls"):  # calls side by side are one message
            before[-1]["tool_calls"] += ChatMessage(role="assistant", tool_calls=[call]).plain()["tool_calls"]
            return []
        return [ChatMessage(role="assistant", tool_calls=[call]).plain()]
    if kind == "function_call_output":
        return [{"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": str(item.get("output", ""))}]
    if kind == "reasoning":
        return []
    raise InputError(f"{name} is of type {str(kind)[:40]!r}, which is not read here; leave it out")
