"""The trial of hostile clients: a server stands some seconds of it, and each of its limits can be broken."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

import hostile_clients
from bench.engines.servers import Server
from hostile_clients import PROMPTS, Asked, HostileTrial, costly_trial
from hostile_requests import guesser
from layerskip_models import DEMO_PATH
from running_server import RunningServer, running_server
from selfspec import SelfSpecGenerator


@pytest.fixture(scope="module")
def generator() -> SelfSpecGenerator:
    return SelfSpecGenerator.from_pretrained(DEMO_PATH, prefix_cache="8MB")


def asked(generator: SelfSpecGenerator, prompt: str) -> Asked:
    result = generator.generate(prompt, max_new_tokens=6, do_sample=False, policy="ar")
    assert result.text is not None
    return Asked({"prompt": prompt, "max_tokens": 6, "temperature": 0}, result.text)


def as_a_process(server: RunningServer) -> Server:
    """This process: clients and server are both in it."""
    port = urlsplit(server.base).port
    assert port is not None
    return Server(name="served", label="served", port=port, model="demo", process=psutil.Process())


@pytest.mark.slow
def test_a_server_stands_some_seconds_of_it(generator: SelfSpecGenerator) -> None:
    trial = HostileTrial(clients=6, seed=1, asked=[asked(generator, prompt) for prompt in PROMPTS])
    settings: dict[str, Any] = {"batch_size": 8, "allowed_hosts": ("localhost", "127.0.0.1"), "max_new_tokens": 400}
    with running_server(generator, **settings) as server:
        report = trial.run(as_a_process(server), 6, max_wait=60, max_growth=10)
    assert not report.failures, report.lines()
    assert report.exact and report.attacks.total() > 5 and report.statuses["200"]


def test_each_limit_can_be_broken(generator: SelfSpecGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another text than alone, a prompt that can be guessed, a wait, memory, and a server's own error."""
    right = asked(generator, PROMPTS[0])
    wrong = Asked(right.body, right.text + "?")
    monkeypatch.setattr(hostile_clients, "ATTACKS", (guesser(PROMPTS[:1]),))
    trial = HostileTrial(clients=3, seed=1, asked=[right, wrong])
    with running_server(generator, share_prefixes=True) as server:
        server.app.state.metrics.requests.labels("/v1/completions", "500").inc()
        report = trial.run(as_a_process(server), 0.8, max_wait=0, max_growth=-1)
    told = "\n".join(report.failures)
    for failure in (
        "an honest request",
        "another client's prompt",
        "a first token took",
        "memory grew",
        "an error of the server",
    ):
        assert failure in told
    assert any(line.startswith("FAILED") for line in report.lines())


def test_each_limit_beside_costly_requests_can_be_broken(
    generator: SelfSpecGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostile_clients, "COSTLY", hostile_clients.COSTLY[:1])
    monkeypatch.setattr(hostile_clients, "MAX_HEALTH_SECONDS", 0.0)
    with running_server(generator) as server:
        report = costly_trial(as_a_process(server), 0.5, max_wait=0)
    assert [failure.partition(" took")[0] for failure in report.failures] == ["a first token", "/health"]
    assert report.statuses["200"] and report.statuses["good 200"] == len(report.waits)
    assert len(report.lines()) == 3
