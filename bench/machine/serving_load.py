"""Clients of a server: what they get, and when."""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from bench.engines.servers import Server
from bench.record import Line
from selfspec import SelfSpecGenerator


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A streamed answer. first_seconds, seconds: from the request to its first text, and to its end."""

    text: str
    first_seconds: float
    seconds: float


def stream(
    connection: http.client.HTTPConnection, server: Server, prompt: str, max_tokens: int, **fields: Any
) -> Reply:
    """Stream a greedy completion. Raises RuntimeError for anything but a complete one."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    start = perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body | fields), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"{server.label}: status {response.status}: {response.read(500).decode(errors='replace')}")
    first, pieces = None, []
    while line := response.readline():
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"{server.label}: {event['error']}")
            text = event["choices"][0]["text"] if event["choices"] else ""
            if text:
                first = perf_counter() - start if first is None else first
                pieces.append(text)
    if first is None:
        raise RuntimeError(f"{server.label}: a stream without text")
    return Reply(text="".join(pieces), first_seconds=first, seconds=perf_counter() - start)


def measure_clients(
    server: Server, prompts: Sequence[str], clients: int, max_tokens: int, **fields: Any
) -> tuple[Line, list[str]]:
    """Let `clients` clients send the prompts at once, each on one connection. Returns the record's line and all texts."""
    replies: dict[int, Reply] = {}
    with ExitStack() as held:
        connections = [held.enter_context(closing(server.connect())) for _ in range(clients)]

        def work(client: int) -> None:
            for index in range(client, len(prompts), clients):
                replies[index] = stream(connections[client], server, prompts[index], max_tokens, **fields)

        start = perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            working = [pool.submit(work, client) for client in range(clients)]
        seconds = perf_counter() - start
    try:
        for client in working:
            client.result()
    except Exception as error:
        raise RuntimeError(f"a client of {server.label} failed") from error
    found = [replies[index] for index in range(len(prompts))]
    line = {
        "kind": "serving",
        "engine": server.name,
        "clients": clients,
        "tokens": max_tokens * len(prompts),
        "seconds": seconds,
        "first_seconds": [reply.first_seconds for reply in found],
    }
    return line, [reply.text for reply in found]


def measure_batch_call(
    generator: SelfSpecGenerator, prompts: Sequence[str], clients: int, max_tokens: int, policy: str | None
) -> tuple[Line, list[str]]:
    """Generate the same texts by `generate_batch`, `clients` at a time: what a server could give at best."""
    start = perf_counter()
    results = generator.generate_batch(
        list(prompts), batch_size=clients, max_new_tokens=max_tokens, do_sample=False, policy=policy
    )
    line = {
        "kind": "serving",
        "engine": "selfspec:generate_batch",
        "clients": clients,
        "tokens": sum(result.stats.num_new_tokens for result in results),
        "seconds": perf_counter() - start,
        "first_seconds": None,
    }
    return line, [result.text or "" for result in results]
