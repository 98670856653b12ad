"""Reads pieces of a checkpoint's files, and asks the system for what will be wanted next while a piece is worked on."""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path

import psutil

from layerskip_models.fork_safe import fork_safe

_AHEAD = 64 << 20  # bytes that are asked for before they are wanted: enough to keep a disk busy between two matrices


class ReadFile:
    """A file that several threads read at once. Not mapped: to map a page costs several times what copying it does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)
        self._lock = fork_safe(threading.Lock())

    def read(self, room: memoryview, at: int) -> None:
        """Fill `room`, of bytes, from this place on. Raises OSError if the file ends before."""
        while room:
            got = os.preadv(self._file.fileno(), [room], at) if hasattr(os, "preadv") else self._seek_and_read(room, at)
            if not got:
                raise OSError(f"{self.path} ends too early: copy or download it again")
            room, at = room[got:], at + got

    def _seek_and_read(self, room: memoryview, at: int) -> int:
        with self._lock:
            self._file.seek(at)
            return self._file.readinto(room) or 0

    def ask(self, begin: int, size: int) -> None:
        """Have the system read this part in the background, where it can."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), begin, size, os.POSIX_FADV_WILLNEED)

    def forget(self, begin: int, size: int) -> None:
        """Have the system keep nothing of this part in memory."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), begin, size, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._file.close()


class ReadAhead:
    """Parts of files in the order in which they will be read. Each byte is asked for once, a while before.

    What was read stays in the system's memory for another start, unless there is no room for the files beside the model. Then
    it would only push out other things, and itself: it is forgotten at once.
    """

    def __init__(self) -> None:
        self._room = int(psutil.virtual_memory().available)
        self._parts: list[tuple[ReadFile, int, int]] = []  # file, place, size
        self._starts: list[int] = []  # how many bytes come before each part
        self._turns: dict[tuple[Path, int], int] = {}
        self._total, self._asked = 0, 0
        self._lock = fork_safe(threading.Lock())

    def expect(self, parts: Iterable[tuple[ReadFile, int, int]]) -> None:
        """Add parts: each a file, a place in it, and a size."""
        for file, begin, size in parts:
            self._turns[file.path, begin] = self._total
            self._parts.append((file, begin, size))
            self._starts.append(self._total)
            self._total += size

    def passed(self, file: ReadFile, begin: int, size: int) -> None:
        """Say that this part was read and is not wanted again."""
        if self._room < 2 * self._total:
            file.forget(begin, size)

    def reached(self, file: ReadFile, begin: int, offset: int) -> None:
        """Say that somebody reads `offset` bytes into the part that begins there. Unexpected parts are no harm."""
        turn = self._turns.get((file.path, begin))
        if turn is None or not self._lock.acquire(blocking=False):  # another thread is asking
            return
        try:
            until = min(turn + offset + _AHEAD, self._total)
            while self._asked < until:
                index = bisect_right(self._starts, self._asked) - 1
                file, begin, size = self._parts[index]
                done = self._asked - self._starts[index]
                count = min(size - done, until - self._asked)
                file.ask(begin + done, count)
                self._asked += count
        finally:
            self._lock.release()
