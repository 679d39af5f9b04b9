"""Requests made up from the server's schema: none ends in a fault, and every answer is what the schema says."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from outrider.serve import page
from outrider.serve.app import GET, POST
from outrider.serve.openapi import FORMS, LOOKS, document
from tests.serve.conftest import Served

EXAMPLES = 50  # a route
SHORT = {"/v1/responses": "max_output_tokens", "/v1/chat/completions": "max_completion_tokens"}
PATIENT = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True,
    stateful_step_count=4,
)  # fmt: skip


def test_every_route_is_in_the_schema_and_nothing_else() -> None:
    paths = document("small")["paths"]
    asked = (*GET, *page.DATA)  # the page's files are no part of the interface
    assert set(paths) == {path.replace("{name:path}", "{name}") for path in (*POST, *asked)}
    assert set(FORMS) == set(POST) and len(LOOKS) == len(asked)


def checks() -> list[Any]:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    return [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]


def shortened(path: str, body: Any) -> Any:
    """The same request for few tokens, if it asks for a text."""
    if not isinstance(body, dict) or "stream" not in FORMS[path][0].model_fields:
        return body
    return {**body, "max_tokens": 3, **({SHORT[path]: 3} if path in SHORT else {}), "model": "small", "n": 1}


@pytest.mark.slow
@pytest.mark.parametrize("path", [*FORMS, *LOOKS])
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_no_request_of_the_schema_or_beside_it_ends_in_a_fault(served: Served, path: str, mode: str) -> None:
    import schemathesis

    if path in LOOKS and mode == "negative":
        pytest.skip("it has no body that could be wrong")
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    operation = schema[path]["POST" if path in FORMS else "GET"]
    codes: set[int] = set()

    @PATIENT
    @given(operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    def ask(case: Any) -> None:
        if path in FORMS:
            case.body = shortened(path, case.body)
        answer = case.call(timeout=60)
        codes.add(answer.status_code)
        case.validate_response(answer, checks=checks())

    ask()
    assert httpx.get(f"{served.url}/ready").status_code == 200
    assert mode == "positive" or codes & {400, 415}


@pytest.mark.slow
def test_no_chain_of_requests_ends_in_a_fault(served: Served) -> None:
    import schemathesis

    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    machine = schema.as_state_machine()

    class Machine(machine):  # type: ignore[valid-type, misc]
        def before_call(self, case: Any) -> None:
            if case.operation.path in FORMS:
                case.body = shortened(case.operation.path, case.body)

        def validate_response(self, response: Any, case: Any, **_: Any) -> None:
            case.validate_response(response, checks=checks())

    Machine.run(settings=PATIENT)
    assert httpx.get(f"{served.url}/ready").status_code == 200
