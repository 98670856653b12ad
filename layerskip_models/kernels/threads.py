"""How many threads our kernels use, and what has to stay in memory for those that come late.

A thread that lost its core in the middle of a call is not waited for (pool.c says how), so it may still read what the call
was given when the call has long returned. What it reads must not be freed: `keep` holds it until the thread is through.
"""

from __future__ import annotations

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

import torch

from layerskip_models.kernels.library import pool

_SETTLE_SECONDS = (
    0.2  # a thread that lost its core is back within some 10 ms; then it needs some more to see that it may go
)

_kept: deque[tuple[int, tuple[object, ...]]] = deque()
_lock = threading.Lock()
_here = threading.local()
_seen = (0.0, 1)  # until when the number of usable cores counts, and it


def num_threads() -> int:
    """Threads for a call of our kernels from this thread.

    SELFSPEC_NUM_THREADS if it is set; else PyTorch's number, but not more than the cores that this process may use.
    """
    chosen: int | None = getattr(_here, "threads", None)
    return _wanted() if chosen is None else chosen


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Within it `num_threads` is this for the thread that enters."""
    before = getattr(_here, "threads", None)
    _here.threads = count
    try:
        yield
    finally:
        _here.threads = before


def _wanted() -> int:
    setting = os.environ.get("SELFSPEC_NUM_THREADS")
    if setting and (not setting.isdecimal() or int(setting) < 1):
        raise ValueError(f"SELFSPEC_NUM_THREADS must be a positive number, got {setting!r}")
    wanted, cores = int(setting) if setting else torch.get_num_threads(), _cores()
    if cores == 1 < wanted:
        _warn_of_binding()
    return wanted if setting else max(1, min(wanted, cores))


def _cores() -> int:
    """`usable_cores`, looked up once a second at most: a call of our kernels may take a few microseconds."""
    global _seen
    now = time.monotonic()
    if now > _seen[0]:
        _seen = (now + 1.0, usable_cores())
    return _seen[1]


_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
"""Settings with which OpenMP binds the thread that loads PyTorch to one core, and all that this thread then starts."""


@cache
def _warn_of_binding() -> None:
    """Say once that a setting of OpenMP leaves the threads of our kernels one core, if one does."""
    given = [f"{name}={os.environ[name]}" for name in _BINDING if os.environ.get(name)]
    if given:
        warnings.warn(
            f"{' '.join(given)} binds this thread to one core, and with it the threads of our kernels: decoding will be "
            "slower. Unset it, or set OMP_PROC_BIND=false, before the process starts",
            RuntimeWarning,
            stacklevel=4,
        )


def usable_cores() -> int:
    """Cores that this process may use: what its affinity mask and its control group's quota allow, rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


@cache
def cpu_quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Cores' worth of time that the control groups of this process allow it, or None without a limit. Read once.

    Of version 2 cpu.max, of version 1 cpu.cfs_quota_us over cpu.cfs_period_us; of nested groups the smallest counts.
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
    limits = [quota for quota in found if quota is not None]
    return min(limits, default=None)


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


class OneTeam:
    """Within it this thread's PyTorch operators run on one thread, beside the team of our kernels, which keeps its size.

    What PyTorch does between our calls is small, and its own team waits by spinning: on a busy machine for threads that are
    not running. Only the thread that enters is affected, and only until it leaves. Inside another one it does nothing.
    """

    __slots__ = ("_operators",)

    def __init__(self) -> None:
        self._operators = 0

    def __enter__(self) -> None:
        if getattr(_here, "threads", None) is None:
            operators, wanted = torch.get_num_threads(), _wanted()
            try:
                _set_operator_threads(1)
            except BaseException:  # Ctrl-C, say: nothing is left as it would be inside
                _set_operator_threads(operators)
                raise
            _here.threads, self._operators = wanted, operators

    def __exit__(self, *error: object) -> None:
        if self._operators:
            _here.threads = None
            _set_operator_threads(self._operators)


def _set_operator_threads(threads: int) -> None:
    """OpenMP's number for this thread alone; `torch.set_num_threads` would change what other threads start with."""
    function = pool().omp_set_num_threads
    if function is not None:
        function(threads)


def keep(job: int, *needed: object) -> None:
    """Hold what a call was given if a thread is still inside it. job: what the call returned, not 0.

    Raises MemoryError if the call had no memory to work with.
    """
    if job < 0:
        raise MemoryError("no memory for the scratch of our kernels")
    with _lock:
        _kept.append((job, needed))
        _forget()


def _forget() -> None:
    oldest = pool().oldest()
    while _kept and _kept[0][0] < oldest:
        _kept.popleft()


def settle() -> None:
    """Let go of what is held for late threads, having waited for them a moment. At the end of a text, for one."""
    if not _kept:
        return
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        with _lock:
            _forget()
            if not _kept or time.monotonic() > deadline:
                return
        time.sleep(0.001)
