"""How this process was launched. Of several processes that decode together, only rank 0 writes output and errors."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, TypeVar

from layerskip_models.parallel.launched import launched_rank, launched_ranks, local_rank
from selfspec.visible_text import visible

if TYPE_CHECKING:
    from layerskip_models import LayerSkipModel

TensorParallel = Literal["auto"] | int | None
"""Number of processes that share a model: "auto" for all that were launched together, None for one."""
_Value = TypeVar("_Value")


def divides(tensor_parallel: TensorParallel) -> bool:
    """Whether a model is divided over processes. Raises ValueError for a number that was not launched."""
    launched = launched_ranks()
    if tensor_parallel is None:
        return False
    if tensor_parallel == "auto":
        return launched > 1
    if isinstance(tensor_parallel, bool) or not isinstance(tensor_parallel, int) or tensor_parallel < 1:
        raise ValueError(f"tensor_parallel must be 'auto', a number of processes or None, got {tensor_parallel!r}")
    if tensor_parallel != launched:
        raise ValueError(
            f"tensor_parallel is {tensor_parallel}, but {launched} process{'es were' if launched > 1 else ' was'} launched: "
            f"start the program with torchrun --nproc-per-node {tensor_parallel}"
        )
    return launched > 1


def own_device(device: str) -> str:
    """The device of one of several processes that each hold a whole model: with "auto" the GPU of its number, if any."""
    import torch

    if device != "auto" or not torch.cuda.is_available():
        return device
    return f"cuda:{local_rank() % torch.cuda.device_count()}"


def speaks() -> bool:
    """Whether this process writes output and errors: rank 0, or the only process."""
    return launched_rank() == 0


def be_silent_unless_first() -> None:
    """On other ranks than 0, discard standard output and ignore Ctrl-C. Standard error stays, for unexpected errors."""
    if not speaks():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (open until the process ends)


def end_at_once(error: Exception) -> NoReturn:
    """Print an error in one line and end with status 1 at once. The other processes then end too."""
    print(f"error: {visible(' '.join(str(error).split()))}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def from_first(model: LayerSkipModel, make: Callable[[], _Value]) -> _Value:
    """Call `make` on rank 0 only, and give its result to every rank of the model."""
    return make() if model.ranks is None else model.ranks.from_first(make)
