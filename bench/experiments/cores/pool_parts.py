"""What the parts of a job on the team of threads cost, measured in C (`pool_cost.c`)."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.record import Line
from layerskip_models.kernels.library import LIBRARY

PARTS = {
    "increment": "an increment of a counter",
    "transfer": "a store, until another core has read it",
    "wake_call": "waking a thread, for the caller",
    "wake": "waking a thread, until it runs",
    "job": "a job without phases",
    "phase": "a phase of empty pieces, one per thread",
}
"""The names that a record has for what was measured, and what each means."""


def measure_parts(most_threads: int) -> Iterator[Line]:
    """A line for each measurement. most_threads: of phases; lines of memory are measured between two cores.

    Raises ValueError without a C compiler, or with fewer than two processors.
    """
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2:
        raise ValueError("the parts of a job are measured between two processors, on Linux")
    first, second, *_ = sorted(os.sched_getaffinity(0))
    folder, source = LIBRARY.parent, Path(__file__).with_name("pool_cost.c")
    with tempfile.TemporaryDirectory() as built:
        program = str(Path(built) / "pool_cost")
        command = ["cc", "-O2", "-std=gnu11", "-pthread", "-I", str(folder), "-o", program]
        try:
            subprocess.run([*command, str(source), str(folder / "pool.c")], check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ValueError("the parts of a job are measured in C, which needs a compiler: cc") from error
        arguments = [program, str(first), str(second), str(most_threads)]
        said = subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=300).stdout
    for line in said.splitlines():
        name, threads, nanoseconds = line.split()
        yield {"kind": "part", "name": name, "threads": int(threads), "nanoseconds": float(nanoseconds)}
