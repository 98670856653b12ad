"""Which cores the processes of one model compute on, where they share a machine's.

Two things cost half the speed of two processes on two cores (measured; docs/log.md). Processes that the system moves about
take each other's core while the other one is idle. And gloo's own thread, woken by a message, takes the core of the thread
that computes, which may hold the lock that it needs: it then spins for the rest of its time slice, some milliseconds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from layerskip_models.parallel.launched import local_rank
from layerskip_models.parallel.ranks import Ranks
from layerskip_models.topology import physical_cores

_TASKS, _GLOO = Path("/proc/self/task"), "gloo"


def share_cores(ranks: Ranks) -> None:
    """Divide the cores among the ranks that were launched on one machine, and let gloo's threads wait for a core.

    Ranks that were given cores of their own keep them, and so do more ranks than cores. Does nothing where the system has
    no such settings.
    """
    if not hasattr(os, "sched_setaffinity") or not _TASKS.is_dir():
        return
    cores = sorted(os.sched_getaffinity(0))
    first = ranks.rank - local_rank()  # of this machine
    told = ranks.collect((first, cores))
    alike = [rank for rank, place in enumerate(told) if place == (first, cores)]
    own = share_of(physical_cores(cores), alike.index(ranks.rank), len(alike))
    for task in _TASKS.iterdir():
        thread = int(task.name)
        try:
            os.sched_setaffinity(thread, own)
            if (task / "comm").read_text(encoding="utf-8").startswith(_GLOO):
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))  # runs as much, but preempts nobody
        except OSError:
            continue  # it has ended, or may not be told


def share_of(cores: Sequence[Sequence[int]], place: int, count: int) -> list[int]:
    """What one of `count` processes takes of cores that all may use: neighbours, and all threads of each.

    With fewer cores than processes, these share out the cores' threads. With fewer threads as well, each gets all of them.
    """
    every = [number for core in cores for number in core]
    units = cores if len(cores) >= count else [[number] for number in every]
    each = len(units) // count
    return [number for core in units[place * each : (place + 1) * each] for number in core] if each else every
