"""Linears on our own kernels with weights of small numbers that share scales in groups of inputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from layerskip_models.grouped_linear import grouped_product
from layerskip_models.grouped_weight import BLOCK, GroupedWeight
from layerskip_models.kernels.interleaving import in_rows, interleaved, takes_interleaved
from layerskip_models.kernels.library import GROUPED_KINDS, SCALES
from layerskip_models.kernels.native_linear import NativeLinear, pointer, readable


class NativeGroupedLinear(NativeLinear):
    """x W^T + b with W in 4, 6 or 8 bits, in groups.

    On processors that multiply bytes, inputs are rounded to 16-bit fixed point relative to the largest of their row, where
    the number of outputs is a multiple of 32.
    Numbers that were rounded make a different model; "the model's own output" then means that of this model.
    own: whether nobody else needs the tensors of `weight`, which may then be reordered in place.
    Raises what `NativeLinear` raises.
    """

    def __init__(self, weight: GroupedWeight, bias: Tensor | None = None, *, own: bool = False) -> None:
        self._interleaved = takes_interleaved(GROUPED_KINDS[weight.bits], *weight.shape)
        if self._interleaved:
            weight = interleaved(weight, in_place=own)
        self._set(weight.packed, weight.factors, bias)
        others = (None if one is None else readable(one) for one in (weight.groups, weight.offsets, weight.blocks))
        groups, offsets, blocks = others
        assert groups is not None
        self._kept = weight = weight.with_tensors((self.stored, groups, offsets, self._scale, blocks))
        self.bits = weight.bits
        self._in = self.matrix.in_features = weight.shape[1]
        shape = (self._out, self._in // weight.group)
        kind = torch.float32 if blocks is None else torch.uint8
        each = 1 if offsets is None else 2
        self.matrix.kind = GROUPED_KINDS[weight.bits]
        self.matrix.groups = pointer("the groups' scales", groups, groups.dtype, *shape)
        self.matrix.offsets = pointer("the groups' offsets", offsets, kind, *shape)
        self.matrix.blocks = pointer("the blocks' scales", blocks, torch.float16, self._out, self._in // BLOCK, each)
        self.matrix.group, self.matrix.scales = weight.group, SCALES[groups.dtype]
        self.matrix.zero, self.matrix.interleaved = weight.zero, self._interleaved
        self.num_bytes = weight.num_bytes

    @property
    def numbers(self) -> GroupedWeight:
        """The weight as it was given; a copy if the kernels keep it interleaved."""
        return in_rows(self._kept) if self._interleaved else self._kept

    @property
    def tensors(self) -> list[Tensor]:
        """The memory that `matrix` points to."""
        more = (self._kept.groups, self._kept.offsets, self._kept.blocks)
        return [*(tensor for tensor in more if tensor is not None), *super().tensors]

    @property
    def weight(self) -> Tensor:
        """The weight in float32, [out, in]."""
        return self.numbers.values()

    def float_pieces(self, outputs: int) -> Iterator[Tensor]:
        """Yield the weight in float32, piece by piece. outputs: in each piece."""
        numbers = self.numbers
        return (numbers.values(first, first + outputs) for first in range(0, self._out, outputs))

    def _by_operators(self, x: Tensor) -> Tensor:
        return grouped_product(x, self.numbers, self._bias)
