"""What earlier versions had answers in one line with what to use instead."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from selfspec import removed
from selfspec.cli.main import COMMANDS, app


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["NAME"], "`selfspec NAME` was removed: use OTHER"),
        (["generate", "--gone=3"], "--gone was removed: use --other"),
        (["generate", "--gone", "3"], "--gone was removed: use --other"),
    ],
)
def test_what_was_removed_names_what_to_use(arguments: list[str], answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removed, "COMMANDS", {"NAME": "use OTHER"})
    monkeypatch.setattr(removed, "OPTIONS", {"--gone": "use --other"})
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [f"error: {answer}"]


def test_a_text_after_two_dashes_is_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removed, "OPTIONS", {"--gone": "use --other"})
    removed.refuse_removed("generate", ["--", "--gone"])


def test_nothing_that_exists_is_called_removed() -> None:
    assert not removed.COMMANDS.keys() & COMMANDS.keys()


@pytest.mark.parametrize("command", [["generate", "Hello"], ["chat"], ["serve"]])
def test_a_command_of_one_process_says_what_to_use_for_more(command: list[str]) -> None:
    result = CliRunner().invoke(app, command, env={"WORLD_SIZE": "2"})
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: this command runs in one process: start it without torchrun")
    assert "device_map='auto'" in line and "replicas" in line
