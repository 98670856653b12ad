"""Which tests the sanitizers run, and what they say where there are none."""

from __future__ import annotations

import re
import shutil
import sys

import pytest

import sanitized

CALLS = r"kernels\.native_(linear|layers)|exact_rooms|from test_native"


def test_every_test_that_calls_the_kernels_is_among_them() -> None:
    tests = sanitized.found()
    found = {
        name for name, path in tests.items() if re.search(CALLS, (sanitized.ROOT / path).read_text(encoding="utf-8"))
    }
    found |= {name for name in tests if name.startswith("native")}
    assert found - {"sanitized"} <= set(sanitized.FILES) <= set(tests)
    assert set(sanitized.SHORT) <= set(sanitized.FILES)


def test_without_sanitizers_there_is_one_line_and_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["sanitized.py", "--short"])
    assert sanitized.main() == 0
    assert capsys.readouterr().out == "sanitizers skipped: they need gcc on Linux\n"
