"""Hostile clients: connections that keep a server waiting, and a trial whose limits can each be broken."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from bench.engines.servers import Server
from layerskip_models import DEMO_PATH
from running_server import RunningServer, asking, connected, post, running_server, wait_until
from selfspec import SelfSpecGenerator
from selfspec.serve import request_limits, running
from tests.adverse import hostile_requests, soak
from tests.adverse.soak import Asked, costly_trial, hostile_trial

ASK: dict[str, Any] = {"model": "demo", "prompt": "Once upon", "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def generator() -> SelfSpecGenerator:
    return SelfSpecGenerator.from_pretrained(DEMO_PATH, prefix_cache="8MB")


def asked(generator: SelfSpecGenerator, prompt: str) -> Asked:
    result = generator.generate(prompt, max_new_tokens=6, do_sample=False, policy="ar")
    assert result.text is not None
    return {"prompt": prompt, "max_tokens": 6, "temperature": 0}, result.text


def as_a_process(server: RunningServer) -> Server:
    """This process: clients and server are both in it."""
    port = urlsplit(server.base).port
    assert port is not None
    return Server(name="served", label="served", port=port, model="demo", process=psutil.Process())


def test_each_limit_can_be_broken(generator: SelfSpecGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another text than alone, a prompt that can be guessed, a wait, memory, and a server's own error."""
    prompt = hostile_requests.PROMPTS[0]
    right = asked(generator, prompt)
    wrong = right[0], right[1] + "?"
    monkeypatch.setattr(soak, "ATTACKS", (hostile_requests.guess_prompt,))
    monkeypatch.setattr(hostile_requests, "PROMPTS", (prompt,))
    with running_server(generator, share_prefixes=True) as server:
        server.app.state.metrics.requests.labels("/v1/completions", "500").inc()
        limits: dict[str, Any] = {"max_wait": 0, "max_growth": -1}
        report = hostile_trial(as_a_process(server), 0.8, clients=3, seed=1, asked=[right, wrong], **limits)
    told = "\n".join(report.failures)
    says = ("an honest request", "another client's prompt", "first token took", "memory grew", "error of the server")
    assert [failure for failure in says if failure not in told] == []
    assert any(line.startswith("FAILED") for line in report.lines())


def test_each_limit_beside_costly_requests_can_be_broken(
    generator: SelfSpecGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "COSTLY", soak.COSTLY[:1])
    monkeypatch.setattr(soak, "MAX_HEALTH_SECONDS", 0.0)
    with running_server(generator) as server:
        report = costly_trial(as_a_process(server), 0.5, max_wait=0)
    assert [failure.partition(" took")[0] for failure in report.failures] == ["a first token", "/health"]
    assert report.statuses["200"] and report.waits
    assert len(report.lines()) == 3 + len(report.failures)


@pytest.fixture(scope="module")
def server(generator: SelfSpecGenerator) -> Iterator[RunningServer]:
    with running_server(generator, batch_size=1, max_waiting=1, max_tokens=400) as made:
        yield made


def test_half_a_request_is_not_waited_for(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(running, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(request_limits, "BODY_SECONDS", 0.3)
    halves = [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "]
    opened = [connected(server) for _ in halves]
    for half, one in zip(halves, opened):
        one.sendall(half)
    begun = connected(server)
    begun.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                  b"Content-Length: 100\r\n\r\n{")  # fmt: skip
    assert begun.recv(100).startswith(b"HTTP/1.1 408")
    for one in opened:
        with contextlib.suppress(ConnectionError):
            assert one.recv(100) == b""
    endless = connected(server)
    endless.sendall(b"GET / HTTP/1.1\r\n")
    with pytest.raises(ConnectionError):
        for number in range(10_000):
            endless.sendall(b"X-%d: %s\r\n" % (number, b"x" * 1000))
    for one in (*opened, begun, endless):
        one.close()
    assert post(server, "/v1/completions", ASK)[0] == 200


def told(one: socket.socket, seconds: float) -> bytes | None:
    """The first bytes that come within these seconds, none from a connection that is closed; None for nothing."""
    one.settimeout(seconds)
    try:
        return one.recv(12)
    except ConnectionError:
        return b""
    except TimeoutError:
        return None


POST_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


def test_of_too_many_connections_that_send_nothing_the_oldest_is_closed(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So those who hold connections open cannot keep others out. One that is being answered stays."""
    monkeypatch.setattr(running, "MAX_WAITED_FOR", 5)
    halves = [b"", b"POST /v1/comp", POST_HEAD % 9 + b"{"]
    with contextlib.ExitStack() as stack:
        body = {**ASK, "max_tokens": 300, "stream": True, "logit_bias": {"0": -100}}
        streaming = stack.enter_context(contextlib.closing(asking(server, body)))
        opened = []
        for number in range(20):
            opened.append(stack.enter_context(connected(server)))
            opened[-1].sendall(halves[number % 3])
            time.sleep(0.01)
        assert post(server, "/v1/completions", {**ASK, "max_tokens": 1})[0] in (200, 429)
        assert [told(one, 10) for one in opened[:14]] == [b""] * 14
        assert [told(one, 0.01) for one in opened[-3:]] == [None] * 3
        assert streaming.getresponse().read().endswith(b"data: [DONE]\n\n")


def test_bodies_that_do_not_end_are_bounded_together(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may be as large as a body may be, so there may not be many of them."""
    monkeypatch.setattr(request_limits, "MAX_UNFINISHED", 2)
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(connected(server)) for _ in range(4)]
        for one in opened:
            with contextlib.suppress(ConnectionError):
                one.sendall(POST_HEAD % 4_000_000 + b" " * 3_999_000)
        assert sorted(str(told(one, 0.3)) for one in opened) == ["None"] * 2 + ["b'HTTP/1.1 429'"] * 2
    wait_until(lambda: post(server, "/v1/completions", ASK)[0] == 200)
