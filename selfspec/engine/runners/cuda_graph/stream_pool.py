"""CUDA streams that nobody else in this process uses while they are held.

PyTorch has 32 streams of each priority and hands them out in turns, so that the 33rd `torch.cuda.Stream` is the first one
again, whoever holds that. A stream that is given back here is handed out again before PyTorch is asked for another.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

import torch

from layerskip_models.fork_safe import fork_safe

CAPTURE_PRIORITY = -1
"""Priority of the streams that graphs are captured on. Other streams are made with priority 0, from another pool of
PyTorch's, so that no work of theirs ever comes onto one of these."""
MAX_STREAMS = 32
"""Streams of one priority that PyTorch has for a device."""

_lock = fork_safe(threading.Lock())


class HeldStream:
    """A stream of a device, for one holder as long as this object lives.

    Raises RuntimeError if all streams of this priority are held.
    """

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        shelf = _shelves.setdefault((index, priority), _Shelf())
        self.stream = shelf.take(torch.device("cuda", index), priority)
        # The shelf's queue may be appended to at any time, as the garbage collector does: nothing is locked.
        self._giving_back = weakref.finalize(self, shelf.free.append, self.stream)
        self._giving_back.atexit = False

    def keep(self) -> None:
        """Never hand this stream out again."""
        self._giving_back.detach()


class _Shelf:
    """The streams of one device and priority. free: those that were given back. known: all that were handed out so far."""

    def __init__(self) -> None:
        self.free: deque[torch.cuda.Stream] = deque()
        self._known: set[int] = set()

    def take(self, device: torch.device, priority: int) -> torch.cuda.Stream:
        with _lock:
            if self.free:
                return self.free.popleft()
            for _ in range(MAX_STREAMS):
                stream = torch.cuda.Stream(device, priority=priority)
                if stream.cuda_stream not in self._known:
                    self._known.add(stream.cuda_stream)
                    return stream
        raise RuntimeError(f"all {MAX_STREAMS} streams of priority {priority} on {device} are in use")


_shelves: dict[tuple[int, int], _Shelf] = {}
