"""Linears on our own kernels with 4-bit weights that share scales in groups of inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from layerskip_models.compact_linear import four_bit_product
from layerskip_models.four_bits import FourBitWeight
from layerskip_models.kernels.native_linear import NativeLinear, pointer, readable


class NativeInt4Linear(NativeLinear):
    """x W^T + b with W in 4 bits.

    On processors that multiply bytes, inputs are rounded to 16-bit fixed point relative to the largest of their row.
    The rounded weights make a different model; "the model's own output" then means that of this model.
    Raises what `NativeLinear` raises.
    """

    def __init__(self, weight: FourBitWeight, bias: Tensor | None = None) -> None:
        offsets = None if weight.offsets is None else readable(weight.offsets)
        self._set(weight.packed, weight.factors, bias)
        self.four_bits = weight = FourBitWeight(self.stored, readable(weight.groups), offsets, self._scale)
        self._in = self.matrix.in_features = weight.shape[1]
        shape = (self._out, self._in // weight.group)
        self.matrix.groups = pointer("the groups' scales", weight.groups, torch.float16, *shape)
        self.matrix.offsets = pointer("the groups' offsets", offsets, torch.float32, *shape)
        self.matrix.group = weight.group
        self.num_bytes = weight.num_bytes

    @property
    def tensors(self) -> list[Tensor]:
        """The memory that `matrix` points to."""
        more = (self.four_bits.groups, self.four_bits.offsets)
        return [*(tensor for tensor in more if tensor is not None), *super().tensors]

    @property
    def weight(self) -> Tensor:
        """The weight in float32, [out, in]."""
        return self.four_bits.values()

    def _by_operators(self, x: Tensor) -> Tensor:
        return four_bit_product(x, self.four_bits, self._bias)
