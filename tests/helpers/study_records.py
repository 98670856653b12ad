"""Reports in a test know the records of `bench.experiments`, too."""

from __future__ import annotations

import pytest

from bench.experiments.record_kinds import STUDIES
from bench.report.record_kinds import KINDS


@pytest.fixture
def with_studies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `python -m bench.experiments`."""
    for command, kind in STUDIES.items():
        monkeypatch.setitem(KINDS, command, kind)
