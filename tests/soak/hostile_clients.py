"""A server of which a third of the clients are hostile. The others must get their texts, in time.

    python -m tests.soak hostile --minutes 30

It starts a server of the demo model on 127.0.0.1 and ends with status 1 if a text of the others is not the one that the same
request gives alone, if one of them waits longer for its first token than allowed, if a hostile request is answered with an
error of the server's own or with another's secret, if the server's memory grows after a minute, or if the server ends.
"""

from __future__ import annotations

import json
import re
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import Any

from bench.engines.servers import Server
from tests.soak.hostile_requests import (
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
from tests.soak.serving_soak import PROMPTS, Asked

ATTACKS: tuple[Callable[[Server, Random], None], ...] = (
    malformed_body, wrong_types, schema_bomb, policy_bomb, half_a_request, hang_up, slow_reader, too_many, other_page,
    many_salts, guesser(PROMPTS),
)  # fmt: skip
OPTIONS = (
    "--allow-policy", "any", "--prefix-cache", "64MB", "--batch-size", "16", "--max-waiting", "64", "--max-tokens", "400",
)  # fmt: skip
_MOST_FAILURES = 20
_PAUSE_SECONDS = 0.3  # between requests of a client, at most: the machine is not to be full of honest work alone
_REQUEST_SECONDS = 120.0


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
        most_wait: float,
        most_growth: float,
        advance: Callable[[str], object] = lambda text: None,
    ) -> HostileReport:
        """All clients at once, for so long. most_wait: seconds to a first token. most_growth: of memory, as a share.

        advance: called about once a second.
        """
        report, started = self.report, time.monotonic()
        looks = self._serve_all(server, seconds, advance)
        if not server.process.is_running() or server.get("/health")[0] != 200:
            report.failures.append("the server has ended")
            return report
        report.warm_rss, report.end_rss = _around(looks, 0.2, 0.4), _around(looks, 0.8, 1.0)
        report.cores = sum(server.process.cpu_times()[:2]) / (time.monotonic() - started)
        counts = re.findall(
            r'^selfspec_requests_total\{.*status="(\d+)"\} (\S+)$', server.get("/metrics")[1], re.MULTILINE
        )
        report.statuses = dict(sum((Counter({status: int(float(count))}) for status, count in counts), Counter()))
        if any(status >= "500" for status in report.statuses):
            report.failures.append("requests were answered with an error of the server's own")
        if len(server.process.children(recursive=True)) > 1:
            report.failures.append("the server has more processes than the one that tries schemas")
        if report.growth > most_growth:
            report.failures.append(f"memory grew by {report.growth:.1%}, at most {most_growth:.1%} are allowed")
        if report.slowest > most_wait:
            report.failures.append(f"a first token took {report.slowest:.2f} s, at most {most_wait:g} are allowed")
        return report

    def _serve_all(self, server: Server, seconds: float, advance: Callable[[str], object]) -> list[int]:
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
                report, rss = self.report, server.process.memory_info().rss if server.process.is_running() else 0
                looks.append(rss)
                attacks = report.attacks.total()
                advance(f"{report.exact} texts, slowest {report.slowest:.2f} s, {attacks} attacks, {rss >> 20} MiB")
        return looks

    def _failed(self, text: str) -> None:
        with self._lock:
            self.report.failures.append(text)

    def _goes_on(self, end: float) -> bool:
        return time.monotonic() < end and len(self.report.failures) < _MOST_FAILURES

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


def _around(looks: Sequence[int], first: float, last: float) -> int:
    """The median of those between two shares of the time; of all if these are few."""
    part = looks[int(first * len(looks)) : int(last * len(looks))] or looks
    return int(median(part)) if part else 0
