"""Linears on our own kernels with weights of small numbers that share scales in groups of inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from layerskip_models.compact_linear import grouped_product
from layerskip_models.grouped_weight import BLOCK, GroupedWeight
from layerskip_models.kernels.library import GROUPED_KINDS, SCALES
from layerskip_models.kernels.native_linear import NativeLinear, pointer, readable


def _sums_fit(weight: GroupedWeight) -> bool:
    """Whether the kernels' integer sums over a block fit 32 bits (`span_of` in words.h), as those of GGUF files do.

    weight: with integer scales.
    """
    scale = 128 if weight.groups.dtype == torch.int8 else int(weight.groups.max())
    number = int(weight.packed.max()) if weight.bits == 8 else 2**weight.bits - 1
    if weight.offsets is None:
        number = max(weight.zero, number - weight.zero)
    return number * scale <= (1 << 13 if weight.offsets is not None and weight.group == 16 else 1 << 12)


class NativeGroupedLinear(NativeLinear):
    """x W^T + b with W in 4, 6 or 8 bits, in groups.

    On processors that multiply bytes, inputs are rounded to 16-bit fixed point relative to the largest of their row.
    Numbers that were rounded make a different model; "the model's own output" then means that of this model.
    Raises what `NativeLinear` raises.
    """

    def __init__(self, weight: GroupedWeight, bias: Tensor | None = None) -> None:
        if weight.blocks is not None and not _sums_fit(weight):
            weight = weight.as_bytes()
        self._set(weight.packed, weight.factors, bias)
        others = (None if one is None else readable(one) for one in (weight.groups, weight.offsets, weight.blocks))
        groups, offsets, blocks = others
        assert groups is not None
        self.numbers = weight = GroupedWeight(
            self.stored, groups, offsets, self._scale, blocks, bits=weight.bits, zero=weight.zero
        )
        self._in = self.matrix.in_features = weight.shape[1]
        shape = (self._out, self._in // weight.group)
        kind = torch.float32 if blocks is None else torch.uint8
        each = 1 if offsets is None else 2
        self.matrix.kind = GROUPED_KINDS[weight.bits]
        self.matrix.groups = pointer("the groups' scales", groups, groups.dtype, *shape)
        self.matrix.offsets = pointer("the groups' offsets", offsets, kind, *shape)
        self.matrix.blocks = pointer("the blocks' scales", blocks, torch.float16, self._out, self._in // BLOCK, each)
        self.matrix.group, self.matrix.scales = weight.group, SCALES[groups.dtype]
        self.matrix.zero = weight.zero
        self.num_bytes = weight.num_bytes

    @property
    def tensors(self) -> list[Tensor]:
        """The memory that `matrix` points to."""
        more = (self.numbers.groups, self.numbers.offsets, self.numbers.blocks)
        return [*(tensor for tensor in more if tensor is not None), *super().tensors]

    @property
    def weight(self) -> Tensor:
        """The weight in float32, [out, in]."""
        return self.numbers.values()

    def _by_operators(self, x: Tensor) -> Tensor:
        return grouped_product(x, self.numbers, self._bias)
