"""Settings of all tests of the benchmarks."""

from __future__ import annotations

import pytest

import bench.machine


@pytest.fixture(autouse=True)
def brief_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command measures the memory's bandwidth: here of few bytes and once, not of 256 MiB for a second."""
    monkeypatch.setattr(bench.machine, "_CPU_BYTES", 1 << 20)
    monkeypatch.setattr(bench.machine, "_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def forked_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers are forked: they have imported everything already."""
    monkeypatch.setattr("bench.engines.peer_process.START_METHOD", "fork")
