"""How this process was launched, and what it then says: of several that decode together, rank 0 alone speaks and writes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NoReturn, TypeVar

import torch

from layerskip_models import LayerSkipModel
from layerskip_models.parallel.ranks import launched_rank, launched_ranks, local_rank
from layerskip_models.parallel.sharded_model import ShardedModel
from selfspec.visible_text import visible

TensorParallel = Literal["auto"] | int | None
"""Over how many processes a model is divided: "auto" for those that were launched together, None for none."""
_Value = TypeVar("_Value")


def divides(tensor_parallel: TensorParallel) -> bool:
    """Whether a model is to be divided over processes. Raises ValueError for a number of them that was not launched."""
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
    """The device of a process that holds a whole model beside others that do: with "auto" the GPU of its number, if any."""
    if device != "auto" or not torch.cuda.is_available():
        return device
    return f"cuda:{local_rank() % torch.cuda.device_count()}"


def speaks() -> bool:
    """Whether this process writes output and errors: rank 0, or a process by itself."""
    return launched_rank() == 0


def be_silent_unless_first() -> None:
    """From now on standard output of the other ranks goes nowhere. Their standard error stays, for what nobody expected.

    They leave Ctrl-C to rank 0, whose decision it is what becomes of it.
    """
    if not speaks():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (it lasts as long as the process)


def end_at_once(error: Exception) -> NoReturn:
    """Say the error in one line and end with status 1, whatever other threads wait for: the other processes then end, too."""
    print(f"error: {visible(' '.join(str(error).split()))}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def from_first(model: LayerSkipModel, make: Callable[[], _Value]) -> _Value:
    """What `make` gives on rank 0, which alone calls it: what is typed or read there, every rank of the model gets."""
    return model.ranks.from_first(make) if isinstance(model, ShardedModel) else make()
