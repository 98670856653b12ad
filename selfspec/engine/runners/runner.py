"""What a runner is, how one is chosen, and the state of PyTorch that passes run in."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, Protocol, get_args

import torch
from torch.backends import cuda as backends

from layerskip_models import LayerSkipModel
from layerskip_models.fork_safe import fork_safe

if TYPE_CHECKING:
    from selfspec.engine.draft import Draft

Head = Literal["draft", "full"]
"""The draft head (after an exit, whose adapter the rows pass first), or the full model's head."""
RunnerName = Literal["eager", "graphs"]
RunnerChoice = Literal["auto", "eager", "graphs"]


class Runner(Protocol):
    """Runs rows of sequences. It neither drafts nor verifies."""

    @property
    def model(self) -> LayerSkipModel: ...

    def run(self, drafts: Sequence[Draft], start: int, stop: int, head: Head | None) -> None:
        """Run each draft's rows [first, end) through layers [start, stop), and then the head on them.

        Rows follow those that each cache holds for these layers. From layer 0 on, they begin as their tokens; else with the
        sequence's `hidden`, which then holds the output, unless the full head follows. Sets the drafts' `outputs` or `logits`
        if there is a head. start may equal stop.
        """
        ...

    def rounded(self, bits: int) -> Runner:
        """Return what runs rows through the model's weights in 8 or 4 bits, on the same caches and buffers.

        Raises ValueError where this runner cannot (`layerskip_models.draft_weights`).
        """
        ...


def resolve_runner(runner: str, model: LayerSkipModel) -> RunnerName:
    """Name the runner: "auto" is graphs where they can be, else eager.

    Raises ValueError with the choices for another name, and with the reason where graphs are asked for and cannot be.
    """
    if runner not in get_args(RunnerChoice):
        raise ValueError(f"runner must be one of {', '.join(get_args(RunnerChoice))}, got {runner!r}")
    why_not = why_no_graphs(model)
    if runner == "graphs" and why_not is not None:
        raise ValueError(f"{why_not}: pass runner='eager', or leave it out")
    return "graphs" if runner != "eager" and why_not is None else "eager"


def why_no_graphs(model: LayerSkipModel) -> str | None:
    """Say why passes of this model cannot be CUDA graphs; None if they can."""
    if model.device.type != "cuda":
        return "CUDA graphs need a model on a CUDA device"
    if find_spec("triton") is None:
        return "CUDA graphs need Triton, which is not installed"
    if len({*model.layer_devices, model.head_device}) > 1:
        return "CUDA graphs need the whole model on one device"
    if model.num_loops > 1:
        return "CUDA graphs do not take looped models"
    if model.dtype not in (torch.float32, torch.bfloat16, torch.float16) or model.kv_dtype != model.dtype:
        return f"CUDA graphs do not compute in {str(model.dtype).removeprefix('torch.')} with this KV cache"
    if model.hidden_size % 16 or model.head_dim % 16:
        return "CUDA graphs need hidden and head sizes that are multiples of 16"
    return "CUDA graphs do not take steered exits" if model.steering is not None else None


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


without_cudnn = _WithoutCuDNN()


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
    on_cuda = device.type == "cuda"
    with (
        torch.inference_mode(),
        torch.cuda.device(device) if on_cuda else nullcontext(),
        without_cudnn if on_cuda else nullcontext(),
        no_autocast,
    ):
        yield
