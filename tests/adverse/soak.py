"""A server under hostile clients: the others' texts stay exact and come in time, and memory ends where it was.

    python -m tests.adverse.soak --minutes 30 --seed 0

starts `selfspec serve` in a process of its own. A third of its clients attack; then four ask for what costs most, beside one
that asks for little. A failure is a text of the others that is not the one that the same request gives alone, a first token
that takes longer than allowed, a hostile request that is answered with an error of the server's own or with another's secret,
memory that grows, a server that ends, and one that is not idle when all clients have left.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
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

from bench.engines.servers import Server, selfspec_server
from layerskip_models import DEMO_PATH
from selfspec import SelfSpecGenerator
from selfspec.detokenize import before_stop
from tests.adverse.hostile_requests import ATTACKS, PROMPTS

LENGTHS = (1, 12, 60, 150)
SEEDED = "auto:cost=layers"
OPTIONS = (
    "--allow-policy", "any", "--prefix-cache", "64MB", "--batch-size", "16", "--max-waiting", "64", "--max-tokens", "400",
)  # fmt: skip
_BRANCHES = [{"properties": {f"k{i}": {"type": "integer"}}, "required": [f"k{i}"]} for i in range(300)]
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


Asked = tuple[dict[str, Any], str]
"""A request, and the text that must come of it."""


def expected_answers() -> list[Asked]:
    """Requests, each run alone: greedy by several policies, sampled with seeds, with stop strings."""
    generator, asked = SelfSpecGenerator.from_pretrained(DEMO_PATH, local_files_only=True), list[Asked]()
    for prompt in PROMPTS:
        for length in LENGTHS:
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": length}
            greedy = generator.generate(prompt, max_new_tokens=length, do_sample=False, policy="ar").text or ""
            asked += [
                ({**body, "temperature": 0, "policy": policy}, greedy) for policy in (None, "ls:3-4", "del", "ar")
            ]
            if length > 12:
                options: dict[str, Any] = {"do_sample": False, "stop_strings": ["e", "\n\n"]}
                stopped = generator.generate(prompt, max_new_tokens=length, policy="ar", **options).text or ""
                stops = options["stop_strings"]
                asked.append(({**body, "temperature": 0, "stop": stops}, before_stop(stopped, stops)))
            for seed in (1, 2):
                sampling: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": seed}
                fresh = SelfSpecGenerator(generator.model, generator.tokenizer)  # whose policy has learned nothing
                drawn = fresh.generate(prompt, max_new_tokens=length, do_sample=True, policy=SEEDED, **sampling).text
                asked.append(({**body, **sampling}, drawn or ""))
    return asked


@dataclass(slots=True)
class Report:
    """waits: seconds to the first token of each text of the others, all of them exact. attacks: by kind.

    statuses: of all requests. health: seconds to answers of /health. cores: that the server had, on average: where other
    programs took them, waits are theirs as well. *_rss: resident memory of the server, in bytes: the median of the second
    fifth of the time, and of the last one. (Single looks differ by some 5 %, by what is being served.)
    """

    waits: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    attacks: list[str] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    warm_rss: int = 0
    end_rss: int = 0
    cores: float = 0.0

    def lines(self) -> list[str]:
        """Say what is printed at the end."""
        waits, attacks = sorted(self.waits) or [0.0], dict(Counter(self.attacks))
        return [
            f"exact texts {len(self.waits)}, attacks {attacks}, statuses {dict(sorted(self.statuses.items()))}",
            f"seconds to a first token: median {median(waits):.3f}, p99 {waits[len(waits) * 99 // 100]:.3f}, slowest "
            f"{waits[-1]:.3f} ({self.cores:.2f} cores); to /health: slowest {max(self.health, default=0):.3f}",
            f"resident memory: {self.warm_rss >> 20} MiB in the second fifth, {self.end_rss >> 20} MiB in the last",
            *(f"FAILED: {failure}" for failure in self.failures),
        ]

    def work(self, end: float, works: Sequence[Callable[[], None]], look: Callable[[], None] = lambda: None) -> None:
        """Do each thing over and over in a thread of its own, and note what it raises. look: called until all have ended."""

        def repeat(work: Callable[[], None]) -> None:
            while time.monotonic() < end and len(self.failures) < _MAX_FAILURES:
                try:
                    work()
                except Exception:
                    self.failures.append(traceback.format_exc())

        threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.1)
            look()


def hostile_trial(
    server: Server,
    seconds: float,
    *,
    clients: int,
    seed: int,
    asked: Sequence[Asked],
    max_wait: float,
    max_growth: float,
) -> Report:
    """Run all clients at once, for so long, a third of them hostile.

    seed: random seed of all choices. max_wait: seconds to a first token. max_growth: of memory, as a share.
    """
    report, started, looks = Report(), time.monotonic(), list[int]()

    def hostile(random: Random) -> None:
        attack = random.choice(ATTACKS)
        report.attacks.append(attack.__name__)
        attack(server, random)
        time.sleep(random.random() * _PAUSE_SECONDS)

    def honest(random: Random, salt: str) -> None:
        body, expected = random.choice(asked)
        status, wait, text = _streamed(server, {**body, "cache_salt": salt})
        assert (status, text) == (200, expected), f"an honest request: {body}"
        report.waits.append(wait)
        time.sleep(random.random() * _PAUSE_SECONDS)

    randoms, third = [Random(f"{seed} {i}") for i in range(clients)], max(1, clients // 3)
    works = [partial(hostile, random) for random in randoms[:third]]
    works += [partial(honest, random, f"salt {random.random()}") for random in randoms[third:]]
    report.work(
        started + seconds,
        works,
        lambda: looks.append(server.process.memory_info().rss if server.process.is_running() else 0),
    )
    if not server.process.is_running() or server.get("/health")[0] != 200:
        report.failures.append("the server has ended")
        return report
    fifth = len(looks) // 5
    report.warm_rss, report.end_rss = int(median(looks[fifth : 2 * fifth + 1])), int(median(looks[4 * fifth :]))
    report.cores = sum(server.process.cpu_times()[:2]) / (time.monotonic() - started)
    metrics = server.get("/metrics")[1]
    for status, count in re.findall(r'^selfspec_requests_total\{.*status="(\d+)"\} (\S+)$', metrics, re.MULTILINE):
        report.statuses[status] += int(float(count))
    growth, slowest = report.end_rss / report.warm_rss - 1, max(report.waits, default=0.0)
    for failed, message in (
        (any(status >= "500" for status in report.statuses), "requests got an error of the server's own"),
        (len(server.process.children(recursive=True)) > 2, "more processes than one for schemas and its tracker"),
        (growth > max_growth, f"memory grew by {growth:.1%}, at most {max_growth:.1%} are allowed"),
        (slowest > max_wait, f"a first token took {slowest:.2f} s, at most {max_wait:g} are allowed"),
    ):
        report.failures += [message] if failed else []
    report.failures += _busy(server)
    return report


def costly_trial(server: Server, seconds: float, *, max_wait: float) -> Report:
    """Four clients send a costly request each, over and over, beside one good client and one that looks at /health.

    max_wait: seconds to the good client's first token, which may have to ask again when the queue is full.
    """
    report = Report()

    def costly(path: str, body: dict[str, Any]) -> None:
        with closing(server.connect(_REQUEST_SECONDS)) as connection:
            sent = json.dumps({"model": server.model, **body})
            connection.request("POST", f"/v1/{path}", sent, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
        assert response.status in (200, 429), answer
        report.statuses[str(response.status)] += 1
        time.sleep(0 if response.status == 200 else 0.01)

    def good() -> None:
        started, status = time.monotonic(), 429
        while status == 429:
            asked = time.monotonic()
            status, wait, _ = _streamed(server, {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0})
            time.sleep(0.05)
        assert status == 200
        report.waits.append(asked - started + wait)

    def health() -> None:
        started = time.monotonic()
        assert server.get("/health")[0] == 200
        report.health.append(time.monotonic() - started)
        time.sleep(0.05)

    report.work(time.monotonic() + seconds, [*(partial(costly, path, body) for path, body in COSTLY), good, health])
    for times, allowed, what in (
        (report.waits, max_wait, "a first token"),
        (report.health, MAX_HEALTH_SECONDS, "/health"),
    ):
        if not times or max(times) > allowed:
            report.failures.append(f"{what} took more than {allowed:g} s beside costly requests")
    return report


def _streamed(server: Server, fields: dict[str, Any]) -> tuple[int, float, str]:
    """Status, seconds to the first token, and text of a stream."""
    body, started = {"model": server.model, "stream": True, **fields}, time.monotonic()
    with closing(server.connect(_REQUEST_SECONDS)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text, first = "", 0.0
        while response.status == 200 and not (line := response.readline()).startswith(b"data: [DONE]"):
            assert line, "the stream ended too early"
            if line.startswith(b"data: "):
                first = first or time.monotonic() - started
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += event["choices"][0]["text"] if event["choices"] else ""
    return response.status, first, text


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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.adverse.soak", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default 30)")
    parser.add_argument("--clients", type=int, default=12, help="clients, a third of them hostile (default 12)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--most-wait", type=float, default=2.0, help="seconds to a first token (default 2)")
    parser.add_argument("--most-growth", type=float, default=5.0, help="of the server's memory, in percent (default 5)")
    given = parser.parse_args(arguments)
    asked = expected_answers()
    limits: dict[str, float] = {"max_wait": given.most_wait, "max_growth": given.most_growth / 100}
    with selfspec_server(DEMO_PATH, OPTIONS) as server:
        report = hostile_trial(
            server, 60 * given.minutes, clients=given.clients, seed=given.seed, asked=asked, **limits
        )
    print("\n".join(report.lines()), flush=True)
    with selfspec_server(DEMO_PATH, COSTLY_OPTIONS) as server:
        costly = costly_trial(server, min(30.0, 60 * given.minutes), max_wait=given.most_wait)
    print("\n".join(costly.lines()))
    return int(bool(report.failures or costly.failures))


if __name__ == "__main__":
    sys.exit(main())
