"""Reports in a test know the records of `bench.experiments`, too."""

from __future__ import annotations

import pytest


@pytest.fixture
def with_studies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `python -m bench.experiments`."""
    from bench.experiments.record_kinds import STUDIES
    from bench.report.record_kinds import KINDS

    for command, kind in STUDIES.items():
        monkeypatch.setitem(KINDS, command, kind)
