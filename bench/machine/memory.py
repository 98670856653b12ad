"""Memory: the most that one call had in tensors, and what a process has as Linux counts it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(device: torch.device, call: Callable[[], object]) -> int:
    """Largest sum of tensors alive during a call, less those alive before; KV cache included, weights not.

    CUDA: from the caching allocator. CPU: from torch's profiler, which slows the call; not for timing. The call may be
    made again, so it has to allocate anew each time.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    # Now and then, for a reason that was not found, the profiler returns a record without a single allocation.
    return next((peak for peak in (_profiled_peak(call) for _ in range(3)) if peak > 0), 0)


def _profiled_peak(call: Callable[[], object]) -> int:
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    results = profiler.profiler.kineto_results
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    in_use = peak = 0
    for _, change in sorted(changes, key=lambda item: item[0]):
        in_use += change
        peak = max(peak, in_use)
    return peak


@contextmanager
def _quiet() -> Iterator[None]:
    """The profiler writes lines of its own to standard error; they would tear a progress bar apart."""
    saved = os.dup(2)
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def resident_bytes(pid: int | None = None) -> int | None:
    """In memory now, files that are mapped included; None where the system is not Linux. pid: None for this process."""
    return _field(pid, "VmRSS")


def private_bytes() -> int | None:
    """Of this process, in memory now, without files that it maps."""
    return _field(None, "RssAnon")


def peak_bytes_of(pid: int | None = None) -> int | None:
    """The most that has been in memory since the process began, or since `forget_peak`."""
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
