"""What hostile clients send: one function for each kind of attack. All are bounded in size and time."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Callable
from random import Random
from typing import Any

from bench.engines.servers import Server

ALLOWED = frozenset({200, 400, 403, 404, 405, 408, 413, 429})
"""Statuses of which a server may make use. 500 is a fault, whatever was sent."""
_HEADERS = {"Content-Type": "application/json"}
_SECONDS = 60.0  # for one answer


class FaultError(AssertionError):
    """The server did what it must not do."""


def _sent(server: Server, body: bytes, path: str = "/v1/completions", **headers: str) -> tuple[int, bytes]:
    """Status and answer; (0, b"") where the server hung up."""
    connection = server.connect(_SECONDS)
    try:
        connection.request("POST", path, body, {**_HEADERS, **headers})
        response = connection.getresponse()
        answer = response.read()
    except (ConnectionError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()
    if response.status not in ALLOWED:
        raise FaultError(f"status {response.status} for {body[:200]!r}: {answer[:300]!r}")
    return response.status, answer


def _body(server: Server, **fields: Any) -> bytes:
    return json.dumps({"model": server.model, "prompt": "x", "max_tokens": 8, **fields}).encode()


def _repeated(head: bytes, item: bytes, tail: bytes, count: int) -> bytes:
    return head + b",".join([item] * count) + tail


def malformed_body(server: Server, random: Random) -> None:
    """Bodies that are no JSON, or hold what no field takes; up to 4 MB of it."""
    count, name = random.choice([3, 30_000, 400_000]), server.model.encode()
    bodies = [
        lambda: b"{" * count,
        lambda: b"[" * count + b"]" * count,
        lambda: b"\xff\xfe" * count,
        lambda: b'{"model":' + b"1" * count + b"}",
        lambda: _repeated(b'{"model":"' + name + b'","messages":[', b"{}", b"]}", count),
        lambda: _repeated(b'{"model":"' + name + b'","prompt":[', b'"a",1', b"]}", count // 2),
        lambda: _repeated(b'{"model":"' + name + b'","prompt":[', b"[]", b"]}", count),
        lambda: _repeated(b'{"model":"' + name + b'","prompt":[', b"7", b"]}", count),
        lambda: b'{"model":"' + name + b'","prompt":"' + b"some words " * (count // 4) + b'"}',
        lambda: b'{"model":"' + name + b'","prompt":"' + b" " * count + b'"}',
        lambda: _body(server, **{f"k{i}": 1 for i in range(min(count, 100_000))}),
        lambda: _body(server, logit_bias={str(i): 1 for i in range(min(count, 4000))}),
        lambda: _body(server, logit_bias={str(i): 1000 for i in range(min(count, 100_000))}),
        lambda: _body(server, stop=["a"] * min(count, 100_000)),
        lambda: b"x" * (5 << 20),
    ]
    _sent(server, random.choice(bodies)(), random.choice(["/v1/completions", "/v1/chat/completions"]))


_TYPES: list[Any] = [
    None, True, -1, 0, 2**70, 1e308, 1e-40, "", "x", "\ud800", [], [[]], {}, {"a": {}}, [None], ["x"] * 20,
]  # fmt: skip
_FIELDS = (
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k",
    "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "n", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "stream", "stream_options", "echo", "logprobs", "top_logprobs", "response_format",
    "policy", "show_drafts", "user", "cache_salt", "tools", "metadata",
)  # fmt: skip


def wrong_types(server: Server, random: Random) -> None:
    """Any value in any field."""
    fields = {name: random.choice(_TYPES) for name in random.sample(_FIELDS, random.randint(1, 4))}
    if fields.get("model") is not None:
        fields.pop("model")
    fields = {"max_tokens": 4, **fields}
    chat = random.random() < 0.5
    given: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    body = json.dumps({"model": server.model, **given, **fields}).encode()
    _sent(server, body, "/v1/chat/completions" if chat else "/v1/completions")


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
    """Schemas that overflow a stack, take minutes to compile, or make each token dear."""
    length = random.choice([50, 100, 1000, 5000])
    chain = {str(i): {"properties": {"x": {"$ref": f"#/$defs/{i + 1}"}}, "required": ["x"]} for i in range(length)}
    drawn = {**_random_schema(random, 3), "$defs": {f"a{i}": _random_schema(random, 2) for i in range(6)}}
    schema = random.choice([
        {"$ref": "#/$defs/0", "$defs": chain | {str(length): {"type": "null"}}},
        {"type": "string", "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(1, random.randint(3, 30))]},
        {"enum": ["x" * random.choice([4000, 100_000, 1_000_000])]},
        {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(random.choice([400, 2000]))}},
        {"type": "object", "x-guidance": {"whitespace_pattern": "(a{1,1000}){1,1000}"}},
        {"$ref": random.choice(["file:///etc/passwd", "http://127.0.0.1:1/x", "#/a/b", "#"])},
        *[drawn] * 6,
    ])  # fmt: skip
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
    """Connections that send a part and then nothing, or a byte at a time. The part may be most of a large body."""
    length = random.choice([90, 90, 4_000_000])
    sent = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n{%s" % (length, b" " * (length - 80))
    )
    many = random.choice([1, 10, 30] if length > 90 else [1, 30, 150])
    opened = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(many)]
    try:
        for one in opened:
            with contextlib.suppress(ConnectionError):  # as one of too many
                one.sendall(sent if length > 90 else sent[: random.randrange(len(sent) + 1)])
        end = time.monotonic() + random.random() * 3
        while time.monotonic() < end:
            time.sleep(0.2)
            with contextlib.suppress(OSError):
                random.choice(opened).sendall(b" ")
    finally:
        for one in opened:
            one.close()


def hang_up(server: Server, random: Random) -> None:
    """Ask for much, and leave."""
    fields: dict[str, Any] = {"n": random.choice([1, 4, 16]), "max_tokens": 250, "stream": random.random() < 0.5}
    connection = server.connect(_SECONDS)
    try:
        connection.request("POST", "/v1/completions", _body(server, **fields), _HEADERS)
        time.sleep(random.random() * 0.2)
    finally:
        connection.close()


def slow_reader(server: Server, random: Random) -> None:
    """A stream of which little is read, slowly."""
    connection = server.connect(_SECONDS)
    try:
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        body = _body(server, stream=True, max_tokens=250, show_drafts=True, logit_bias={"0": -100})
        connection.request("POST", "/v1/completions", body, _HEADERS)
        response = connection.getresponse()
        for _ in range(random.randint(1, 10)):
            response.read(16)
            time.sleep(0.2)
    finally:
        connection.close()


def many_salts(server: Server, random: Random) -> None:
    """Texts of ever new owners, which push those of others out of what is kept."""
    for _ in range(random.randint(1, 8)):
        salt = {"cache_salt": f"{random.random()}" * random.choice([1, 50]), "user": f"{random.random()}"}
        _sent(server, _body(server, prompt=random.choices(range(1, 400), k=random.choice([3, 400])), **salt))


def too_many(server: Server, random: Random) -> None:
    """Numbers beyond every bound."""
    number = random.choice([17, 1000, 2**31, 2**63, 10**100])
    fields: dict[str, Any] = random.choice([
        {"n": number}, {"max_tokens": number}, {"logprobs": number}, {"seed": number}, {"top_k": number},
        {"prompt": ["x"] * min(number, 100_000)}, {"min_tokens": number}, {"temperature": 1 / number},
        {"stop_token_ids": [1] * min(number, 100_000)},
    ])  # fmt: skip
    _sent(server, _body(server, **fields))


def other_page(server: Server, random: Random) -> None:
    """What a web page can send: another host, another type."""
    headers = random.choice([{"Host": "attacker.example"}, {"Content-Type": "text/plain"}, {"Content-Type": ""}])
    status, answer = _sent(server, _body(server), **headers)
    if status == 200:
        raise FaultError(f"a request with {headers} was answered: {answer[:100]!r}")


def guesser(prompts: tuple[str, ...]) -> Callable[[Server, Random], None]:
    """Prompts of the other clients, and how much of them the server says it knows already: nothing."""

    def guess_prompt(server: Server, random: Random) -> None:
        """Guess, with salts that are not the others'."""
        identity: dict[str, str] = random.choice([{}, {"cache_salt": f"guess {random.random()}"}, {"user": "other"}])
        status, answer = _sent(server, _body(server, prompt=random.choice(prompts), max_tokens=1, **identity))
        if status == 200:
            found = json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"]
            if found:
                raise FaultError(f"{found} tokens of another client's prompt were told to {identity}")

    return guess_prompt
