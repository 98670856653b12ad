"""Give memory back while the server works: freed memory to the system, and circles of objects to Python at little cost.

The C library keeps freed memory for later. glibc has several arenas, shared among the threads, and by itself gives back only
the free end of an arena: a live block near the end keeps everything before it. Requests of many sizes leave such blocks
behind, so resident memory creeps up to the worst moment of every arena. `malloc_trim` gives back free pages anywhere.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PAUSE_SECONDS = 10.0
"""A trim takes 10 to 30 ms of one core after a burst, and blocks only threads that allocate from the same arena."""


def find_trim() -> Callable[[], object] | None:
    """glibc's malloc_trim; None if there is none (musl, macOS, Windows). It runs without Python's lock."""
    if sys.platform != "linux":
        return None
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return lambda: trim(0)


class MemoryReturn:
    """Gives freed memory back every few seconds, in its own thread. Does nothing without `malloc_trim`."""

    def __init__(self, trim: Callable[[], object] | None = None, *, seconds: float | None = None) -> None:
        self._trim = trim or find_trim()
        self._seconds = PAUSE_SECONDS if seconds is None else seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="selfspec-memory", daemon=True)
        if self._trim is not None:
            self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        assert self._trim is not None
        while not self._ended.wait(self._seconds):
            self._trim()


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Within it, Python's collector leaves alone what exists now: modules, the model, the app.

    A full collection looks at half a million of such objects while all threads wait (0.3 s), and comes only when a quarter as
    many new ones have survived. Without them it takes milliseconds and comes often.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
