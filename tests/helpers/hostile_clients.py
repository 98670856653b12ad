"""A server of which a third of the clients are hostile. The others must get their texts, in time.

A failure is a text of the others that is not the one that the same request gives alone, a first token that takes longer than
allowed, a hostile request that is answered with an error of the server's own or with another's secret, memory that grows, a
server that ends, and one that is not idle when all clients have left.
"""

from __future__ import annotations

import json
import re
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from random import Random
from statistics import median
from typing import Any

from bench.engines.servers import Server
from hostile_requests import (
    guesser,
    half_a_request,
    hang_up,
    malformed_body,
    many_salts,
    other_page,
    policy_bomb,
    schema_bomb,
    slow_reader,
    too_many,
    wrong_types,
)
from layerskip_models import DEMO_PATH
from selfspec import SelfSpecGenerator
from selfspec.stop_text import before_stop

PROMPTS = ("def fibonacci(n):\n", "Question: Tom has 3 apples and buys 4.\nAnswer:", "Once upon a time " * 40)
LENGTHS = (1, 12, 60, 150)
SEEDED = "auto:cost=layers"
ATTACKS: tuple[Callable[[Server, Random], None], ...] = (
    malformed_body, wrong_types, schema_bomb, policy_bomb, half_a_request, hang_up, slow_reader, too_many, other_page,
    many_salts, guesser(PROMPTS),
)  # fmt: skip
OPTIONS = (
    "--allow-policy", "any", "--prefix-cache", "64MB", "--batch-size", "16", "--max-waiting", "64", "--max-tokens", "400",
)  # fmt: skip
_BRANCHES = [
    {
        "type": "object",
        "properties": {f"k{i}": {"type": "integer"}},
        "required": [f"k{i}"],
        "additionalProperties": False,
    }
    for i in range(300)
]
COSTLY: tuple[tuple[str, dict[str, Any]], ...] = (
    ("completions", {"prompt": "x", "n": 32, "seed": 1, "temperature": 1, "max_tokens": 1}),
    ("completions", {"prompt": "x", "n": 32, "max_tokens": 1, "logit_bias": {str(i): 1 for i in range(1900)}}),
    ("completions", {"prompt": "x", "n": 32, "max_tokens": 1, "response_format": {
        "type": "json_schema", "json_schema": {"name": "branches", "schema": {"anyOf": _BRANCHES}}}}),
    ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 4, "max_tokens": 1900, "logprobs": True,
                          "top_logprobs": 20, "ignore_eos": True}),
)  # fmt: skip
"""Small valid requests that are much work: many texts, biases, a large grammar, and long answers with log-probabilities."""
COSTLY_OPTIONS = ("--chat-template", "plain")
MAX_HEALTH_SECONDS = 0.5
_MAX_FAILURES = 20
_PAUSE_SECONDS = 0.3  # between requests of a client, at most: the machine is not to be full of honest work alone
_REQUEST_SECONDS = 120.0
_IDLE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and the text that must come of it."""

    body: dict[str, Any]
    text: str


def expected_answers() -> list[Asked]:
    """Requests, each run alone: greedy by several policies, sampled with seeds, with stop strings."""
    generator = SelfSpecGenerator.from_pretrained(DEMO_PATH, local_files_only=True)

    def text_of(generator: SelfSpecGenerator, prompt: str, length: int, **options: Any) -> str:
        text = generator.generate(prompt, max_new_tokens=length, **options).text
        assert text is not None
        return text

    asked = []
    for prompt in PROMPTS:
        for length in LENGTHS:
            body = {"prompt": prompt, "max_tokens": length}
            greedy = text_of(generator, prompt, length, do_sample=False, policy="ar")
            for policy in (None, "ls:3-4", "del", "ar"):
                asked.append(Asked({**body, "temperature": 0, "policy": policy}, greedy))
            if length > 12:
                stops = ["e", "\n\n"]
                stopped = text_of(generator, prompt, length, do_sample=False, policy="ar", stop_strings=stops)
                asked.append(Asked({**body, "temperature": 0, "stop": stops}, before_stop(stopped, stops)))
            for seed in (1, 2):
                sampling: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": seed}
                fresh = SelfSpecGenerator(generator.model, generator.tokenizer)  # whose policy has learned nothing
                drawn = text_of(fresh, prompt, length, do_sample=True, policy=SEEDED, **sampling)
                asked.append(Asked({**body, **sampling}, drawn))
    return asked


@dataclass(slots=True)
class HostileReport:
    """exact: texts of the others. waits: their seconds to the first token. attacks: by kind. statuses: of all requests.

    *_rss: resident memory of the server, in bytes: the median of the second fifth of the time, and of the last one. (Single
    looks differ by some 5 %, by what is being served.) cores: that it had, on average: where other programs took them, waits
    are theirs as well.
    """

    exact: int = 0
    waits: list[float] = field(default_factory=list)
    attacks: Counter[str] = field(default_factory=Counter)
    statuses: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    warm_rss: int = 0
    end_rss: int = 0
    cores: float = 0.0

    @property
    def slowest(self) -> float:
        """Seconds to the first token."""
        return max(self.waits, default=0.0)

    @property
    def growth(self) -> float:
        """Of memory, as a share of what it was."""
        return self.end_rss / self.warm_rss - 1 if self.warm_rss else 0.0

    def lines(self) -> list[str]:
        """What is printed at the end."""
        waits = sorted(self.waits) or [0.0]
        attacks = ", ".join(f"{name} {count}" for name, count in sorted(self.attacks.items()))
        return [
            f"texts of the others, all as alone: {self.exact}",
            f"seconds to their first token: median {waits[len(waits) // 2]:.3f}, "
            f"p99 {waits[len(waits) * 99 // 100]:.3f}, slowest {self.slowest:.3f} (the server had {self.cores:.2f} cores)",
            f"attacks: {attacks}",
            "requests by status: " + ", ".join(f"{status} {count}" for status, count in sorted(self.statuses.items())),
            f"resident memory: {self.warm_rss >> 20} MiB in the second fifth of the time, {self.end_rss >> 20} MiB in the "
            f"last ({self.growth:+.1%})",
            *(f"FAILED: {failure}" for failure in self.failures),
        ]


class HostileTrial:
    """clients: how many at the same time, a third of them hostile. seed: random seed of all choices."""

    def __init__(self, *, clients: int, seed: int, asked: Sequence[Asked]) -> None:
        self.report = HostileReport()
        self._hostile = max(1, clients // 3)
        self._honest, self._seed, self._asked = max(1, clients - self._hostile), seed, asked
        self._lock = threading.Lock()

    def run(
        self,
        server: Server,
        seconds: float,
        *,
        max_wait: float,
        max_growth: float,
    ) -> HostileReport:
        """All clients at once, for so long. max_wait: seconds to a first token. max_growth: of memory, as a share."""
        report, started = self.report, time.monotonic()
        looks = self._serve_all(server, seconds)
        if not server.process.is_running() or server.get("/health")[0] != 200:
            report.failures.append("the server has ended")
            return report
        report.warm_rss, report.end_rss = _around(looks, 0.2, 0.4), _around(looks, 0.8, 1.0)
        report.cores = sum(server.process.cpu_times()[:2]) / (time.monotonic() - started)
        counts = re.findall(
            r'^selfspec_requests_total\{.*status="(\d+)"\} (\S+)$', server.get("/metrics")[1], re.MULTILINE
        )
        report.failures += _busy(server)
        report.statuses = dict(sum((Counter({status: int(float(count))}) for status, count in counts), Counter()))
        if any(status >= "500" for status in report.statuses):
            report.failures.append("requests were answered with an error of the server's own")
        if len(server.process.children(recursive=True)) > 2:
            report.failures.append(
                "the server has more processes than the one that tries schemas, and multiprocessing's own"
            )
        if report.growth > max_growth:
            report.failures.append(f"memory grew by {report.growth:.1%}, at most {max_growth:.1%} are allowed")
        if report.slowest > max_wait:
            report.failures.append(f"a first token took {report.slowest:.2f} s, at most {max_wait:g} are allowed")
        return report

    def _serve_all(self, server: Server, seconds: float) -> list[int]:
        """The server's resident memory, about each second."""
        looks: list[int] = []
        end = time.monotonic() + seconds
        works = [self._honest_client] * self._honest + [self._hostile_client] * self._hostile
        threads = [
            threading.Thread(target=work, args=(server, Random(f"{self._seed} {index} {seconds}"), end))
            for index, work in enumerate(works)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(min(1.0, seconds / 20))
                looks.append(server.process.memory_info().rss if server.process.is_running() else 0)
        return looks

    def _failed(self, text: str) -> None:
        with self._lock:
            self.report.failures.append(text)

    def _goes_on(self, end: float) -> bool:
        return time.monotonic() < end and len(self.report.failures) < _MAX_FAILURES

    def _hostile_client(self, server: Server, random: Random, end: float) -> None:
        while self._goes_on(end):
            attack = random.choice(ATTACKS)
            try:
                attack(server, random)
            except Exception:
                self._failed(f"{attack.__name__}: {traceback.format_exc()}")
            with self._lock:
                self.report.attacks[attack.__name__] += 1
            time.sleep(random.random() * _PAUSE_SECONDS)

    def _honest_client(self, server: Server, random: Random, end: float) -> None:
        salt = f"salt {random.random()}"
        while self._goes_on(end):
            asked = random.choice(self._asked)
            try:
                wait = _streamed(server, asked, salt)
            except Exception:
                self._failed(f"an honest request: {asked.body}: {traceback.format_exc()}")
                continue
            with self._lock:
                self.report.exact += 1
                self.report.waits.append(wait)
            time.sleep(random.random() * _PAUSE_SECONDS)


@dataclass(slots=True)
class CostlyReport:
    """Seconds to the first tokens of one good client and to answers of /health, and requests of the costly clients."""

    waits: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """What is printed at the end."""
        return [
            f"beside costly requests ({dict(sorted(self.statuses.items()))}): first token after "
            f"{median(self.waits or [0]):.3f} s (median), {max(self.waits, default=0):.3f} s (slowest of {len(self.waits)}); "
            f"/health after {median(self.health or [0]):.3f} and {max(self.health, default=0):.3f} s ({len(self.health)})",
            *(f"FAILED: {failure}" for failure in self.failures),
        ]


def costly_trial(server: Server, seconds: float, *, max_wait: float) -> CostlyReport:
    """Four clients send a costly request each, over and over, beside one good client and one that looks at /health.

    max_wait: seconds to the good client's first token, which may have to ask again when the queue is full.
    """
    report, end = CostlyReport(), time.monotonic() + seconds

    def costly(path: str, body: dict[str, Any]) -> None:
        while time.monotonic() < end:
            with closing(server.connect(_REQUEST_SECONDS)) as connection:
                sent = json.dumps({"model": server.model, **body})
                connection.request("POST", f"/v1/{path}", sent, {"Content-Type": "application/json"})
                response = connection.getresponse()
                answer = response.read()
            assert response.status in (200, 429), answer
            report.statuses[str(response.status)] += 1
            time.sleep(0 if response.status == 200 else 0.01)

    def good() -> None:
        while time.monotonic() < end:
            started = time.monotonic()
            while not (status := _first_token(server)):
                time.sleep(0.05)
            report.waits.append(time.monotonic() - started)
            report.statuses[f"good {status}"] += 1
            time.sleep(0.05)

    def health() -> None:
        while time.monotonic() < end:
            started = time.monotonic()
            with closing(server.connect(_REQUEST_SECONDS)) as connection:
                connection.request("GET", "/health")
                assert connection.getresponse().status == 200
            report.health.append(time.monotonic() - started)
            time.sleep(0.05)

    works: list[Callable[[], None]] = [partial(costly, path, body) for path, body in COSTLY] + [good, health]

    def noting(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            report.failures.append(traceback.format_exc())

    threads = [threading.Thread(target=noting, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not report.waits or max(report.waits) > max_wait:
        report.failures.append(f"a first token took more than {max_wait:g} s beside costly requests")
    if not report.health or max(report.health) > MAX_HEALTH_SECONDS:
        report.failures.append(f"/health took more than {MAX_HEALTH_SECONDS:g} s beside costly requests")
    return report


def _first_token(server: Server) -> int:
    """Status 200 once a stream has its first token; 0 if the queue is full."""
    body = {"model": server.model, "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, "stream": True}
    with closing(server.connect(_REQUEST_SECONDS)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status == 429:
            return 0
        assert response.status == 200, response.read(300)
        while not (line := response.readline()).startswith(b"data: {"):
            assert line, "the stream ended without a token"
        return 200


def _streamed(server: Server, asked: Asked, salt: str) -> float:
    """Seconds to the first token of a stream whose text must be the expected one."""
    body: dict[str, Any] = {**asked.body, "model": server.model, "stream": True, "cache_salt": salt}
    connection = server.connect(_REQUEST_SECONDS)
    try:
        started = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, (response.status, response.read(300))
        text, first = "", 0.0
        while line := response.readline():
            if not line.startswith(b"data: "):
                continue
            first = first or time.monotonic() - started
            if line.startswith(b"data: [DONE]"):
                break
            event = json.loads(line[6:])
            assert "error" not in event, event
            text += event["choices"][0]["text"] if event["choices"] else ""
        assert text == asked.text, (text, asked.text)
        return first
    finally:
        connection.close()


def _busy(server: Server) -> list[str]:
    """What keeps a server that nobody asks from being idle."""
    deadline = time.monotonic() + _IDLE_SECONDS
    while True:
        metrics = dict(re.findall(r"^(selfspec_\w+) (\S+)$", server.get("/metrics")[1], re.MULTILINE))
        names = ("selfspec_decoding_texts", "selfspec_waiting_texts", "selfspec_kv_cache_bytes")
        busy = [f"{name} is {metrics[name]} at the end" for name in names if float(metrics[name])]
        if not busy or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    if float(metrics["selfspec_failed_texts_total"]):
        busy.append("texts failed in the server")
    before = sum(server.process.cpu_times()[:2])
    time.sleep(1.0)
    used = sum(server.process.cpu_times()[:2]) - before
    if used > 0.2:
        busy.append(f"the idle server used {used:.2f} s of processor time in a second")
    return busy


def _around(looks: Sequence[int], first: float, last: float) -> int:
    """The median of those between two shares of the time; of all if these are few."""
    part = looks[int(first * len(looks)) : int(last * len(looks))] or looks
    return int(median(part)) if part else 0
