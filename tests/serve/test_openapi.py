"""Requests that schemathesis makes of the server's own description: no answer is a failure, or has a status not described."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import status_code_conformance

from running_server import running_server
from selfspec import SelfSpecGenerator


@pytest.mark.parametrize("mode", GenerationMode)
def test_every_answer_is_described(offline: SelfSpecGenerator, mode: GenerationMode) -> None:
    """mode: bodies that follow the description, and those that do not. An error of theirs names the field."""
    statuses: set[int] = set()

    def answers_as_described(case: schemathesis.Case) -> None:
        answer = case.call()
        statuses.add(answer.status_code)
        case.validate_response(answer, checks=[not_a_server_error, status_code_conformance])
        if answer.status_code == 400 and isinstance(case.body, dict):
            assert answer.json()["error"]["param"] or not case.body or "" in case.body

    follows = mode is GenerationMode.POSITIVE
    with running_server(offline, policy="ar", max_context=64, max_tokens=8, default_chat_tokens=4) as server:
        described = schemathesis.openapi.from_url(f"{server.base}/openapi.json")
        for operation in (found.ok() for found in described.get_all_operations()):
            if follows or operation.body:
                every = given(case=operation.as_strategy(generation_mode=mode))(answers_as_described)
                settings(max_examples=12)(every)()
    assert statuses >= ({200, 400, 404} if follows else {400})
