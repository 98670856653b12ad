"""Memory that a process has, as Linux counts it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def resident_bytes(pid: int | None = None) -> int | None:
    """In memory now, files that are mapped included; None where the system is not Linux. pid: None for this process."""
    return _field(pid, "VmRSS")


def private_bytes() -> int | None:
    """Return this process's memory now, without the files that it maps."""
    return _field(None, "RssAnon")


def peak_bytes_of(pid: int | None = None) -> int | None:
    """Return the most that has been in memory since the process began, or since `forget_peak`."""
    return _field(pid, "VmHWM")


def forget_peak(pid: int | None = None) -> None:
    """Let the peak begin at what is in memory now. Without effect where the system does not allow it."""
    with suppress(OSError):
        _folder(pid).joinpath("clear_refs").write_text("5", encoding="ascii")


def _folder(pid: int | None) -> Path:
    return Path("/proc") / str(os.getpid() if pid is None else pid)


def _field(pid: int | None, name: str) -> int | None:
    try:
        text = _folder(pid).joinpath("status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(f"{name}:")), None)
