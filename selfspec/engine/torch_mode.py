"""The state of PyTorch that the engine's own work runs in, whatever the caller has set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from selfspec.engine.attention_backends import without_cudnn
from selfspec.engine.runners.choice import on_device


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
