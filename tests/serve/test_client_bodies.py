"""Bodies as well-known clients send them: each is answered, or refused in one line that names the field.

`client_bodies.json` was recorded from the clients themselves. Only the bodies of Open WebUI, of vLLM's benchmarks, of aiperf,
of our own page, and of clients without a version were written by hand, after their sources. refused: the field that is
named. ignored: what the header of the answer names. missing: there is no such route.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from layerskip_models import DEMO_PATH
from running_server import RunningServer, ask, refusal, running_server
from selfspec import SelfSpecGenerator
from selfspec.serve.api_requests import ChatRequest, CompletionRequest, Message, StreamOptions, TextPart
from selfspec.serve.bodies import Strict

BODIES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("client_bodies.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(SelfSpecGenerator.from_pretrained(DEMO_PATH)) as running:
        yield running


@pytest.mark.parametrize("sent", BODIES, ids=lambda sent: sent["client"])
def test_it_is_answered_or_refused_by_name(server: RunningServer, sent: dict[str, Any]) -> None:
    if "refused" in sent:
        error = refusal(server, sent["path"], sent["body"])
        assert error["param"] == sent["refused"]
        assert sent["refused"].split(".")[-1] in error["message"]
        return
    status, answer, headers = ask(server, "POST", sent["path"], sent["body"])
    if "missing" in sent:
        message = json.loads(answer)["error"]["message"]
        assert status == 404 and sent["path"] in message and "POST /v1/chat/completions" in message
        return
    assert status == 200, answer
    assert (headers["x-selfspec-ignored"] or "").split(", ") == sent.get("ignored", [""])
    if sent["body"].get("stream"):
        assert headers["content-type"].startswith("text/event-stream")
        assert answer.endswith(b"data: [DONE]\n\n")
        assert b'"error"' not in answer
    else:
        assert json.loads(answer)


def test_two_turns_with_our_own_answer(server: RunningServer) -> None:
    """As `model_dump()` gives it: with every field, most of them null."""
    talk: list[Any] = [{"role": "user", "content": "Tom has 3 apples."}]
    with server.client() as client:
        for _ in range(2):
            answer = client.chat.completions.create(model="demo", messages=talk, max_tokens=4)
            dumped = {"annotations": [], "audio": None, **answer.choices[0].message.model_dump()}
            assert {"refusal", "tool_calls", "function_call"} <= dumped.keys()
            talk += [dumped, {"role": "user", "content": "And Anna?"}]


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, Message, StreamOptions, TextPart])
def test_the_page_tells_of_every_field(kind: type[Strict]) -> None:
    page = Path(__file__).parents[2].joinpath("docs", "serving.md").read_text(encoding="utf-8")
    fields = page[page.index("## Fields of a request") : page.index("## Tokens without a text")]
    known = {*kind.model_fields, *kind._harmless, *kind._neutral, *kind._reasons}
    missing = {name for name in known if f"`{name}`" not in fields and f"`{name}:" not in fields}
    assert missing <= {"model", "role", "content", "text", "type", "prompt", "name"}
