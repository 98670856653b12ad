"""The command that runs all adversaries: each by its own module, and a finding of one is a finding of the command."""

from __future__ import annotations

import importlib.util
import subprocess
from typing import Any

import pytest

from tests.fuzz import __main__ as trials


def test_each_trial_is_a_module() -> None:
    for (module, *_), _ in trials.TRIALS.values():
        assert importlib.util.find_spec(module) is not None, module


@pytest.mark.parametrize("finds", [(), ("changed files", "hostile clients")])
def test_a_finding_of_one_is_told_and_the_others_run(
    finds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        does = [*trials.TRIALS][len(ran)]
        ran.append(command)
        return subprocess.CompletedProcess(command, 1 if does in finds else 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert trials.main(["--minutes", "8", "--seed", "5"]) == bool(finds)
    assert len(ran) == len(trials.TRIALS)
    assert sum(float(command[command.index("--minutes") + 1]) for command in ran) == pytest.approx(8, abs=0.01)
    assert all(command[-2:] == ["--seed", "5"] for command in ran)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == ("FAILED: changed files, hostile clients" if finds else "nothing found by 6 trials")
