"""The fuzz command finds nothing, and finds what is planted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import selfspec.engine.verification
import tests.adverse.fuzz as fuzzing
from tests.adverse.fuzz import fuzz, main, run_model, summary

CASES = 30


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what a process of its own is set to."""
    monkeypatch.setattr(fuzzing, "_prepare", lambda: None)


def test_no_generated_case_fails(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = fuzz(1, CASES)
    assert [outcome for outcome in outcomes if outcome.failed] == []
    assert sorted(outcome.number for outcome in outcomes) == list(range(CASES))
    assert sum(outcome.kind == "equal" for outcome in outcomes) > CASES // 2
    assert summary(outcomes).startswith(f"{CASES} cases, 0 failed")
    alone = run_model(1, 1, [CASES - 3])  # of the second model
    assert alone == [outcomes[CASES - 3]]


def test_a_fault_is_found_and_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Accepting one draft too many."""

    def generous(drafts: Sequence[int], target: Sequence[int]) -> int:
        return min(len(drafts), len(target) - 1)

    with monkeypatch.context() as faulty:
        faulty.setattr(selfspec.engine.verification, "accept_greedy", generous)
        failed = [outcome.number for outcome in fuzz(1, CASES // 5) if outcome.failed]
        assert failed
        assert f"python -m tests.adverse.fuzz --seed 1 --case {failed[0]}" in capsys.readouterr().out
        assert main(["--seed", "1", "--case", str(failed[0])]) == 1
        assert "FAILED" in capsys.readouterr().out
    assert main(["--seed", "1", "--case", str(failed[0])]) == 0
