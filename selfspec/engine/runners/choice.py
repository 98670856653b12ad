"""The runners by name, and the device that is the current one while they work."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, get_args

import torch

_AS_IT_IS = nullcontext()

RunnerName = Literal["eager"]
RunnerChoice = Literal["auto", "eager", "graphs"]


def resolve_runner(runner: str) -> RunnerName:
    """Name the runner, which is the eager one; warn for "graphs". Raises ValueError with the choices for another name."""
    if runner not in get_args(RunnerChoice):
        raise ValueError(f"runner must be one of {', '.join(get_args(RunnerChoice))}, got {runner!r}")
    if runner == "graphs":
        warnings.warn("runner='graphs' is not available at present: CUDA decodes eagerly", RuntimeWarning, stacklevel=3)
    return "eager"


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a context in which a CUDA device is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else _AS_IT_IS
