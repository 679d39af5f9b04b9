"""`/openapi.json`: every route with the schema of its form, from the forms themselves."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from outrider._version import __version__
from outrider.serve.forms.chat import ChatForm
from outrider.serve.forms.completion import CompletionForm
from outrider.serve.forms.messages import CountForm, MessagesForm
from outrider.serve.forms.others import DetokenizeForm, TemplateForm, TokenizeForm
from outrider.serve.forms.responses import ResponsesForm

Schema = dict[str, Any]
FORMS: dict[str, tuple[type[BaseModel], str, tuple[str, ...]]] = {
    "/v1/chat/completions": (ChatForm, "The next message of a conversation", ("id", "object", "choices", "usage")),
    "/v1/completions": (CompletionForm, "Texts continued", ("id", "object", "choices", "usage")),
    "/v1/responses": (ResponsesForm, "An answer, without state", ("id", "object", "status", "output", "usage")),
    "/v1/messages": (MessagesForm, "An answer in Anthropic's form", ("id", "type", "content", "stop_reason", "usage")),
    "/v1/messages/count_tokens": (CountForm, "Tokens of a conversation", ("input_tokens",)),
    "/tokenize": (TokenizeForm, "Token ids of a text or a conversation", ("tokens", "count")),
    "/detokenize": (DetokenizeForm, "The text of token ids", ("prompt",)),
    "/apply-template": (TemplateForm, "A conversation as the model reads it", ("prompt",)),
}
LOOKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "/v1/models": ("The models", ("object", "data")),
    "/v1/models/{name}": ("One model", ("id", "object")),
    "/health": ("Whether the server lives", ("status",)),
    "/ready": ("Whether it takes requests", ("status",)),
    "/version": ("Its version", ("version",)),
    "/props": ("What it is and does by default", ("total_slots", "chat_template")),
    "/slots": ("What runs", ()),
    "/metrics": ("Figures for Prometheus", ()),
    "/v1/outrider/trace/{id}": ("Every step of a request", ("trace", "pieces", "origins")),
    "/v1/outrider/fleet": ("What the server does for everybody now", ("info", "stats", "sequences")),
    "/v1/outrider/corpora": ("Corpora that drafts are copied from", ("data",)),
}
LINKS = (  # what one answer says that another request can use
    ("/tokenize", "text", {"operationId": "detokenize", "requestBody": {"tokens": "$response.body#/tokens"}}),
    ("/v1/models", "model", {"operationId": "v1_models_name", "parameters": {"name": "$response.body#/data/0/id"}}),
    ("/v1/completions", "trace",
     {"operationId": "v1_outrider_trace_id", "parameters": {"id": "$response.body#/id"}}),
    ("/apply-template", "tokens", {"operationId": "tokenize", "requestBody": {"prompt": "$response.body#/prompt"}}),
)  # fmt: skip
FAULTS = {400: "A fault in the request", 401: "No key, or a wrong one", 404: "No such model or route",
          405: "Another method", 408: "Too slow", 413: "Too large", 415: "No JSON", 429: "Full: ask again later",
          431: "Header too large", 503: "Loading, or about to end"}  # fmt: skip


def document(model: str) -> Schema:
    made = [(form, "validation") for form, _, _ in FORMS.values()]
    _, defined = models_json_schema(made, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    schemas = dict(defined.get("$defs", {}))
    for _, (form, _, _) in FORMS.items():
        schemas[form.__name__]["properties"]["model"] |= {"examples": [model]}
    schemas["Fault"] = {
        "type": "object", "required": ["error"],
        "properties": {"error": {"type": "object", "required": ["message", "type"]}},
    }  # fmt: skip
    paths: Schema = {}
    for path, (form, summary, required) in FORMS.items():
        body = {"required": True, "content": {"application/json": {"schema": _ref(form.__name__)}}}
        streams = "stream" in form.model_fields
        paths[path] = {"post": {**_route(path, summary, required, streams), "requestBody": body}}
    for path, (summary, required) in LOOKS.items():
        kind = "array" if path == "/slots" else "object"
        paths[path] = {"get": _route(path, summary, required, kind=kind, text=path == "/metrics")}
        if "{" in path:
            name = path.partition("{")[2].partition("}")[0]
            paths[path]["get"]["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            ]
    for path, name, link in LINKS:
        (route,) = paths[path].values()
        route["responses"]["200"].setdefault("links", {})[name] = link
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Outrider", "version": __version__, "description": "A causal language model, sped up."},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": keys},
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _route(
    path: str, summary: str, required: tuple[str, ...], streams: bool = False, kind: str = "object", text: bool = False
) -> Schema:
    schema: Schema = {"type": kind, **({"required": list(required)} if required else {})}
    content: Schema = (
        {"text/plain": {"schema": {"type": "string"}}} if text else {"application/json": {"schema": schema}}
    )
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    fault = {"application/json": {"schema": _ref("Fault")}}
    answers: Schema = {"200": {"description": summary, "content": content}}
    answers |= {str(code): {"description": what, "content": fault} for code, what in FAULTS.items()}
    if path == "/ready":
        answers["503"] = {"description": FAULTS[503], "content": {"application/json": {"schema": {"type": "object"}}}}
    return {"summary": summary, "operationId": path.strip("/").replace("/", "_").replace("{", "").replace("}", ""),
            "responses": answers}  # fmt: skip
