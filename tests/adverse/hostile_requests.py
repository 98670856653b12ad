"""What hostile clients send: one function for each kind of attack. All are bounded in size and time."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from random import Random
from typing import Any

from bench.engines.servers import Server

PROMPTS = ("def fibonacci(n):\n", "Question: Tom has 3 apples and buys 4.\nAnswer:", "Once upon a time " * 40)
"""Of the clients that are not hostile."""
ALLOWED = frozenset({200, 400, 403, 404, 405, 408, 413, 429})
"""Statuses of which a server may make use. 500 is a fault, whatever was sent."""
_HEADERS = {"Content-Type": "application/json"}
_SECONDS = 60.0  # for one answer


def _sent(server: Server, body: bytes, path: str = "/v1/completions", **headers: str) -> tuple[int, bytes]:
    """Status and answer; (0, b"") where the server hung up."""
    with closing(server.connect(_SECONDS)) as connection:
        try:
            connection.request("POST", path, body, {**_HEADERS, **headers})
            response = connection.getresponse()
            answer = response.read()
        except (ConnectionError, http.client.HTTPException):
            return 0, b""
    if response.status not in ALLOWED:
        raise AssertionError(f"status {response.status} for {body[:200]!r}: {answer[:300]!r}")
    return response.status, answer


def _body(server: Server, **fields: Any) -> bytes:
    return json.dumps({"model": server.model, "prompt": "x", "max_tokens": 8, **fields}).encode()


def malformed_body(server: Server, random: Random) -> None:
    """Bodies that are no JSON, or hold what no field takes; up to 4 MB of it."""
    count, name = random.choice([3, 30_000, 400_000]), server.model.encode()
    bodies = [
        lambda: b"{" * count,
        lambda: b"\xff\xfe" * count,
        lambda: b'{"model":"' + name + b'","prompt":"' + b"some words " * (count // 4) + b'"}',
        lambda: b'{"model":"' + name + b'","prompt":"' + b" " * count + b'"}',
        lambda: _body(server, logit_bias={str(i): 1 for i in range(min(count, 4000))}),
        lambda: _body(server, stop=["a"] * min(count, 100_000)),
        lambda: b"x" * (5 << 20),
    ]
    _sent(server, random.choice(bodies)(), random.choice(["/v1/completions", "/v1/chat/completions"]))


_PATTERNS = ("^(a{1,1000}){1,1000}$", "((a|b|ab)*c){500}", "(", "(?=a)", ".*a.{300}")


def _random_schema(random: Random, depth: int) -> Any:
    """Some schema: valid or not, small or large, with references in circles."""
    count = random.choice([0, 1, 7, 300, 10**6, 10**12])
    schemas: list[dict[str, Any]] = [
        {"type": random.choice(["integer", "number", "string", "boolean", "null", "?", 7])},
        {"type": "string", "minLength": count, "maxLength": count + random.randint(-1, 9)},
        {"type": "string", "pattern": random.choice(_PATTERNS)},
        {"type": "integer", "maximum": count, "multipleOf": random.choice([1, 97, 9973, 99_991, 0.001])},
        {"enum": random.choices(["x", 1, None, [1], {"a": 1}], k=random.choice([0, 2, 2000]))},
        {"$ref": f"#/$defs/a{random.randrange(6)}"},
    ]
    if depth:
        one, other, *more = (_random_schema(random, depth - 1) for _ in range(4))
        schemas += [
            {"type": "object", "properties": {"a": one, "b": other}, "required": random.sample("abcdefg", 2)},
            {"type": "object", "additionalProperties": one, "patternProperties": {"^a.{9}b": other}},
            {"type": "array", "items": one, "minItems": random.randrange(3), "maxItems": count},
            {"type": "array", "prefixItems": more},
            {random.choice(["anyOf", "oneOf", "allOf"]): more[: random.randint(0, 2)]},
            {"not": one},
        ]
    return random.choice(schemas)


def schema_bomb(server: Server, random: Random) -> None:
    """Any schema: some are wrong, some take minutes to compile, some make each token dear."""
    schema = {**_random_schema(random, 3), "$defs": {f"a{i}": _random_schema(random, 2) for i in range(6)}}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    _sent(server, _body(server, response_format=asked, max_tokens=20, n=random.choice([1, 1, 4])))


def policy_bomb(server: Server, random: Random) -> None:
    """Names with numbers that take memory or time."""
    number = random.choice([0, 5, 64, 65, 300, 1900, 10**6, 30_000_000, 10**30])
    name = random.choice([
        "auto:cost=layers,d_max={}", "del:d_max={}", "ls:1-{}", "ls:{}-4", "spide:3,max_length={}", "fs:2-{}", "copy:{}",
        "auto+pacer:b={}", "auto:cost=layers,d_max={}", "dv:2,max_length={}", "dv:2,step={}",
        "auto:layers={}", "pacer:/etc/passwd,b={}", "del:omega={}", "auto:cost=layers,d_max={},copy=nan",
    ])  # fmt: skip
    sampling = random.choice([{"temperature": 0}, {"temperature": 1}, {"temperature": 1, "seed": 3}])
    _sent(server, _body(server, policy=name.replace("{}", str(number)), max_tokens=40, **sampling))


def half_a_request(server: Server, random: Random) -> None:
    """Connections that send a part and then nothing, or a byte at a time."""
    sent = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 90\r\n\r\n{     "
    )
    with ExitStack() as held:
        opened = [socket.create_connection(("127.0.0.1", server.port), 20) for _ in range(random.choice([1, 30, 150]))]
        for one in map(held.enter_context, opened):
            with suppress(ConnectionError):  # as one of too many
                one.sendall(sent[: random.randrange(len(sent) + 1)])
        end = time.monotonic() + random.random() * 3
        while time.monotonic() < end:
            time.sleep(0.2)
            with suppress(OSError):
                random.choice(opened).sendall(b" ")


def hang_up(server: Server, random: Random) -> None:
    """Ask for much, and leave."""
    fields: dict[str, Any] = {"n": random.choice([1, 4, 16]), "max_tokens": 250, "stream": random.random() < 0.5}
    with closing(server.connect(_SECONDS)) as connection:
        connection.request("POST", "/v1/completions", _body(server, **fields), _HEADERS)
        time.sleep(random.random() * 0.2)


def slow_reader(server: Server, random: Random) -> None:
    """A stream of which little is read, slowly."""
    with closing(server.connect(_SECONDS)) as connection:
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        body = _body(server, stream=True, max_tokens=250, show_drafts=True, logit_bias={"0": -100})
        connection.request("POST", "/v1/completions", body, _HEADERS)
        response = connection.getresponse()
        for _ in range(random.randint(1, 10)):
            response.read(16)
            time.sleep(0.2)


def many_salts(server: Server, random: Random) -> None:
    """Texts of ever new owners, which push those of others out of what is kept."""
    for _ in range(random.randint(1, 8)):
        salt = {"cache_salt": f"{random.random()}" * random.choice([1, 50]), "user": f"{random.random()}"}
        _sent(server, _body(server, prompt=random.choices(range(1, 400), k=random.choice([3, 400])), **salt))


def guess_prompt(server: Server, random: Random) -> None:
    """Guess a prompt of the other clients, with salts that are not theirs: the server says that it knows none of it."""
    identity: dict[str, str] = random.choice([{}, {"cache_salt": f"guess {random.random()}"}, {"user": "other"}])
    status, answer = _sent(server, _body(server, prompt=random.choice(PROMPTS), max_tokens=1, **identity))
    found = json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"] if status == 200 else 0
    if found:
        raise AssertionError(f"{found} tokens of another client's prompt were told to {identity}")


ATTACKS: tuple[Callable[[Server, Random], None], ...] = (
    malformed_body, schema_bomb, policy_bomb, half_a_request, hang_up, slow_reader, many_salts, guess_prompt,
)  # fmt: skip
