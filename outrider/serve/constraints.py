"""How an answer must look: what requests ask for in several dialects, as the parameters that the engine takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.constrain.tools import tool_tag
from outrider.core.errors import InputError
from outrider.serve.forms.sampling import Sampling

BESIDE = ("disable_", "whitespace_", "backend")  # of vLLM's field: how it is done there
ANY_JSON = '{"type": "object"}'


def form_of_text(
    form: Sampling, tools: Sequence[Mapping[str, Any]] = (), forced: str | None = None, parallel: bool = True
) -> dict[str, Any]:
    """Parameters; empty where the answer may look as it likes. What cannot be kept to is refused, never ignored."""
    found = [made for made in _asked(form) if made]
    if forced is not None:
        choice: str = "required" if forced == "*" else forced
        found.append({"structural_tag": tool_tag(tools, choice, parallel=parallel)})
    if len(found) > 1:
        raise InputError("the answer's form is asked for twice; give one of response_format, structured_outputs, "
                         "grammar, guided_* and a forced tool_choice")  # fmt: skip
    return found[0] if found else {}


def _asked(form: Sampling) -> list[dict[str, Any]]:
    return [
        _response_format(form.response_format or {}),
        _structured(form.structured_outputs or {}),
        {} if form.guided_json is None else {"json_schema": _schema(form.guided_json)},
        {} if form.guided_regex is None else {"regex": form.guided_regex},
        {} if form.guided_choice is None else {"choices": tuple(form.guided_choice)},
        {} if form.guided_grammar is None else {"grammar": form.guided_grammar},
        {} if form.grammar is None else {"grammar": form.grammar},
        {} if form.regex is None else {"regex": form.regex},
        {} if form.ebnf is None else {"grammar": form.ebnf},
        {} if form.json_schema is None else {"json_schema": _schema(form.json_schema)},
    ]


def _response_format(given: Mapping[str, Any]) -> dict[str, Any]:
    kind = given.get("type")
    if not given or kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": _schema(given["schema"]) if isinstance(given.get("schema"), dict) else ANY_JSON}
    if kind == "json_schema":
        inner = given.get("json_schema", given)
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if not isinstance(schema, dict | bool):
            raise InputError("response_format: give the schema as json_schema.schema")
        return {"json_schema": _schema(schema)}
    if kind == "structural_tag":
        return {"structural_tag": json.dumps(dict(given))}
    if kind == "grammar" and isinstance(given.get("grammar"), str):
        return {"grammar": given["grammar"]}
    raise InputError(f"response_format: type {str(kind)[:40]!r} is not known; use text, json_object or json_schema")


def _structured(given: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's field."""
    asked = {name: value for name, value in given.items() if value is not None and value is not False}
    asked = {name: value for name, value in asked.items() if not name.startswith(BESIDE)}
    if not asked:
        return {}
    if len(asked) > 1:
        raise InputError(f"structured_outputs: give one of {', '.join(sorted(asked))[:200]}")
    ((name, value),) = asked.items()
    if name == "json":
        return {"json_schema": _schema(value)}
    if name == "json_object":
        return {"json_schema": ANY_JSON}
    if name == "choice" and isinstance(value, list) and all(isinstance(one, str) for one in value):
        return {"choices": tuple(value)}
    if name in ("regex", "grammar") and isinstance(value, str):
        return {name: value}
    if name == "structural_tag":
        return {"structural_tag": value if isinstance(value, str) else json.dumps(value)}
    raise InputError(f"structured_outputs: {name[:40]} is not known here, or not of the right type")


def _schema(given: object) -> str:
    if isinstance(given, str):
        return given
    return json.dumps(given)
