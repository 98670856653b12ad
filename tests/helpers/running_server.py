"""A server in a thread of the test's process, on a free port."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import pytest
import uvicorn
from fastapi import FastAPI
from openai import OpenAI

from selfspec import SelfSpecGenerator
from selfspec.serve import app as serve_app
from selfspec.serve.app import make_app
from selfspec.serve.running import make_server, open_socket
from selfspec.serve.serve_options import ServeOptions


@dataclass(frozen=True)
class RunningServer:
    """base: its address. app: to look inside. server: to end it."""

    base: str
    app: FastAPI
    server: uvicorn.Server
    thread: threading.Thread

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.base}/v1", api_key=key, max_retries=0, timeout=60)

    def metric(self, name: str, **labels: str) -> float:
        return self.app.state.metrics.registry.get_sample_value(f"selfspec_{name}", labels) or 0.0


@contextmanager
def running_server(
    generator: SelfSpecGenerator, *, grace_seconds: int = 5, freezes: bool = False, **options: Any
) -> Iterator[RunningServer]:
    """options: of `ServeOptions`. A test may name any policy, by any host; what a server allows by itself has its own tests.

    freezes: the collector leaves alone what exists now, and looks at everything afterwards, as with `selfspec serve`.
    That is two full collections, and among the tests most of what exists is left alone already.
    """
    free = {
        "model": "served",
        "served_name": "demo",
        "chat_template": "plain",
        "allow_policy": ["any"],
        "allow_host": ["*"],
    }
    app = make_app(generator, ServeOptions(**{**free, **options}))
    up = threading.Event()
    frozen = nullcontext() if freezes else patch.object(serve_app, "gc_frozen", nullcontext)
    with frozen, open_socket("127.0.0.1", 0) as listening:
        server = make_server(app, grace_seconds=grace_seconds, on_start=up.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        assert up.wait(30)
        try:
            yield RunningServer(f"http://127.0.0.1:{listening.getsockname()[1]}", app, server, thread)
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


def ask(
    server: RunningServer, method: str, path: str, body: object = None, **headers: str
) -> tuple[int, bytes, http.client.HTTPMessage]:
    """Status, body and headers of an answer. body: sent as JSON, unless it is bytes already, or parts of them."""
    address = urlsplit(server.base)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    try:
        sent: Any = body if body is None or isinstance(body, (bytes, Iterator)) else json.dumps(body)
        connection.request(method, path, sent, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, response.read(), response.headers
    finally:
        connection.close()


def post(server: RunningServer, path: str, body: object, **headers: str) -> tuple[int, dict[str, Any]]:
    status, answer, _ = ask(server, "POST", path, body, **headers)
    return status, json.loads(answer)


def asking(server: RunningServer, body: object) -> http.client.HTTPConnection:
    """A connection that has sent a request for completions, whose answer was not read yet."""
    connection = http.client.HTTPConnection(server.base[7:], timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection


def threads_of(patch: pytest.MonkeyPatch, owner: object, name: str) -> list[threading.Thread]:
    """The thread of each call of this function from now on."""
    plain, found = getattr(owner, name), list[threading.Thread]()

    def noting(*given: Any, **options: Any) -> Any:
        found.append(threading.current_thread())
        return plain(*given, **options)

    patch.setattr(owner, name, noting)
    return found


def connected(server: RunningServer) -> socket.socket:
    address = urlsplit(server.base)
    return socket.create_connection((address.hostname or "", address.port or 0), timeout=10)


def wait_until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def refusal(server: RunningServer, path: str, body: object, status: int = 400, **headers: str) -> dict[str, Any]:
    """The error of a request that must be refused, in one line."""
    found, answer = post(server, path, body, **headers)
    assert found == status, answer
    error: dict[str, Any] = answer["error"]
    assert error["message"] and "\n" not in error["message"]
    return error
