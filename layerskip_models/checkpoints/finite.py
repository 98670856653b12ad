"""Weights that hold NaN or infinity are found while they are copied, when each number is in a cache anyway."""

from __future__ import annotations

import torch
from torch import Tensor

from layerskip_models.kernels import library
from layerskip_models.kernels.library import KINDS
from layerskip_models.kernels.weights import in_shares

_NATIVE = (torch.float32, torch.bfloat16, torch.float16)
_PIECE = 1 << 18  # numbers that are copied and then looked at


def not_finite(checkpoint: str, name: str) -> ValueError:
    """Make the error for a tensor with a number that is NaN or infinite."""
    why = "the checkpoint is damaged or its training diverged; load another one"
    return ValueError(f"{checkpoint} holds NaN or infinite weights, first in {name}: {why}")


def is_finite(value: Tensor) -> bool:
    """Return whether no number is NaN or infinite."""
    # A sum of floats shows one of them; where it is not finite itself every number is looked at.
    return bool(value.sum(dtype=torch.float32).isfinite()) or bool(value.isfinite().all())


def copy_finite(source: Tensor, target: Tensor, places: Tensor, *, checks: bool = True) -> bool:
    """Copy rows to these rows, int64 [rows], on several threads; return whether all numbers are finite, if checked."""
    first, last = int(places[0]), int(places[-1])
    are_neighbours = last - first == len(places) - 1 and bool((places[1:] > places[:-1]).all())
    kernels = library.kernels()
    same = source.dtype == target.dtype and source.dtype in _NATIVE and source.is_cpu and target.is_cpu
    if kernels is None or not same or source.dim() != 2 or not source.is_contiguous():
        if are_neighbours:
            target[first : last + 1] = source
        else:
            target[places.to(target.device)] = source.to(target.device, target.dtype)
        return not checks or is_finite(source)
    numbers, room = (tensor.detach().view(torch.uint8).numpy() for tensor in (source, target))
    step, look = max(_PIECE // source.shape[1], 1), kernels.finite_numbers

    def some(rows: range) -> bool:
        finite = True
        for begin in rows[::step]:
            end = min(begin + step, rows.stop)
            here = slice(first + begin, first + end) if are_neighbours else places[begin:end].numpy()
            room[here] = numbers[begin:end]
            if checks:
                piece = source[begin:end]
                finite &= bool(look(KINDS[source.dtype], piece.data_ptr(), piece.numel()))
        return finite

    return in_shares(source, some)
