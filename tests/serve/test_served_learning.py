"""`--learn-exits`: exits learn while the server is idle, answers stay the same, and the thread ends with the server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import selfspec.serve.exit_learning as exit_learning
from layerskip_models import DEMO_PATH
from layerskip_models.exits.adapter import ExitAdapters
from layerskip_models.exits.folder import config_for, load_adapters, save_adapters
from running_server import RunningServer, running_server
from selfspec import SelfSpecGenerator
from selfspec.cli.main import app
from selfspec.exits.learning import LearningReport, LearnSettings
from selfspec.serve.exit_learning import ExitLearning
from selfspec.serve.server_metrics import ServerMetrics

QUICK = LearnSettings(batch_rows=32, judge_every=2, least_held_out=8, sureness=0.0, learning_rate=2e-2)


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """Untrained adapters for the demo model."""
    model = SelfSpecGenerator.from_pretrained(DEMO_PATH).model
    folder = tmp_path / "start"
    folder.mkdir()
    torch.manual_seed(0)
    save_adapters(ExitAdapters(config_for(model, exit_layers=(1, 2), rank=8)), folder)
    return folder


def until(found: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not found():
        assert time.monotonic() < end
        time.sleep(0.02)


def answers(server: RunningServer, first: int = 0) -> list[str]:
    prompts = [f"{word} {number}" for number in range(first, first + 6) for word in ("Item", "The year")]
    with server.client() as client:
        answer = client.completions.create(
            model="demo", prompt=prompts, max_tokens=20, temperature=0, extra_body={"policy": "ls:2-4"}
        )
    return [choice.text for choice in answer.choices]


def test_the_server_learns_when_it_is_idle(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_learning, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(exit_learning, "_WAIT_SECONDS", 0.02)
    generator = SelfSpecGenerator.from_pretrained(DEMO_PATH)
    expected = [
        one.text
        for one in generator.generate_batch(
            [f"{word} {number}" for number in range(6) for word in ("Item", "The year")], max_new_tokens=20, policy="ar"
        )
    ]
    learner = generator.learn_exits(tmp_path / "learned", start=start, settings=QUICK)
    with running_server(generator, learner=learner) as server:
        assert answers(server) == expected
        thread = server.app.state.learning
        until(lambda: server.metric("exit_learning_steps") > 2 and server.metric("exit_learning_replacements") > 0)
        assert server.metric("exit_learning_rows") > 100
        assert server.metric("exit_learning_comparisons") > 0
        assert server.metric("exit_learning_agreement", exit_layer="1", adapter="now") > 0
        assert server.metric("exit_learning_agreement", exit_layer="1", adapter="start") > 0
        assert answers(server) == expected
        assert thread.alive
    assert not thread.alive
    assert load_adapters(tmp_path / "learned").config.exit_layers == (1, 2)
    assert not [one for one in threading.enumerate() if one.name == "selfspec-exits"]


def test_a_server_that_does_not_learn_has_no_thread() -> None:
    generator = SelfSpecGenerator.from_pretrained(DEMO_PATH)
    with running_server(generator) as server:
        assert server.app.state.learning is None
        answers(server)
        assert server.metric("exit_learning_rows") == 0
        assert not [one for one in threading.enumerate() if one.name == "selfspec-exits"]
    assert generator.bound.online is None


class ScriptedLearner:
    """Asks `go_on` again and again, until it is false."""

    def __init__(self) -> None:
        self.turns = 0
        self.report = LearningReport(rows=3)

    def learn(self, *, go_on: Callable[[], bool]) -> LearningReport:
        while go_on():
            self.turns += 1
            time.sleep(0.005)
        return self.report


def test_learning_waits_for_idle_time_and_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_learning, "_WAIT_SECONDS", 0.001)
    learner: Any = ScriptedLearner()
    state = SimpleNamespace(idle=0.0)
    thread = ExitLearning(learner, ServerMetrics(), lambda: state.idle)
    time.sleep(0.2)
    assert learner.turns == 0  # there are texts
    state.idle = 5.0
    until(lambda: learner.turns > 3)
    state.idle = 0.0
    time.sleep(0.1)
    before = learner.turns
    time.sleep(0.2)
    assert learner.turns == before
    thread.close()
    assert not thread.alive


def test_a_share_of_busy_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on beside texts, and rests in between: 5 ms of work in at least 50 ms."""
    monkeypatch.setattr(exit_learning, "_WAIT_SECONDS", 0.001)
    learner: Any = ScriptedLearner()
    thread = ExitLearning(learner, ServerMetrics(), lambda: 0.0, share=0.1)
    started = time.monotonic()
    until(lambda: learner.turns >= 4)
    thread.close()
    assert time.monotonic() - started >= 3 * 0.045


def test_an_error_of_learning_is_no_error_of_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exit_learning, "_WAIT_SECONDS", 0.001)

    class Failing(ScriptedLearner):
        def learn(self, *, go_on: Callable[[], bool]) -> LearningReport:
            self.turns += 1
            raise OSError("No space left on device")

    learner: Any = Failing()
    thread = ExitLearning(learner, ServerMetrics(), lambda: 9.0)
    until(lambda: learner.turns > 2)
    assert thread.alive
    thread.close()
    assert "exits could not learn" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--learn-share", "0.2"],
            "error: --learn-share says how much exits may learn: add --learn-exits, or leave it out\n",
        ),
        (["--learn-exits", "{file}/x"], "error: cannot write {file}/x: Not a directory; choose another path\n"),
    ],
)
def test_options_that_cannot_be(options: list[str], message: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    result = CliRunner().invoke(app, ["serve", "--port", "0", *(one.format(file=file) for one in options)])
    assert result.exit_code == 2
    assert result.stderr == message.format(file=file)


def test_a_model_without_adapters_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--learn-exits", str(tmp_path / "x")])
    assert result.exit_code == 2
    assert "has no exit adapters to begin with: train them with selfspec train-exit" in result.stderr
    assert result.stderr.count("error:") == 1 and "Traceback" not in result.stderr
