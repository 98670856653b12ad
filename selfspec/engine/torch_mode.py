"""The state of PyTorch that the engine's own work runs in, whatever the caller has set."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.backends import cuda as backends

from layerskip_models.fork_safe import fork_safe
from selfspec.engine.runners.choice import on_device


class _WithoutCuDNN:
    """Within it attention on CUDA takes the flash, memory-efficient or plain kernel; threads may be in it together.

    For every new shape cuDNN makes a plan, which takes about 0.4 s on recent cards; a growing text has a new shape in every
    round. PyTorch's switches belong to the process, so whoever enters first sets them and whoever leaves last puts them back.
    """

    def __init__(self) -> None:
        self._lock = fork_safe(threading.Lock())
        self._inside = 0
        self._before = (True, True, True, True)

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = (
                    backends.flash_sdp_enabled(),
                    backends.mem_efficient_sdp_enabled(),
                    backends.math_sdp_enabled(),
                    backends.cudnn_sdp_enabled(),
                )
                _switch(True, True, True, False)
            self._inside += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                _switch(*self._before)


def _switch(flash: bool, efficient: bool, math: bool, cudnn: bool) -> None:
    backends.enable_flash_sdp(flash)
    backends.enable_mem_efficient_sdp(efficient)
    backends.enable_math_sdp(math)
    backends.enable_cudnn_sdp(cudnn)


_without_cudnn = _WithoutCuDNN()


def without_cudnn(device: torch.device) -> AbstractContextManager[object]:
    """Keep cuDNN's attention from being chosen on CUDA. On another device this does nothing."""
    return _without_cudnn if device.type == "cuda" else nullcontext()


def engine_mode(device: torch.device) -> AbstractContextManager[object]:
    """Inference mode, the model's device as the current one, no autocast, and on CUDA no attention by cuDNN.

    Autocast would run some operations of the plain layout in half precision and leave the rest as they are, so the output
    would no longer be the model's own. A model that is to run in half precision is loaded in it.
    Entered for the engine's own work only. A streamer, or the body of a loop over `stream`, runs in the caller's mode.
    """
    casting = torch.is_autocast_enabled(device.type)
    if device.type == "cpu" and not casting:  # entered in every round
        return torch.inference_mode()
    return _all_of(device, torch.autocast(device.type, enabled=False) if casting else nullcontext())


@contextmanager
def _all_of(device: torch.device, no_autocast: AbstractContextManager[object]) -> Iterator[None]:
    with torch.inference_mode(), on_device(device), without_cudnn(device), no_autocast:
        yield
