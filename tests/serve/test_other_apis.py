"""OpenAI's Responses API and Anthropic's Messages API, asked by the clients of both: what they say is a chat's answer."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from running_server import RunningServer, ask, post, refusal, running_server, threads_of
from scripted_model import scripted_generator
from selfspec.serve import app as app_module
from selfspec.serve.api_responses import PartsAnswer
from tool_templates import GOLDEN, SCRIPTS, TAGS, TOOLS, asked

SUM: Any = "Tom has 3 apples and buys 4. How many has he?"
FUNCTIONS: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
CLAUDES: list[Any] = [{"name": one["name"], "input_schema": one.get("parameters", {})} for one in FUNCTIONS]
BODIES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("other_bodies.json").read_text(encoding="utf-8"))
Found = tuple[str, list[tuple[str, Any]], str]
"""Text, calls, and why it ended."""


@pytest.fixture(scope="module")
def scripted() -> Iterator[RunningServer]:
    with running_server(scripted_generator(SCRIPTS, TAGS), chat_template=None, api_key="key") as running:
        yield running


def claude(server: RunningServer, key: str = "key") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.base, api_key=key, max_retries=0, timeout=60)


def by_responses(server: RunningServer, given: Any, **options: Any) -> tuple[Found, list[Any]]:
    options = {"model": "demo", "input": given, "temperature": 0, **options}
    with server.client("key") as client:
        events: list[Any] = [*client.responses.create(**options, stream=True)]
        whole: Any = client.responses.create(**options)
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert deltas == whole.output_text and done == events[-1].response.output
    called: list[Any] = [[one for one in items if one.type == "function_call"] for items in (whole.output, done)]
    calls = [[(one.name, json.loads(one.arguments)) for one in each] for each in called]
    assert calls[0] == calls[1] and events[-1].type == f"response.{whole.status}"
    told = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
    assert told == [one.arguments for one in called[1]]
    return (whole.output_text, calls[0], whole.status), whole.output


def by_messages(server: RunningServer, given: Any, **options: Any) -> tuple[Found, list[Any]]:
    talk = asked(given) if isinstance(given, str) else given
    options = {"model": "demo", "messages": talk, "max_tokens": 200, "extra_body": {"temperature": 0}, **options}
    with claude(server) as client, client.messages.stream(**options) as stream:
        found: list[Any] = [stream.get_final_message(), client.messages.create(**options)]
    texts = ["".join(block.text for block in one.content if block.type == "text") for one in found]
    calls = [[(block.name, block.input) for block in one.content if block.type == "tool_use"] for one in found]
    ends = [(one.stop_reason, one.stop_sequence) for one in found]
    assert texts[0] == texts[1] and calls[0] == calls[1] and ends[0] == ends[1]
    return (texts[0], calls[0], " ".join(filter(None, ends[0]))), found[1].content


def test_all_apis_have_one_text(server: RunningServer, client: openai.OpenAI) -> None:
    talk: Any = [{"role": "system", "content": "Be brief."}, *asked(SUM)]
    chat = client.chat.completions.create(model="demo", messages=talk, temperature=0, max_tokens=30)
    text, used = str(chat.choices[0].message.content), chat.usage
    for given in (SUM, [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": SUM}]}]):
        found, _ = by_responses(server, given, instructions="Be brief.", max_output_tokens=30)
        assert found == (text, [], "incomplete")
    parts: Any = [{"type": "text", "text": SUM, "cache_control": {"type": "ephemeral"}}]
    told: Any = {"system": "Be brief.", "messages": [{"role": "user", "content": parts}]}
    assert by_messages(server, SUM, system="Be brief.", max_tokens=30)[0] == (text, [], "max_tokens")
    stop = text[10:14]
    cut = by_messages(server, told["messages"], system="Be brief.", stop_sequences=["no such", stop])[0]
    assert cut == (text[: text.index(stop)], [], f"stop_sequence {stop}")
    assert used and post(server, "/v1/messages/count_tokens", told)[1] == {"input_tokens": used.prompt_tokens}
    message = post(server, "/v1/messages", {**told, "max_tokens": 1})[1]
    body = {
        "input": SUM,
        "max_output_tokens": 4,
        "top_logprobs": 1,
        "metadata": {"a": "b"},
        "instructions": "Be brief.",
    }
    answer: Any = Response.model_validate_json(ask(server, "POST", "/v1/responses", body)[1])
    assert len(answer.output[0].content[0].logprobs) == 4 and answer.metadata == {"a": "b"}
    assert (message["usage"]["input_tokens"], answer.usage.input_tokens) == 2 * (used.prompt_tokens,)


@pytest.mark.parametrize("key", ["key: two", "key: text behind", "key: half", "key: broken"])
def test_calls_and_their_results(scripted: RunningServer, key: str) -> None:
    """A second turn has what the first one answered, as the client holds it. `test_tool_calls` reads the other answers."""
    content, calls = GOLDEN[key]
    found, items = by_responses(scripted, key, tools=FUNCTIONS)
    assert found == (content or "", calls, "completed")
    found, blocks = by_messages(scripted, key, tools=CLAUDES)
    assert found == (content or "", calls, "tool_use" if calls else "end_turn")
    ids = [one.call_id for one in items if one.type == "function_call"]
    told: Any = [{"type": "function_call_output", "call_id": name, "output": "x"} for name in ids]
    ids = [one.id for one in blocks if one.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": name, "content": "x"} for name in ids]
    if calls:
        assert by_responses(scripted, [*asked(key), *items, *told], tools=FUNCTIONS)[0][0] == SCRIPTS["key: told"]
        talk = [*asked(key), {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
        assert by_messages(scripted, talk, tools=CLAUDES)[0][0] == SCRIPTS["key: told"]


def test_a_choice_of_tools(scripted: RunningServer) -> None:
    now = {"type": "function", "name": "now"}
    for choice in (now, {"type": "allowed_tools", "mode": "required", "tools": [now]}):
        assert by_responses(scripted, "key: plain", tools=FUNCTIONS, tool_choice=choice)[0][1] == [("now", {})]
    for given, called in (
        ({"type": "tool", "name": "now"}, ["now"]), ({"type": "none"}, []),
        ({"type": "auto", "disable_parallel_tool_use": True}, ["weather"]),
    ):  # fmt: skip
        (_, calls, _), _ = by_messages(scripted, "key: two", tools=CLAUDES, tool_choice=given)
        assert [name for name, _ in calls] == called


def test_what_follows_a_schema(server: RunningServer, client: openai.OpenAI) -> None:
    class Count(BaseModel):
        right: bool

    options: Any = {"model": "demo", "temperature": 0, "max_output_tokens": 60}
    parsed = client.responses.parse(input=SUM, text_format=Count, **options)
    assert isinstance(parsed.output_parsed, Count)
    again: Any = [*asked(SUM), *parsed.output, *asked("And Anna?")]
    assert client.responses.create(input=again, **options).output_text
    with claude(server) as other:
        options = {"max_tokens": 60, "extra_body": {"temperature": 0}, "messages": asked(SUM)}
        assert other.messages.parse(model="demo", output_format=Count, **options).parsed_output == parsed.output_parsed


def test_errors_are_those_of_the_clients(scripted: RunningServer) -> None:
    for key, model, kind in (("x", "demo", anthropic.AuthenticationError), ("key", "x", anthropic.NotFoundError)):
        with claude(scripted, key) as client, pytest.raises(kind) as caught:
            client.messages.create(model=model, max_tokens=1, messages=asked("key: one"))
        assert caught.value.type in ("authentication_error", "not_found_error")
    body = {"max_tokens": 1, "messages": asked("key: one")}
    assert [post(scripted, "/v1/messages", body, **{"x-api-key": key})[0] for key in ("key", "x")] == [200, 401]


def test_a_long_answer_is_not_written_on_the_event_loop(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last events repeat all log-probabilities, and the first ones the request's fields."""
    written = threads_of(monkeypatch, PartsAnswer, "_event")
    body = {"input": "x", "max_output_tokens": 1, "stream": True}
    for extra, in_loop in (
        ({}, (True, True)),
        ({"top_logprobs": 1}, (True, False)),
        ({"metadata": {"a": "x" * 140_000}}, (False, False)),
    ):
        written.clear()
        assert ask(server, "POST", "/v1/responses", {**body, **extra})[0] == 200
        assert (written[0] is server.thread, written[-1] is server.thread) == in_loop


def test_a_stream_that_waits_or_fails_says_so(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(PartsAnswer, "last_chunk", lambda *given: 1 / 0)
    monkeypatch.setattr(app_module, "PING_SECONDS", 0)
    for path, body, ping, failed in (
        ("/v1/messages", {"messages": asked("x"), "max_tokens": 60}, b"event: ping\ndata: {", ("error", "api_error")),
        ("/v1/responses", {"input": "x", "max_output_tokens": 60}, b": waiting", ("response.failed", "server_error")),
    ):
        with caplog.at_level(logging.CRITICAL):
            raw = ask(server, "POST", path, {**body, "stream": True})[1]
        last = json.loads(raw.split(b"data: ")[-1])
        error = last.get("error") or last["response"]["error"]
        assert ping in raw and (last["type"], error.get("type") or error["code"]) == failed


@pytest.mark.parametrize("sent", BODIES, ids=lambda sent: sent["client"])
def test_what_clients_send(scripted: RunningServer, sent: dict[str, Any]) -> None:
    """First turns were recorded, with shorter texts. refused: the field that is named. says: a part of the answer."""
    path, body, key = sent["path"], sent["body"], {"Authorization": "Bearer key"}
    if "refused" in sent:
        error = refusal(scripted, path, body, **key)
        assert error["param"] == sent["refused"] and sent["says"] in error["message"]
        return
    status, answer, headers = ask(scripted, "POST", path, body, **key)
    assert status == 200 and sent["says"].encode() in answer, answer
    assert headers["x-selfspec-ignored"] == sent["ignored"]
