"""Requests that are sent to hurt: large and malformed bodies, half a request, other hosts, policies, and more than fits."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from running_server import RunningServer, asking, post, refusal, running_server, threads_of, wait_until
from running_server import ask as raw_ask
from selfspec import SelfSpecGenerator
from selfspec.engine.engine import Engine
from selfspec.serve import app as app_module
from selfspec.serve import bodies, prompts, scheduler, translation
from selfspec.serve.api_errors import ApiError, queue_full
from selfspec.serve.api_requests import ChatRequest, CompletionRequest
from selfspec.serve.api_responses import CompletionAnswer
from selfspec.serve.bodies import parse
from selfspec.serve.serve_options import ServeOptions
from test_serve import CODE

ASK: dict[str, Any] = {"model": "demo", "prompt": CODE, "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def server(offline: SelfSpecGenerator) -> Iterator[RunningServer]:
    """As a newcomer starts it."""
    settings: dict[str, Any] = {"allow_policy": None, "allow_host": None}
    with running_server(offline, batch_size=1, max_waiting=1, max_tokens=400, max_context=600, **settings) as made:
        yield made


def ask(server: RunningServer, path: str = "/v1/completions", **fields: Any) -> tuple[int, dict[str, Any]]:
    return post(server, path, {**ASK, **fields})


LARGE: list[tuple[str, bytes]] = [
    ("messages", b'{"model":"demo","messages":[' + b",".join([b"{}"] * 400_000) + b"]}"),
    ("8192", b'{"messages":[' + b",".join([b'{"role":"user","content":"x"}'] * 110_000) + b"]}"),
    ("prompt", b'{"model":"demo","prompt":[' + b",".join([b'"a",1'] * 300_000) + b"]}"),
    ("prompt", b'{"model":"demo","prompt":[' + b",".join([b"1"] * 1_000_000) + b"]}"),
    ("keys", json.dumps({**ASK, **{f"k{i}": 1 for i in range(100_000)}}).encode()),
    ("keys", json.dumps({**ASK, "logit_bias": {str(i): 1000 for i in range(100_000)}}).encode()),
    ("nested", b'{"model":' + b"[" * 2_000_000 + b"]" * 2_000_000),
    ("digits", b'{"model":' + b"1" * 3_000_000 + b"}"),
]


@pytest.mark.parametrize(("named", "body"), LARGE, ids=[f"{i}-{name}" for i, (name, _) in enumerate(LARGE)])
def test_a_large_body_that_is_wrong_has_few_errors(named: str, body: bytes) -> None:
    """Whoever validates all of it makes an error of some hundred bytes for each item."""
    kind: Any = ChatRequest if named in ("messages", "8192") else CompletionRequest
    if body is LARGE[3][1]:
        assert len(parse(body, kind).prompt) == 1_000_000  # right as far as it goes; the context is looked at later
        return
    started = time.thread_time()
    with pytest.raises(ApiError) as error:
        parse(body, kind)
    assert error.value.status == 400
    assert len(error.value.message) < 500 and (named != "8192" or "at most 8192" in error.value.message)
    assert time.thread_time() - started < 30  # it was minutes, and is a part of a second


def test_large_bodies_are_read_in_another_thread(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither JSON nor a prompt of some size is looked at on the event loop, nor is a policy's name."""
    policies = server.app.state.translator._policies
    calls = {what: threads_of(monkeypatch, owner, name) for what, owner, name in (
        ("json", bodies.json, "loads"), ("prompt", translation, "check_length"), ("chat", prompts, "check_length"),
        ("policy", policies, "choose"),
    )}  # fmt: skip

    def in_the_loop() -> dict[str, bool]:
        """Whether the calls since the last look ran there. The client, in the main thread, reads JSON as well."""
        seen = {what: {*threads} - {threading.main_thread()} for what, threads in calls.items()}
        for threads in calls.values():
            threads.clear()
        return {what: server.thread in threads for what, threads in seen.items() if threads}

    assert ask(server)[0] == 200
    assert in_the_loop() == {"json": True, "prompt": True, "policy": True}  # no name that is parsed
    for size in (40_000, 3_000_000):
        status, answer = ask(server, prompt="word " * (size // 5), policy="auto")
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert in_the_loop() == {"json": False, "prompt": False}
    assert ask(server, policy="del")[0] == 200
    assert in_the_loop()["policy"] is False


MANY: dict[str, dict[str, Any]] = {
    "policy": {"seed": 1, "temperature": 1},
    "bias": {"logit_bias": {str(token): 1 for token in range(100)}},
    "grammar": {"response_format": {"type": "json_object"}},
}


def test_what_a_request_asks_for_is_made_once_and_not_for_every_text(
    many: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not on the event loop, nor before there is room for the texts."""
    translator, scheduler = many.app.state.translator, many.app.state.scheduler
    all_texts = threads_of(monkeypatch, translator, "texts")
    made = {
        "policy": threads_of(monkeypatch, translator._policies, "choose"),
        "bias": threads_of(monkeypatch, translation, "bias_processor"),
        "grammar": threads_of(monkeypatch, translator.vocabulary, "matcher"),
    }
    for name, fields in MANY.items():
        made[name].clear()
        all_texts.clear()
        status, answer = ask(many, n=8, **fields)
        assert (status, len(answer["choices"])) == (200, 8)
        assert len(made[name]) == len(all_texts) == 1 and many.thread not in made[name] + all_texts
    all_texts.clear()
    monkeypatch.setattr(scheduler, "check_room", lambda texts: (_ for _ in ()).throw(queue_full(f"{texts} texts")))
    assert ask(many, n=8)[1]["error"]["message"].startswith("8 texts")
    assert not all_texts


@pytest.fixture(scope="module")
def many(offline: SelfSpecGenerator) -> Iterator[RunningServer]:
    with running_server(offline) as made:
        yield made


def test_long_answers_are_not_written_on_the_event_loop(many: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of some hundred tokens with log-probabilities, or a prompt with them; short ones are written at once."""
    whole, chunks = (threads_of(monkeypatch, CompletionAnswer, name) for name in ("whole", "chunk"))
    assert ask(many, logprobs=5)[0] == 200 and whole == [many.thread]
    assert ask(many, max_tokens=300, ignore_eos=True, logprobs=5)[0] == 200 and many.thread not in whole[1:]
    body = {**ASK, "prompt": [5] * 300, "echo": True, "logprobs": 5, "stream": True}
    assert raw_ask(many, "POST", "/v1/completions", body)[0] == 200
    assert chunks[0] is not many.thread and {*chunks[1:]} == {many.thread}


def test_a_prompt_is_refused_before_all_of_it_is_made_into_tokens(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    translator = server.app.state.translator
    characters = 0
    kind = type(translator.prompts.tokenizer)
    plain = kind.__call__

    def counting(tokenizer: Any, text: Any, *rest: Any, **options: Any) -> Any:
        nonlocal characters
        characters += len(text)
        return plain(tokenizer, text, *rest, **options)

    monkeypatch.setattr(kind, "__call__", counting)
    long = "Some words, and more of them. " * 100_000
    assert ask(server, prompt=long)[1]["error"]["code"] == "context_length_exceeded"
    chat = {"model": "demo", "messages": [{"role": "user", "content": long}]}
    assert refusal(server, "/v1/chat/completions", chat)["code"] == "context_length_exceeded"
    assert 0 < characters < 50_000


def test_what_the_operator_bounds_is_refused(server: RunningServer) -> None:
    assert ask(server, max_tokens=401)[1]["error"]["param"] == "max_tokens"
    assert ask(server, prompt=[5] * 300, max_tokens=301)[1]["error"]["code"] == "context_length_exceeded"
    assert ask(server, policy="ls:3-4")[1]["error"]["param"] == "policy"
    assert "--allow-policy" in ask(server, policy="auto:cost=layers,d_max=1000000")[1]["error"]["message"]
    status, answer = ask(server, n=3)  # one place, and room for one more: it would be told to come again for ever
    assert (status, answer["error"]["param"]) == (400, "n")
    assert "3 texts in one request, this server takes at most 2" in answer["error"]["message"]
    for temperature in (1e-40, 1e-6):
        assert ask(server, temperature=temperature)[1]["choices"] == ask(server)[1]["choices"]


def test_memory_is_as_the_operator_says_and_is_given_back(
    offline: SelfSpecGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are reserved for a prompt and its limit, which the operator bounds. An idle server keeps those of kept texts."""
    monkeypatch.setattr(scheduler, "IDLE_SECONDS", 0.3)
    model = offline.model
    row = 2 * model.num_layers * model.num_kv_heads * model.head_dim * model.kv_dtype.itemsize
    reserved: list[float] = []
    plain = Engine.step
    with running_server(offline, max_context=600, default_chat_tokens=100_000) as server:

        def watched(engine: Engine) -> list[Any]:
            reserved.append(server.metric("kv_cache_bytes"))
            return plain(engine)

        monkeypatch.setattr(Engine, "step", watched)
        chat = {"model": "demo", "messages": [{"role": "user", "content": CODE}], "temperature": 0, "stop": "e"}
        assert post(server, "/v1/chat/completions", chat)[0] == 200
        assert 300 * row < max(reserved) <= 600 * row
        wait_until(lambda: server.metric("kv_cache_bytes") == 0)
        assert server.metric("kept_cache_bytes") == max(reserved)
        wait_until(lambda: server.metric("kept_cache_bytes") == 0)
        assert offline.kept_texts.num_bytes == 0
        assert ask(server, max_tokens=300, stop="e", cache_salt="mine")[0] == 200
        wait_until(lambda: 0 < server.metric("kept_cache_bytes") < 50 * row)  # the text itself
        assert ask(server, cache_salt="mine")[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200), ({"Host": "localhost:8000"}, 200), ({"Host": "[::1]"}, 200), ({"Host": "LOCALHOST."}, 200),
        ({"Host": "attacker.example"}, 403), ({"Host": "127.0.0.1.attacker.example:80"}, 403),
        ({"Content-Type": "text/plain"}, 400), ({"Content-Type": ""}, 400), ({"Content-Type": "multipart/form-data"}, 400),
        ({"Content-Type": "Application/JSON"}, 200), ({"Content-Type": "application/json; charset=utf-8"}, 200),
    ],
)  # fmt: skip
def test_other_pages_cannot_call(server: RunningServer, headers: dict[str, str], status: int) -> None:
    """Neither by a name of their own for this address, nor with a type that a browser sends without asking."""
    found, answer = post(server, "/v1/completions", ASK, **headers)
    assert found == status
    assert status != 400 or "send the header 'Content-Type: application/json'" in answer["error"]["message"]


def test_names_by_which_a_server_is_called(server: RunningServer) -> None:
    """Every route asks for it."""
    assert ServeOptions(host="0.0.0.0").hosts is None
    assert ServeOptions(api_key="key").hosts is None
    assert ServeOptions(allow_host=["*"]).hosts is None
    assert "example.org" in (ServeOptions(host="0.0.0.0", allow_host=["Example.org"]).hosts or ())
    for path in ("/", "/health", "/metrics", "/v1/models", "/v1/models/demo", "/nowhere"):
        assert raw_ask(server, "GET", path, Host="attacker.example")[0] == 403, path


def test_pages_of_an_origin_that_the_operator_names(offline: SelfSpecGenerator) -> None:
    """Their browser asks first, without the key. What other pages may send unasked is still not read as JSON."""
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    with running_server(offline, allow_origin=["http://good.example"], api_key="k") as server:
        for origin, status in (("http://good.example", 200), ("http://other.example", 400)):
            found, _, headers = raw_ask(server, "OPTIONS", "/v1/completions", Origin=origin, **wanted)
            assert (found, headers["access-control-allow-origin"] == origin) == (status, status == 200)
        plain = {"Origin": "http://good.example", "Authorization": "Bearer k", "Content-Type": "text/plain"}
        found, _, headers = raw_ask(server, "POST", "/v1/completions", ASK, **plain)
        assert (found, headers["access-control-allow-origin"]) == (400, "http://good.example")


@pytest.mark.parametrize("given", ["job-7:a.b", "two words", "x" * 129, ""])
def test_every_request_has_a_name_in_the_log(
    server: RunningServer, caplog: pytest.LogCaptureFixture, given: str
) -> None:
    """The client's own if it is harmless. Nothing that a client sends can begin a line."""
    with caplog.at_level(logging.INFO, "selfspec.access"):
        name = raw_ask(server, "POST", "/v1/completions", {**ASK, "n": 2, "temperature": 1}, **{"X-Request-Id": given})[
            2
        ]["x-request-id"]
        assert name == given if given == "job-7:a.b" else re.fullmatch(r"\w{32}", name)
        assert raw_ask(server, "GET", "/a%0ab", Host="attacker.example")[0] == 403
        wait_until(lambda: len(caplog.messages) == 2)
    assert re.fullmatch(rf"POST /v1/completions 200 10 \+ 6 tokens [\d.]+ s {name}", caplog.messages[0])
    assert caplog.messages[1].startswith("GET /a%0Ab 403 0.")


def test_an_unexpected_error_has_a_status_that_is_counted(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server.app.state.translator, "texts", lambda body: 1 / 0)
    before = server.metric("requests_total", route="/v1/completions", status="500")
    with caplog.at_level(logging.CRITICAL):
        status, answer = ask(server)
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert server.metric("requests_total", route="/v1/completions", status="500") == before + 1


def test_a_stream_that_waits_says_so_and_the_end_is_503(
    offline: SelfSpecGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handle", log.append)
    monkeypatch.setattr(app_module, "PING_SECONDS", 0.05)
    endless = {**ASK, "max_tokens": 1900, "logit_bias": {"0": -100}, "stream": True}
    with running_server(offline, batch_size=1, max_waiting=2, grace_seconds=1) as server:
        first = asking(server, endless)
        running = first.getresponse()
        assert running.read(6) == b"data: "
        second = asking(server, {**ASK, "stream": True})
        waiting = second.getresponse()
        assert waiting.read(10) == b": waiting\n"
        third = asking(server, ASK)
        wait_until(lambda: server.metric("waiting_texts") == 2)
        monkeypatch.setattr(Engine, "step", lambda engine: time.sleep(0.05) or [])  # nothing ends any more
        server.server.should_exit = True
        answer = third.getresponse()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (503, "shutting_down")
        for stream in (running, waiting):  # each ends with the error and the last chunk
            *_, error, done, rest = stream.read().decode().split("\n\n")
            assert json.loads(error[6:])["error"]["code"] == "shutting_down"
            assert (done, rest) == ("data: [DONE]", "")
        server.thread.join(20)
        assert [record.getMessage() for record in log if record.exc_info] == []
        for one in (first, second, third):
            one.close()


def test_nobody_waits_for_a_client_that_has_its_answer() -> None:
    async def receive() -> Any:
        await asyncio.sleep(3600)

    async def answered() -> None:
        work = asyncio.get_running_loop().create_future()
        work.set_result(None)
        assert await app_module._client_stays(receive, work)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(answered())
