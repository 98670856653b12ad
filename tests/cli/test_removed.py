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
