"""A process of a divided model that falls silent: the server says so, answers its clients, and ends."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from layerskip_models.parallel.rank_watch import RankWatch, interval_of
from layerskip_models.parallel.ranks import RankError, Ranks
from rank_processes import RankFailed, on_ranks
from running_server import running_server
from selfspec import SelfSpecGenerator
from selfspec.cli.main import app as cli
from selfspec.engine.engine import Engine
from selfspec.engine.results import StepOutput
from tiny_llama import tiny_llama, tiny_tokenizer


class Counts:
    """A store in one process."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}

    def add(self, key: str, amount: int, /) -> int:
        self.held[key] = self.held.get(key, 0) + amount
        return self.held[key]


def test_a_rank_without_signs_of_life_is_named_and_then_lost() -> None:
    store = Counts()
    watch = RankWatch(3, 80.0, store)
    for _ in range(10):  # the first look is what the others are compared with
        store.add("selfspec/alive/2", 1)
        watch.look(5)
    assert watch.warning == "rank 1 has given no sign of life for 45 seconds"
    assert str(watch.explain(RankError("a sum failed"))) == f"a sum failed; {watch.warning}"
    store.add("selfspec/alive/1", 1)
    watch.look(5)
    assert watch.warning is None
    with pytest.raises(RankError, match=r"ranks 1, 2 have given no sign of life for \d+ seconds.*start all processes"):
        for _ in range(20):
            watch.look(5)


def test_time_in_which_the_first_process_was_stopped_is_nobodys_silence() -> None:
    watch = RankWatch(2, 80.0, Counts())
    watch.look(5)
    watch.look(100_000)
    assert watch.warning is None
    assert interval_of(80.0) == 5.0
    assert interval_of(2.0) == 0.25


def _speak_to_nobody(gave_up: Path) -> bool:
    """On rank 1: whether rank 0 gave up before this process ended."""
    ranks = Ranks.join(torch.device("cpu"))
    if ranks.rank == 1:
        until(gave_up.exists, 20)
        return True
    try:
        ranks.from_first(str)
        ranks.from_first(str)
    finally:
        gave_up.touch()
    return False


def test_rank_0_does_not_wait_for_ever_for_those_who_should_listen(tmp_path: Path) -> None:
    found = on_ranks(2, _speak_to_nobody, tmp_path / "gave up", environment={"SELFSPEC_RANK_TIMEOUT": "0.5"})
    assert isinstance(found[0], RankFailed)
    assert "did not answer within 0.5 seconds" in str(found[0])
    assert found[1] is True


def _listen_late() -> str:
    ranks = Ranks.join(torch.device("cpu"))
    return ranks.from_first(lambda: time.sleep(1.2) or "typed")


def test_the_others_wait_for_rank_0_as_long_as_it_takes() -> None:
    assert on_ranks(2, _listen_late, environment={"SELFSPEC_RANK_TIMEOUT": "0.5"}) == ["typed", "typed"]


class HeldUp(Engine):
    """Its step does not come back, or fails as one between processes does."""

    release = threading.Event()
    raises: Exception | None = None

    def step(self) -> list[StepOutput]:
        if self.raises is not None:
            raise self.raises
        self.release.wait(20)
        return super().step()


@pytest.mark.parametrize("way", ["watch", "step"])
def test_clients_get_an_error_and_the_server_ends(
    way: str, monkeypatch: pytest.MonkeyPatch, engine64: SelfSpecGenerator
) -> None:
    engine64.tokenizer = tiny_tokenizer()
    monkeypatch.setattr(HeldUp, "release", threading.Event())
    monkeypatch.setattr(HeldUp, "raises", RankError("rank 0 cannot go on: rank 1") if way == "step" else None)
    monkeypatch.setattr("selfspec.serve.app.rank0_engines", lambda *options: HeldUp)
    with running_server(engine64) as server:
        found: list[tuple[int, str, str]] = []

        def ask() -> None:
            found.append(reply(f"{server.base}/v1/completions", {"model": "demo", "prompt": "abc", "max_tokens": 4}))

        asking = threading.Thread(target=ask)
        asking.start()
        if way == "watch":
            until(lambda: server.metric("decoding_texts") == 1)
            server.app.state.scheduler.fail(RankError("rank 0 cannot go on: rank 1"))
        asking.join(20)
        assert found[0][0] == 503
        assert found[0][2] == "rank_lost"
        assert "rank 1" in found[0][1]
        server.thread.join(20)
        assert not server.thread.is_alive()  # without waiting for the round
        assert isinstance(server.app.state.scheduler.failure, RankError)
        HeldUp.release.set()


def test_health_says_which_rank_is_silent(engine64: SelfSpecGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    engine64.tokenizer = tiny_tokenizer()
    watch = RankWatch(2, 80.0, Counts())
    with running_server(engine64, watch=watch) as server:
        assert reply(f"{server.base}/health")[0] == 200
        for _ in range(10):
            watch.look(5)
        status, why, _ = reply(f"{server.base}/health")
        assert status == 503
        assert "rank 1 has given no sign of life" in why


def reply(url: str, body: dict[str, Any] | None = None) -> tuple[int, str, str]:
    """Status, message and code of the error; 0 where nobody listens."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, "", ""
    except urllib.error.HTTPError as error:
        told = json.loads(error.read())["error"]
        return error.code, told["message"], told["code"]
    except OSError:
        return 0, "", ""


# Two real processes, of which one is stopped


def until(true: Callable[[], object], seconds: float = 60) -> None:
    for _ in range(int(seconds / 0.05)):
        if true():
            return
        time.sleep(0.05)
    raise AssertionError("waited in vain")


def _serve(folder: Path, port: int, errors: Path, variables: dict[str, str]) -> None:
    os.environ.update(variables)
    torch.set_num_threads(1)
    file = errors.open("w")
    sys.stderr = file
    try:
        cli(["serve", str(folder), "--port", str(port), "--device", "cpu", "--policy", "ar", "--served-name", "demo"])
    except SystemExit as end:
        os._exit(int(end.code or 0))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, list[Any], Path]]:
    """Address, both processes, and what rank 0 writes to standard error."""
    folder = tmp_path / "model"
    tiny_llama(heads=4, kv_heads=2, num_layers=12, seed=3, max_position_embeddings=40_000).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    port, meeting, context = _free_port(), _free_port(), multiprocessing.get_context("fork")
    processes = []
    for rank in range(2):
        variables = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(meeting), "SELFSPEC_RANK_TIMEOUT": "6",
        }  # fmt: skip
        process = context.Process(target=_serve, args=(folder, port, tmp_path / f"errors-{rank}", variables))
        process.start()
        processes.append(process)
    try:
        base = f"http://127.0.0.1:{port}"
        until(lambda: reply(f"{base}/health")[0] == 200)
        yield base, processes, tmp_path / "errors-0"
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.slow
@pytest.mark.parametrize("decoding", [False, True])
def test_a_stopped_process_ends_the_server(decoding: bool, served: tuple[str, list[Any], Path]) -> None:
    base, (first, second), errors = served
    url = f"{base}/v1/completions"
    assert reply(url, {"model": "demo", "prompt": "ab", "max_tokens": 4})[0] == 200
    lines: list[str] = []

    def read() -> None:
        body = json.dumps({"model": "demo", "prompt": "ab", "max_tokens": 30_000, "stream": True}).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            lines.extend(line.decode() for line in answer if line.strip())

    reading = threading.Thread(target=read)
    if decoding:
        reading.start()
        until(lambda: lines)
    os.kill(second.pid, signal.SIGSTOP)
    said: list[tuple[int, str, str]] = []
    until(lambda: said.append(reply(f"{base}/health")) or said[-1][0] != 200)
    assert said[-1][0] == 503
    assert "rank 1" in said[-1][1]
    first.join(30)
    assert first.exitcode == 1
    if decoding:
        reading.join(10)
        assert "rank 1" in json.loads(lines[-1].removeprefix("data: "))["error"]["message"]
    (line,) = [line for line in errors.read_text().splitlines() if line.startswith("error: ")]
    assert "rank 1" in line
    os.kill(second.pid, signal.SIGCONT)
    second.join(30)
    assert second.exitcode == 1


@pytest.mark.slow
def test_a_killed_process_ends_the_server_although_nobody_asks(served: tuple[str, list[Any], Path]) -> None:
    _, (first, second), errors = served
    second.kill()
    first.join(30)
    assert first.exitcode == 1
    assert "rank 1" in errors.read_text()


@pytest.mark.slow
def test_an_idle_server_lives_longer_than_the_time_limit(served: tuple[str, list[Any], Path]) -> None:
    base, (first, second), _ = served
    time.sleep(14)
    assert reply(f"{base}/health")[0] == 200
    assert reply(f"{base}/v1/completions", {"model": "demo", "prompt": "ab", "max_tokens": 4})[0] == 200
    os.kill(first.pid, signal.SIGTERM)
    first.join(20)
    second.join(20)
    assert (first.exitcode, second.exitcode) == (-signal.SIGTERM, 0)
