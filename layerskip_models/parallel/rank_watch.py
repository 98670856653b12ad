"""Whether the other processes of one model are alive, also while nobody computes anything.

Every rank but the first counts up a number of its own in the store in which torchrun's processes find each other, and rank 0
looks whether the numbers go on. A process that is stopped, hangs in the kernel or has ended falls silent there. What a live
process does wrong, the collectives' own time limit finds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from time import monotonic

import torch.distributed as dist

from layerskip_models.parallel.ranks import RankError, Ranks

_LONGEST_INTERVAL = 5.0


def launch_store(timeout: float) -> dist.Store:
    """A connection of our own to the store of the launched processes. Raises RankError without one."""
    try:
        return dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
        )
    except (KeyError, ValueError, RuntimeError) as error:
        raise RankError(f"the launched processes have no store in which to find each other ({error})") from error


def interval_of(timeout: float) -> float:
    """Seconds between two signs of life: several within half the time limit."""
    return min(_LONGEST_INTERVAL, timeout / 8)


def show_life(ranks: Ranks, store: dist.Store | None = None) -> Callable[[], None]:
    """On a rank that is not the first: give signs of life until the returned function is called, or the store is gone."""
    store = store or launch_store(ranks.timeout)
    ended, key, interval = threading.Event(), _key(ranks.rank), interval_of(ranks.timeout)

    def beat() -> None:
        while True:
            try:
                store.add(key, 1)
            except RuntimeError:  # rank 0 or the launcher has ended: the next message tells
                return
            if ended.wait(interval):
                return

    threading.Thread(target=beat, name="selfspec-signs-of-life", daemon=True).start()
    return ended.set


class RankWatch:
    """Rank 0's view of the others.

    size: number of ranks. timeout: seconds of silence after which a rank is lost. store: None for the launched processes'.
    """

    def __init__(self, size: int, timeout: float, store: dist.Store | None = None) -> None:
        self._timeout = timeout
        self._store = store or launch_store(timeout)
        self._counts = dict.fromkeys(range(1, size), -1)
        self._silence = dict.fromkeys(range(1, size), 0.0)
        self._ended = threading.Event()

    @property
    def warning(self) -> str | None:
        """Which ranks have been silent for more than half the time limit, as a sentence; None if all are alive."""
        silent = self._silent(self._timeout / 2)
        if not silent:
            return None
        names = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
        has = "have" if len(silent) > 1 else "has"
        return f"{names} {has} given no sign of life for {min(self._silence[rank] for rank in silent):.0f} seconds"

    def explain(self, error: RankError) -> RankError:
        """The error, and which ranks are silent if it does not say so."""
        return error if self.warning is None or self.warning in str(error) else RankError(f"{error}; {self.warning}")

    def start(self, on_lost: Callable[[RankError], None]) -> None:
        """Watch in a thread. on_lost: called once, from there."""
        threading.Thread(target=self._watch, args=(on_lost,), name="selfspec-rank-watch", daemon=True).start()

    def stop(self) -> None:
        """The others may end now."""
        self._ended.set()

    def look(self, passed: float) -> None:
        """Take notice of the signs of life. passed: seconds since the last look. Raises RankError if a rank is lost."""
        passed = min(passed, 2 * interval_of(self._timeout))  # while this process was stopped itself, nobody was silent
        try:
            counts = {rank: self._store.add(_key(rank), 0) for rank in self._counts}
        except RuntimeError as error:
            raise RankError(f"the store of the launched processes does not answer ({error})") from error
        for rank, count in counts.items():
            self._silence[rank] = 0.0 if count != self._counts[rank] else self._silence[rank] + passed
        self._counts = counts
        if self._silent(self._timeout):
            raise RankError(
                f"rank 0 cannot go on: {self.warning} (SELFSPEC_RANK_TIMEOUT is {self._timeout:g}): start all processes again"
            )

    def _silent(self, seconds: float) -> list[int]:
        return [rank for rank, silence in self._silence.items() if silence > seconds]

    def _watch(self, on_lost: Callable[[RankError], None]) -> None:
        interval, before = interval_of(self._timeout), monotonic()
        while not self._ended.wait(interval):
            now = monotonic()
            try:
                self.look(now - before)
            except RankError as error:
                if not self._ended.is_set():
                    on_lost(error)
                return
            before = now


def _key(rank: int) -> str:
    return f"selfspec/alive/{rank}"
