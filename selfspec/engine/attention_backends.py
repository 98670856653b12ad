"""Which of PyTorch's attention kernels may be chosen on CUDA: all but cuDNN's.

For every new shape cuDNN makes a plan, which takes about 0.4 s on recent cards; a growing text has a new shape in every
round.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.backends import cuda as backends

from layerskip_models.fork_safe import fork_safe

_AS_IT_IS = nullcontext()


class _WithoutCuDNN:
    """PyTorch's switches belong to the process, so whoever enters first sets them and whoever leaves last puts them back."""

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
    """Within it attention on CUDA takes the flash, memory-efficient or plain kernel; threads may be in it together.

    On another device it does nothing.
    """
    return _without_cudnn if device.type == "cuda" else _AS_IT_IS
