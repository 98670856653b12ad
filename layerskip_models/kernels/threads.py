"""How many threads our kernels use, and which buffers must outlive a call because a late thread still reads them.

Nobody waits for a thread that loses its core in the middle of a call (see pool.c), so it may still read the call's arguments
long after the call has returned. They must not be freed before it is done: `keep` holds them until then.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple
from weakref import ref

import torch

from layerskip_models.fork_safe import fork_safe
from layerskip_models.kernels.library import pool_oldest

# A thread that lost its core is back within about 10 ms, and then needs a little longer to see that the job is over.
_RECLAIM_SECONDS = 0.2


class Usable(NamedTuple):
    """Numbers of processors and of physical cores. A core's hardware threads are a processor each."""

    processors: int
    cores: int


_kept: deque[tuple[int, tuple[object, ...]]] = deque()
_lock = fork_safe(threading.Lock())
_here = threading.local()
_seen = (0.0, Usable(1, 1))  # what may be used, and until when that is valid (time.monotonic)


def num_threads() -> int:
    """Threads for a call of our kernels from this thread.

    SELFSPEC_NUM_THREADS if it is set, but not more than the processors that this process may use; else PyTorch's number, but
    not more than their physical cores.
    """
    chosen: int | None = getattr(_here, "threads", None)
    if chosen is not None:
        return chosen
    setting = os.environ.get("SELFSPEC_NUM_THREADS")
    if setting and (not setting.isdecimal() or int(setting) < 1):
        raise ValueError(f"SELFSPEC_NUM_THREADS must be a positive number, got {setting!r}")
    wanted, usable = int(setting) if setting else torch.get_num_threads(), _usable()
    if usable.processors == 1 < wanted:
        _warn_of_binding()
    return max(1, min(wanted, usable.processors if setting else usable.cores))


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Set `num_threads` for the calling thread while the context is active."""
    before = getattr(_here, "threads", None)
    _here.threads = count
    try:
        yield
    finally:
        _here.threads = before


def _usable() -> Usable:
    """`usable`, looked up at most once a second: a call of our kernels may take only a few microseconds."""
    global _seen
    now = time.monotonic()
    if now > _seen[0]:
        _seen = (now + 1.0, usable())
    return _seen[1]


_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
"""OpenMP settings that bind the thread that loads PyTorch, and every thread it then starts, to one core."""


@cache
def _warn_of_binding() -> None:
    """Warn once if an OpenMP setting leaves only one core to the threads of our kernels."""
    given = [f"{name}={os.environ[name]}" for name in _BINDING if os.environ.get(name)]
    if given:
        warnings.warn(
            f"{' '.join(given)} binds this thread to one core, and with it the threads of our kernels: decoding will be "
            "slower. Unset it, or set OMP_PROC_BIND=false, before the process starts",
            RuntimeWarning,
            stacklevel=4,
        )


def processors() -> tuple[int, ...]:
    """List the system's numbers of the processors that this process may use (affinity mask), each thread of a core."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def usable() -> Usable:
    """Count what this process may use, by its affinity mask and its control group's quota (rounded up)."""
    numbers, quota = processors(), cpu_quota()
    most = len(numbers) if quota is None else max(1, math.ceil(quota))
    return Usable(min(len(numbers), most), min(num_physical_cores(numbers), most))


@cache
def num_physical_cores(numbers: tuple[int, ...], folder: Path = Path("/sys/devices/system/cpu")) -> int:
    """Count the cores that these processors are threads of. One of which the system tells nothing is a core of its own."""
    cores: set[tuple[str, str]] = set()
    for number in numbers:
        topology = folder / f"cpu{number}" / "topology"
        try:
            socket, siblings = (
                (topology / name).read_text(encoding="utf-8").strip()
                for name in ("physical_package_id", "thread_siblings_list")
            )
        except OSError:
            socket, siblings = "", str(number)
        cores.add((socket, siblings))
    return len(cores)


@cache
def cpu_quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """CPU time the control groups allow this process, in cores; None without a limit. Read once.

    Version 2 has cpu.max; version 1 has cpu.cfs_quota_us over cpu.cfs_period_us. The smallest of nested groups counts.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / controllers if controllers else root
        parts = [part for part in path.split("/") if part not in ("", "..")]
        # Inside a container the path may be the host's; the group is then what is mounted at the root.
        for depth in range(len(parts) + 1):
            found.append(_quota_of(base.joinpath(*parts[:depth])))
    return min((quota for quota in found if quota is not None), default=None)


def _quota_of(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="utf-8").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="utf-8").strip()
        return int(quota) / int(period) if quota.isdecimal() and int(period) > 0 else None
    except (OSError, ValueError):
        return None


class SingleThreadedOperators:
    """Run this thread's PyTorch operators on one thread while the context is active; our kernels keep their team.

    PyTorch does little between our calls, and its own team waits by spinning: on a busy machine it waits for threads that are
    not running. Only the thread that enters is affected, until it leaves. A nested context does nothing. If a signal's
    exception comes just as it is left, it stays as it is until the next one is entered.
    """

    __slots__ = ("__weakref__", "_operators")

    def __init__(self) -> None:
        self._operators = 0

    def __enter__(self) -> None:
        held, operators = getattr(_here, "held", (None, 0))
        if held is not None and held() is None:  # that of a context which is gone
            _here.threads, _here.held = None, (None, 0)
            _set_operator_threads(operators)
        if getattr(_here, "threads", None) is None:
            operators, wanted = torch.get_num_threads(), num_threads()
            try:
                _set_operator_threads(1)
            except BaseException:  # such as Ctrl-C: leave no setting changed
                _set_operator_threads(operators)
                raise
            _here.held = ref(self), operators
            _here.threads, self._operators = wanted, operators

    def __exit__(self, *error: object) -> None:
        if self._operators:
            _here.threads, _here.held = None, (None, 0)
            _set_operator_threads(self._operators)


def _set_operator_threads(threads: int) -> None:
    """Set OpenMP's number for this thread alone: `torch.set_num_threads` would change the default of other threads."""
    openmp = getattr(_process(), "omp_set_num_threads", None)  # if PyTorch has loaded it
    if openmp is not None:
        openmp(threads)


@cache
def _process() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def keep(job: int, *needed: object) -> None:
    """Hold the arguments of a call that a thread is still inside of. job: the number the call returned, not 0.

    Raises MemoryError if the call had no memory to work with.
    """
    if job < 0:
        raise MemoryError("no memory for the scratch of our kernels")
    with _lock:
        _kept.append((job, needed))
        _forget()


def _forget() -> None:
    oldest = pool_oldest()()
    while _kept and _kept[0][0] < oldest:
        _kept.popleft()


def reclaim_buffers() -> None:
    """Free the buffers held for late threads, after waiting for them for up to 0.2 seconds. Called at the end of a text."""
    if not _kept:
        return
    deadline = time.monotonic() + _RECLAIM_SECONDS
    while True:
        with _lock:
            _forget()
            if not _kept or time.monotonic() > deadline:
                return
        time.sleep(0.001)
