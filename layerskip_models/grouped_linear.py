"""Linears on PyTorch's operators whose weights are small numbers in groups: of 4, 6 or 8 bits, where our kernels do not run.

A piece of the weight at a time is converted to float32, which saves memory and no time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from layerskip_models.grouped_weight import GroupedWeight

_CONVERTED = 1 << 21  # numbers of a weight in groups that are float32 at a time


class GroupedLinear:
    """x W^T + b with W in groups, by PyTorch's operators: a piece of W at a time is float32. x is float32 and not rounded."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None = None) -> None:
        self.numbers = weight
        self.bits, self.shape = weight.bits, weight.shape
        self.bias = None if bias is None else bias.float()
        self.num_bytes = weight.num_bytes

    @property
    def weight(self) -> Tensor:
        """The weight in float32, [out, in]."""
        return self.numbers.values()

    def float_pieces(self, outputs: int) -> Iterator[Tensor]:
        """Yield the weight in float32, piece by piece. outputs: in each piece."""
        return (self.numbers.values(first, first + outputs) for first in range(0, self.shape[0], outputs))

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in]. Returns [rows, out]."""
        return grouped_product(x, self.numbers, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x W^T + b."""
        return self(x).add_(residual)


def grouped_product(x: Tensor, weight: GroupedWeight, bias: Tensor | None) -> Tensor:
    """x W^T + b by PyTorch's operators. x: float32 [rows, in]. Returns float32 [rows, out]."""
    outputs, inputs = weight.shape
    step = max(_CONVERTED // inputs, 1)
    y = x.new_empty(x.shape[0], outputs)
    for first in range(0, outputs, step):
        torch.mm(x, weight.values(first, first + step).t(), out=y[:, first : first + step])
    return y if bias is None else y.add_(bias)
