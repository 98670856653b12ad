"""Rows cut before they meet bytes or a matrix unit, as our kernels do, and a model of transformers that takes them so."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Cut = Callable[[Tensor], Tensor]


def limbs(count: int) -> Cut:
    """Fixed-point numbers of so many bytes, the largest number of a row in the highest one."""

    def cut(x: Tensor) -> Tensor:
        largest = x.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
        unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent + 1 - 8 * count)
        return (x / unit).round() * unit

    return cut


def splits(count: int) -> Cut:
    """So many bfloat16 numbers that add up to nearly x."""

    def cut(x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for _ in range(count):
            total = total + (x - total).bfloat16().float()
        return total

    return cut
