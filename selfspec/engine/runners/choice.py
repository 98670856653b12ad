"""The runners by name, and the error by which the captured one gives way to the eager one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, get_args

import torch

_AS_IT_IS = nullcontext()

RunnerName = Literal["eager", "captured"]
RunnerChoice = Literal["auto", "eager", "captured"]


class CaptureError(RuntimeError):
    """Work could not be captured or replayed, or a replay gave other numbers than the work itself. The message says why.

    The eager runner can go on where the captured one was.
    """


def resolve_runner(runner: str, device: torch.device) -> RunnerName:
    """Name the runner: "auto" is captured on CUDA and eager elsewhere. ValueError with the choices for another name."""
    if runner not in get_args(RunnerChoice):
        raise ValueError(f"runner must be one of {', '.join(get_args(RunnerChoice))}, got {runner!r}")
    if runner == "auto":
        return "captured" if device.type == "cuda" else "eager"
    return "captured" if runner == "captured" else "eager"


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a context in which a CUDA device is the current one: its streams and events serve where none is named."""
    return torch.cuda.device(device) if device.type == "cuda" else _AS_IT_IS
