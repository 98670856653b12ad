"""What a refused request is told: in the client's own words, and with what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from layerskip_models import DEMO_PATH
from running_server import RunningServer, ask, refusal, running_server
from selfspec import SelfSpecGenerator

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = "x " * 3000
TALK: list[Any] = [{"role": "user", "content": "How many?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(SelfSpecGenerator.from_pretrained(DEMO_PATH)) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        (TEXT, {"prompt": ["a"] * 33}, "prompt", "prompt: 33 prompts: at most 32 are supported in one request"),
        (TEXT, {"prompt": [[5]] * 33}, "prompt", "prompt: 33 prompts: at most 32 are supported in one request"),
        (TEXT, {"prompt": ["a", "b"], "n": 17}, "n", "2 prompts with n=17: at most 32 texts"),
        (TEXT, {"prompt": ["a", 5]}, "prompt", "the list mixes types"),
        (TEXT, {"prompt": []}, "prompt", "the prompt is empty"),
        (TEXT, {"stop": ["a"] * 17}, "stop", "stop: 17 stop strings: at most 16 are supported"),
        (CHAT, {"stop": 5}, "stop", "stop: give a string or a list of up to 16"),
        (
            TEXT,
            {"prompt": LONG, "max_tokens": 2},
            "prompt",
            "and max_tokens is 2: shorten the prompt or lower max_tokens",
        ),
        (
            CHAT,
            {"max_completion_tokens": 9999},
            "messages",
            "is 9999: shorten the prompt or lower max_completion_tokens",
        ),
        (CHAT, {"max_tokens": 9999}, "messages", "and max_tokens is 9999: shorten the prompt or lower max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages", "and the prompt has 3005: shorten it"),
        (TEXT, {"prompt": 10 * LONG}, "prompt", "the prompt has more than 4096"),
        (TEXT, {"max_new_tokens": 3}, "max_new_tokens", "max_new_tokens is called max_tokens here"),
        (CHAT, {"prompt": "a"}, "prompt", "a chat has no prompt: give messages, or send the prompt to /v1/completions"),
        (TEXT, {"messages": TALK}, "messages", "send them to /v1/chat/completions"),
        (CHAT, {"nonsense": 1}, "nonsense", "nonsense is not supported"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content", "messages.0.content: Field required"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "Field required"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
            "response_format.json_schema.schema: Field required",
        ),
        (CHAT, {"response_format": {"type": "text", "a": 1}}, "response_format.a", "a is not supported"),
    ],
)
def test_in_the_clients_own_words(
    server: RunningServer, path: str, fields: dict[str, Any], param: str, message: str
) -> None:
    own: dict[str, Any] = {"messages": TALK} if path == CHAT else {"prompt": "a"}
    error = refusal(server, path, {"model": "demo", **own, **fields})
    assert error["param"] == param
    assert message in error["message"]
    assert "new_tokens" not in error["message"].replace("max_new_tokens is called", "")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"])
def test_a_body_of_another_type(server: RunningServer, kind: str) -> None:
    status, answer, _ = ask(server, "POST", TEXT, {"model": "demo", "prompt": "a"}, **{"Content-Type": kind})
    assert status == 400
    assert b"send the header 'Content-Type: application/json'" in answer
    for accepted in ("application/json; charset=utf-8", "Application/JSON"):
        body = {"model": "demo", "prompt": "a", "max_tokens": 1}
        assert ask(server, "POST", TEXT, body, **{"Content-Type": accepted})[0] == 200
