"""Settings of all tests of the benchmarks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from click.testing import Result
from typer.testing import CliRunner

import bench.machine
from bench.commands.bench_app import app


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bandwidth is measured once and of few bytes, not 256 MiB for a second. Forked peers have imported all."""
    monkeypatch.setattr(bench.machine, "_CPU_BYTES", 1 << 20)
    monkeypatch.setattr(bench.machine, "_SECONDS", 0.0)
    monkeypatch.setattr("bench.engines.peer_process.START_METHOD", "fork")


@pytest.fixture(scope="session")
def invoke() -> Callable[..., Result]:
    """Run `selfspec-bench` with these arguments, in this process. It must end with this status."""

    def run(*arguments: object, status: int = 0) -> Result:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == status, result.output
        return result

    return run
