"""Processes that want the same cores as a test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_WORK = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this
parent, end = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
print(flush=True)
while time.monotonic() < end and os.getppid() == parent:
    for _ in range(20000):
        pass
"""


@contextmanager
def busy_processes(count: int, seconds: float) -> Iterator[list[int]]:
    """Run `count` processes of one thread each, which compute without a pause, within the block. Yields their ids.

    seconds: they end by themselves after this time, or when this process is gone; all are killed at the end of the block.
    """
    command = [sys.executable, "-I", "-S", "-c", _WORK, str(os.getpid()), str(seconds)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            # No setsid: Linux may divide the processor between process sessions first, which would change the fair share.
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
