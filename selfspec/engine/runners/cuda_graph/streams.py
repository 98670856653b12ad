"""Streams, events and pinned memory: everything by which captured rounds order the work of one device.

Work that is launched on a CUDA stream runs in its order there, some time later. Only an event or a wait orders it with
another stream or with the host. Without CUDA each operation is over when its call returns, and there is nothing to order.
The tests have a third kind (`tests/helpers/lazy_device.py`), which puts work off as long as the order allows.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from layerskip_models.fork_safe import fork_safe

_capturing = fork_safe(threading.RLock())
"""Held while this process captures: PyTorch allows one capture at a time, whatever the thread and the device."""


class Event(Protocol):
    """A point in the work of a stream."""

    def record(self) -> None:
        """Mark the point after everything launched on the current stream so far; an earlier point is forgotten."""
        ...

    def synchronize(self) -> None:
        """Return when the device has passed the point."""
        ...


class Streams(Protocol):
    """The queues of one device, as one runner uses them."""

    def event(self) -> Event: ...

    def host_memory(self, size: int) -> Tensor:
        """Zeros, float64 [size], in the host's memory, which the device can write to while the host goes on."""
        ...

    def resume(self) -> None:
        """Work begins, perhaps on another stream than before: it comes after all that was launched there."""
        ...

    def capturing(self) -> AbstractContextManager[object]:
        """Within it nobody else in this process captures."""
        ...


def streams_for(device: torch.device) -> Streams:
    """Make the streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else NoStreams()


class _Over:
    """An event where all work is over when its call returns."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class NoStreams:
    """A device whose work is over when its call returns."""

    def event(self) -> Event:
        return _Over()

    def host_memory(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.float64, device="cpu")

    def resume(self) -> None:
        pass

    def capturing(self) -> AbstractContextManager[object]:
        return _capturing


class CudaEvent:
    """An event of one CUDA device, whichever device is the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.event = torch.cuda.Event()

    def record(self) -> None:
        self.event.record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        self.event.synchronize()


class CudaStreams:
    """The caller's current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = torch.cuda.current_stream(device)

    def event(self) -> Event:
        return CudaEvent(self._device)

    def host_memory(self, size: int) -> Tensor:
        with torch.cuda.device(self._device):
            return torch.zeros(size, dtype=torch.float64, device="cpu", pin_memory=True)

    def resume(self) -> None:
        current = torch.cuda.current_stream(self._device)
        if current != self._last:
            current.wait_stream(self._last)
            self._last = current

    def capturing(self) -> AbstractContextManager[object]:
        return _capturing


class HostRead:
    """Numbers on their way from the device to the host: `start` returns at once, `wait` when they are there."""

    def __init__(self, size: int, streams: Streams) -> None:
        self._host = streams.host_memory(size)
        self.event = streams.event()
        self._size = 0

    def start(self, numbers: Tensor) -> None:
        """Copy them, float64 [n], as they are at this point of the device's work."""
        self._size = numbers.shape[0]
        self._host[: self._size].copy_(numbers, non_blocking=True)
        self.event.record()

    def wait(self) -> list[float]:
        """Wait for the numbers of the last `start`."""
        self.event.synchronize()
        return self._host[: self._size].tolist()
