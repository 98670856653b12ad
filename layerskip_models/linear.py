"""How a weight matrix is stored, and the linear that computes with it: our kernels where they run, else operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from layerskip_models.decoder_layer import Linear
from layerskip_models.four_bit_rounding import fits_four_bits, round_to_four_bits
from layerskip_models.grouped_weight import CHUNK, GroupedLinear, GroupedWeight, group_size
from layerskip_models.kernels.check import native_works
from layerskip_models.kernels.native_linear import (
    NativeGroupedLinear,
    NativeInt8Linear,
    NativeLinear,
    round_to_eight_bits,
)

Layout = Literal["plain", "int8", "int4", "native"]
"""How a weight is stored: row major as in the checkpoint, in 8 or 4 bits, which changes the model and is never a default, or
for our own kernels, without loss."""
COMPACT: frozenset[Layout] = frozenset({"int8", "int4", "native"})
"""Layouts that need the weight as the checkpoint has it, without a norm's factors in it."""
GROUP = 32
"""Inputs that share a scale where weights are rounded to 4 bits here; docs/models.md has what other sizes give."""
EIGHT_BIT_LAYERS = 1
"""How many of the first layers get 8 bits, like the head, in a model rounded to 4: they lose most (docs/models.md)."""
_SIGNED = 128  # what a byte holds for 0


class PlainLinear:
    """What `F.linear` computes, without the operators that it goes through; residual or bias folded into the product."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.num_bytes = weight.numel() * weight.element_size()
        self._transposed = weight.t()

    def taking(self, outputs: Tensor | slice) -> PlainLinear:
        """Return a linear of these outputs alone: of a slice in the same memory, or int64 [count]."""
        return PlainLinear(self.weight[outputs], None if self.bias is None else self.bias[outputs])

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in]. Returns [rows, out]."""
        if self.bias is None:
            return torch.mm(x, self._transposed)
        return torch.addmm(self.bias, x, self._transposed)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x W^T + b."""
        out = torch.addmm(residual, x, self._transposed)
        return out if self.bias is None else out.add_(self.bias)


def int8_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Round a weight of 16 or 32 bits to 8, a scale for each output: on our own kernels, or if none, on operators."""
    if native_works(weight.device, torch.float32):
        return NativeInt8Linear(weight, bias)
    rounded, scale = round_to_eight_bits(weight)
    columns = weight.shape[1]
    if columns % CHUNK:  # no whole groups: the same numbers, as float32
        return PlainLinear(rounded.float().mul_(scale.unsqueeze(1)), bias)
    size = group_size(columns, 1)
    assert size is not None
    ones = torch.ones(len(weight), columns // size, dtype=torch.float16, device="cpu")
    numbers = rounded.view(torch.uint8).bitwise_xor_(_SIGNED)
    return GroupedLinear(GroupedWeight(numbers, ones, factors=scale, bits=8, zero=_SIGNED), bias)


def int4_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Round a weight of 16 or 32 bits to 4 in groups of inputs; to 8 bits where no number of inputs makes whole groups."""
    if not fits_four_bits(weight.shape[1]):
        return int8_linear(weight, bias)
    return grouped_linear(round_to_four_bits(weight, group=GROUP), bias, own=True)


def grouped_linear(
    weight: GroupedWeight, bias: Tensor | None = None, *, own: bool = False, reorder: bool = True
) -> NativeGroupedLinear | GroupedLinear:
    """Make a linear of a weight already in groups, on a CPU, for float32: on our own kernels, or if none, on operators.

    own: whether nobody else needs the weight's tensors, whose memory the linear may then reorder. reorder: False for a weight
    whose rows are only looked up.
    """
    if native_works(weight.packed.device, torch.float32):
        return NativeGroupedLinear(weight, bias, own=own, reorder=reorder)
    return GroupedLinear(weight, bias)


def with_rows(linear: Linear, rows: int) -> Linear:
    """Return a linear of the same weight that meets rows of 8 or 16 bits; itself if it has more than 6 bits, or floats."""
    if not isinstance(linear, (GroupedLinear, NativeGroupedLinear)) or linear.bits > 6:
        return linear
    return linear.with_rows(rows)


def row_bits(linear: Linear) -> int:
    """Return how many bits the numbers of a row have where they meet this weight; 32 if they are not rounded."""
    return linear.row_bits if isinstance(linear, (GroupedLinear, NativeGroupedLinear)) else 32


def keeps_eight_bits(layer: int | None) -> bool:
    """Return whether a matrix has 8 bits in a model that is rounded to 4. layer: that it belongs to; None for the head."""
    return layer is None or layer < EIGHT_BIT_LAYERS


LAYOUTS: dict[Layout, Callable[..., Linear]] = {
    "plain": PlainLinear,
    "int8": int8_linear,
    "int4": int4_linear,
    "native": NativeLinear,
}


def check_layout(layout: Layout, weight: Tensor) -> Layout:
    """Return a layout asked for by name. Raises ValueError for another name, and where it does not run in this dtype."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}: leave it out for the best here")
    runs = native_works(weight.device, weight.dtype) or layout == "plain"
    if layout in ("int8", "int4"):
        runs = weight.device.type == "cpu" and weight.dtype == torch.float32
    if not runs:
        raise ValueError(
            f"layout {layout!r} needs {'the native kernels, ' if layout == 'native' else ''}a CPU and float32; "
            f"this is {weight.device.type} and {str(weight.dtype).removeprefix('torch.')}"
        )
    return layout
