"""A short soak; `python -m tests.adverse.soak --minutes 30` is the long one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.adverse.soak import MOST_TENSORS, Memory, SoakReport

ROOT = Path(__file__).parents[2]


_SOAK = """
import json
from tests.adverse.soak import Soak
report = Soak(threads=3, seed=20).run(20)
print(json.dumps({"failures": report.failures, "counts": dict(report.counts)}))
"""


@pytest.mark.slow
def test_calls_of_all_kinds_stay_exact() -> None:
    """In a process of its own: it counts live tensors, and what other tests leave behind changes meanwhile."""
    ran = subprocess.run(
        [sys.executable, "-c", _SOAK],
        cwd=ROOT,
        # Three threads with a team each would wait for each other most of the time.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout.splitlines()[-1])
    assert not report["failures"], report["failures"][0]
    counts = Counter(report["counts"])
    assert counts["exact"] > 5
    assert counts["refused"] and counts["raised"] + counts["broken off"] + counts["interrupted"]


def test_growth_is_a_failure() -> None:
    flat = Memory(1 << 30, 100, 1 << 20, 2)
    for grown in (
        Memory((1 << 30) + (64 << 20), 100, 1 << 20, 2),
        Memory(1 << 30, 101 + MOST_TENSORS, 1 << 20, 2),
        Memory(1 << 30, 100, 1 << 22, 2),
        Memory(1 << 30, 100, 1 << 20, 3),
    ):
        report = SoakReport(warm=flat, end=grown)
        report.check_memory()
        assert len(report.failures) == 1
    report = SoakReport(warm=flat, end=flat)
    report.check_memory()
    assert not report.failures
