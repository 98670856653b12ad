"""Settings of all tests of the benchmarks."""

from __future__ import annotations

import pytest

import bench.machine.bandwidth


@pytest.fixture(autouse=True)
def brief_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command measures the memory's bandwidth: here of few bytes and once, not of 256 MiB for a second."""
    monkeypatch.setattr(bench.machine.bandwidth, "_CPU_BYTES", 1 << 20)
    monkeypatch.setattr(bench.machine.bandwidth, "_SECONDS", 0.0)
