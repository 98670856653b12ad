"""Whether weights hold NaN or infinity, at the cost of reading them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_EXPONENTS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
"""The bits that only NaN and infinity have all of."""
_PIECE = 1 << 20  # numbers looked at together: few enough to stay in a cache


def check_finite(value: Tensor, checkpoint: str, name: str) -> None:
    """ValueError if a number of this tensor is NaN or infinite: nothing could be decoded with it."""
    if not is_finite(value):
        raise not_finite(checkpoint, name)


def not_finite(checkpoint: str, name: str) -> ValueError:
    """Make the error for a tensor with a number that is NaN or infinite."""
    return ValueError(
        f"{checkpoint} holds NaN or infinite weights, first in {name}: the checkpoint is damaged or its training "
        "diverged; load another one"
    )


def is_finite(value: Tensor) -> bool:
    """Whether no number is NaN or infinite."""
    exponent = _EXPONENTS.get(value.dtype)
    if exponent is not None and value.is_cpu and value.is_contiguous():
        # numpy, on one core: PyTorch's threads would wait for each other more often than they work.
        numbers = value.view(torch.int16).view(-1).numpy()
        room = np.empty(min(_PIECE, len(numbers)), np.int16)
        for first in range(0, len(numbers), _PIECE):
            piece = numbers[first : first + _PIECE]
            if np.bitwise_and(piece, np.int16(exponent), out=room[: len(piece)]).max() == exponent:
                return False
        return True
    # A sum of floats shows one of them; where it is not finite itself every number is looked at.
    return bool(value.sum(dtype=torch.float32).isfinite()) or bool(value.isfinite().all())
