"""Tools that a model may call, as a structural tag: what a call looks like, and whether there has to be one.

Each call is `begin`, the tool's name and its arguments as JSON of the tool's schema, `end`: the form of Hermes and Qwen
(`<tool_call>{"name": ..., "arguments": ...}</tool_call>`), which most open models were taught.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outrider.core.errors import InputError, did_you_mean

Choice = Literal["auto", "none", "required"] | Mapping[str, Any] | str


@dataclass(frozen=True, slots=True)
class CallForm:
    """What stands around a call: begin + name + between + arguments + close."""

    trigger: str
    begin: str
    between: str
    close: str


HERMES = CallForm("<tool_call>", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")


def tool_tag(
    tools: Sequence[Mapping[str, Any]], choice: Choice = "auto", *, parallel: bool = True, form: CallForm = HERMES
) -> str:
    """The structural tag, for `structural_tag=`; empty where nothing is asked for (no tools, or "none").

    `tools` and `choice` are as in the OpenAI chat API: {"type": "function", "function": {"name", "parameters"}}, and
    a choice is "auto" (text, and calls where the model begins one), "required" (calls only), "none", or
    {"type": "function", "function": {"name": ...}} (this call, once); a plain name means the same. `parallel`: whether
    there may be several calls.
    """
    functions = [_function(number, tool) for number, tool in enumerate(tools, 1)]
    if choice == "none" or (not functions and choice == "auto"):
        return ""
    if not functions:
        raise InputError(f"tool_choice is {choice!r}, but there are no tools; give at least one")
    named = _named(choice)
    if named:
        chosen = [function for function in functions if function["name"] == named]
        if not chosen:
            known = [str(function["name"]) for function in functions]
            raise InputError(
                f"tool_choice names {named!r}, which is no tool; {did_you_mean(named, known)}known: {', '.join(known)}"
            )
        return json.dumps({"type": "structural_tag", "format": _tag(chosen[0], form)})
    tags = [_tag(function, form) for function in functions]
    if choice == "auto":
        inner = {"type": "triggered_tags", "triggers": [form.trigger], "tags": tags, "at_least_one": False,
                 "stop_after_first": not parallel}  # fmt: skip
    else:
        inner = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True,
                 "stop_after_first": not parallel}  # fmt: skip
    return json.dumps({"type": "structural_tag", "format": inner})


def read_calls(text: str, form: CallForm = HERMES) -> tuple[str, list[tuple[str, str]]]:
    """Text in front of calls, and of each its tool's name and its arguments as JSON."""
    before, *parts = text.split(form.begin)
    calls = []
    for part in parts:
        name, found, rest = part.partition(form.between)
        if found:
            calls.append((name, rest.partition(form.close)[0]))
    return before, calls


def _tag(function: Mapping[str, Any], form: CallForm) -> dict[str, Any]:
    schema = function.get("parameters", {"type": "object", "properties": {}})
    return {
        "type": "tag",
        "begin": f"{form.begin}{function['name']}{form.between}",
        "content": {"type": "json_schema", "json_schema": schema},
        "end": form.close,
    }


def _function(number: int, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise InputError(f"tool {number} has no name; write it as {{'type': 'function', 'function': {{'name': ...}}}}")
    if not isinstance(function.get("parameters", {}), Mapping | bool):
        raise InputError(f"tool {number} ({function['name']}): parameters must be a JSON schema")
    return function


def _named(choice: Choice) -> str:
    if isinstance(choice, str):
        return "" if choice in ("auto", "required", "none") else choice
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise InputError(f"tool_choice is {dict(choice)!r}; use auto, none, required, or name a function")
    return name
