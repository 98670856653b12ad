"""A server under clients of all kinds: every finished answer must be exact, and the server idle and flat at the end."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from bench.engines.servers import Server, selfspec_server
from layerskip_models import DEMO_PATH
from selfspec import SelfSpecGenerator
from selfspec.stop_text import before_stop

PROMPTS = ("def fibonacci(n):\n", "Question: Tom has 3 apples and buys 4.\nAnswer:", "Once upon a time " * 40)
LENGTHS = (1, 12, 60, 150)
SEEDED = "auto:cost=layers"
MOST_RSS = 64 << 20
"""Bytes of resident memory that the server may gain between warm-up and end: the allocator's, in pieces."""
MALFORMED: tuple[tuple[bytes, int], ...] = (
    (b"{", 400),
    (b'{"model": "served"}', 400),
    (b'{"model": "other", "prompt": "x"}', 404),
    (b'{"model": "served", "prompt": "x", "tools": [1]}', 400),
    (b'{"model": "served", "prompt": "x", "max_tokens": 100000}', 400),
    (b'{"model": "served", "prompt": "x", "policy": "ls:99-1"}', 400),
)
_MOST_FAILURES = 20
_REQUEST_SECONDS = 180.0
_IDLE_SECONDS = 20.0


@dataclass(slots=True)
class ServingReport:
    """counts: requests by what became of them. failures: what should not have been. *_rss: of the server, bytes."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    warm_rss: int = 0
    end_rss: int = 0


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and what must come of it: the text, and how many tokens it has."""

    body: dict[str, Any]
    text: str
    tokens: int


class ServingSoak:
    """clients: how many at the same time. seed: random seed of all choices."""

    def __init__(self, *, clients: int, seed: int) -> None:
        self.report = ServingReport()
        self._num_clients, self._seed = clients, seed
        self._asked = expected_answers()
        self._count = threading.Lock()

    def run(self, seconds: float, advance: Callable[[str], object]) -> ServingReport:
        """Start a server, warm it up for a quarter of the time, then the rest; advance: about once a second."""
        options = ["--max-waiting", str(max(1, self._num_clients // 2)), "--allow-policy", "any"]
        with selfspec_server(DEMO_PATH, options) as server:
            self._phase(server, seconds / 4, advance, 0)
            self.report.warm_rss = server.process.memory_info().rss
            self._phase(server, seconds * 3 / 4, advance, 1)
            self._check_end(server)
        return self.report

    def _phase(self, server: Server, seconds: float, advance: Callable[[str], object], phase: int) -> None:
        end = time.monotonic() + seconds
        threads = [
            threading.Thread(target=self._work, args=(server, Random(f"{self._seed} {phase} {index}"), end))
            for index in range(self._num_clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(1.0)
                advance(f"{sum(self.report.counts.values())} requests, {len(self.report.failures)} failures")

    def _work(self, server: Server, random: Random, end: float) -> None:
        while time.monotonic() < end and len(self.report.failures) < _MOST_FAILURES:
            try:
                outcome = self._one(server, random)
            except Exception:
                outcome = "failed"
                self.report.failures.append(traceback.format_exc())
            with self._count:
                self.report.counts[outcome] += 1

    def _one(self, server: Server, random: Random) -> str:
        """One request; returns what became of it. Whatever was not planned is an exception."""
        connection = server.connect(_REQUEST_SECONDS)
        try:
            if random.random() < 0.1:
                malformed, status = random.choice(MALFORMED)
                connection.request("POST", "/v1/completions", malformed, {"Content-Type": "application/json"})
                response = connection.getresponse()
                assert response.status == status, (malformed, response.status)
                assert "error" in json.loads(response.read())
                return "malformed"
            asked = random.choice(self._asked)
            streamed, leaves = random.random() < 0.5, random.random() < 1 / 3
            body = {**asked.body, "model": "served", "stream": streamed}
            if streamed:
                body["stream_options"] = {"include_usage": True}
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            if leaves and not streamed:
                time.sleep(random.random() * 0.5)
                return "hung up"
            response = connection.getresponse()
            if response.status == 429:
                assert int(response.headers["Retry-After"]) >= 1
                response.read()
                time.sleep(random.random())
                return "told to wait"
            assert response.status == 200, (response.status, response.read(300))
            if not streamed:
                whole = json.loads(response.read())
                return _compare(asked, whole["choices"][0]["text"], whole["usage"])
            text, used = _read_stream(response, random.randint(0, 12) if leaves else None)
            return "hung up" if used is None else _compare(asked, text, used)
        finally:
            connection.close()

    def _check_end(self, server: Server) -> None:
        """Nobody waits or decodes, no processor time is used, and memory is where it was."""
        deadline = time.monotonic() + _IDLE_SECONDS
        while True:
            metrics = dict(re.findall(r"^(selfspec_\w+) (\S+)$", server.get("/metrics")[1], re.MULTILINE))
            names = ("selfspec_decoding_texts", "selfspec_waiting_texts", "selfspec_kv_cache_bytes")
            busy = [name for name in names if float(metrics[name])]
            if not busy or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        self.report.failures += [f"{name} is {metrics[name]} at the end" for name in busy]
        if float(metrics["selfspec_failed_texts_total"]):
            self.report.failures.append("texts failed in the server")
        before = sum(server.process.cpu_times()[:2])
        time.sleep(1.0)
        used = sum(server.process.cpu_times()[:2]) - before
        if used > 0.2:
            self.report.failures.append(f"the idle server used {used:.2f} s of processor time in a second")
        self.report.end_rss = server.process.memory_info().rss
        if self.report.end_rss - self.report.warm_rss > MOST_RSS:
            self.report.failures.append(
                f"the server's resident memory grew from {self.report.warm_rss} to {self.report.end_rss} bytes"
            )


def _compare(asked: Asked, text: str, used: dict[str, Any]) -> str:
    found = (text, used["completion_tokens"])
    assert found == (asked.text, asked.tokens), (asked.body, found, (asked.text, asked.tokens))
    return "exact"


def _read_stream(response: http.client.HTTPResponse, most: int | None) -> tuple[str, dict[str, Any] | None]:
    """The text and its usage. most: leave after so many events; the usage is then None."""
    text, used, events = "", None, 0
    while line := response.readline():
        if line.startswith(b"data: [DONE]"):
            assert used is not None, "a stream without usage"
            return text, used
        if not line.startswith(b"data: "):
            continue
        if most is not None and events >= most:
            return text, None
        events += 1
        event = json.loads(line[6:])
        assert "error" not in event, event
        text += event["choices"][0]["text"] if event["choices"] else ""
        used = event.get("usage") or used
    raise AssertionError("a stream that broke off")


def expected_answers() -> list[Asked]:
    """Requests, each run alone: greedy by several policies, sampled with seeds, with stop strings."""
    generator = SelfSpecGenerator.from_pretrained(DEMO_PATH, local_files_only=True)
    asked = []
    for prompt in PROMPTS:
        for length in LENGTHS:
            greedy = generator.generate(prompt, max_new_tokens=length, do_sample=False, policy="ar")
            assert greedy.text is not None
            for policy in (None, "ls:3-4", "del", "ar"):
                body = {"prompt": prompt, "max_tokens": length, "temperature": 0, "policy": policy}
                asked.append(Asked(body, greedy.text, greedy.stats.num_new_tokens))
            if length > 12:
                stopped = generator.generate(
                    prompt, max_new_tokens=length, do_sample=False, policy="ar", stop_strings=["e", "\n\n"]
                )
                assert stopped.text is not None
                body = {"prompt": prompt, "max_tokens": length, "temperature": 0, "stop": ["e", "\n\n"]}
                text = before_stop(stopped.text, ["e", "\n\n"])
                asked.append(Asked(body, text, stopped.stats.num_new_tokens))
            for seed in (1, 2):
                sampling: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": seed}
                fresh = SelfSpecGenerator(generator.model, generator.tokenizer)  # whose policy has learned nothing
                drawn = fresh.generate(prompt, max_new_tokens=length, do_sample=True, policy=SEEDED, **sampling)
                assert drawn.text is not None
                body = {"prompt": prompt, "max_tokens": length, **sampling}
                asked.append(Asked(body, drawn.text, drawn.stats.num_new_tokens))
    return asked
