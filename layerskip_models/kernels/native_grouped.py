"""Linears on our own kernels with weights of small numbers that share scales in groups of inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from layerskip_models.compact_linear import grouped_product
from layerskip_models.grouped_weight import BLOCK, GroupedWeight
from layerskip_models.kernels import library
from layerskip_models.kernels.library import GROUPED_KINDS, SCALES
from layerskip_models.kernels.native_linear import NativeLinear, pointer, readable
from layerskip_models.kernels.pages import expect_large_pages

_LANES = 16
"""Outputs that are side by side in memory where the kernels multiply digits (interleaved.h)."""
_WHOLE = 2 * _LANES
"""The number of outputs must be a multiple of it, so that gates and the ups below them have whole blocks of 16 each."""


def interleaved(weight: GroupedWeight) -> GroupedWeight:
    """The same numbers with 16 outputs side by side, but for the outputs' factors.

    Every 4 bytes of an output are followed by those of the next output, and scales and offsets likewise. Shapes stay what
    they were, and no longer say what is where. The number of outputs must be a multiple of 16.
    """
    return _transposed(weight, (_LANES, -1))


def in_rows(weight: GroupedWeight) -> GroupedWeight:
    """What `interleaved` was made of."""
    return _transposed(weight, (-1, _LANES))


def _transposed(weight: GroupedWeight, shape: tuple[int, int]) -> GroupedWeight:
    """shape: how each block of 16 outputs is laid out before it is transposed. Numbers move in words of 4 bytes."""

    def turned(tensor: Tensor) -> Tensor:
        blocks = readable(tensor).view(len(tensor) // _LANES, *shape).mT
        made = tensor.new_empty(blocks.shape)
        expect_large_pages(made)
        return made.copy_(blocks).view(tensor.shape)

    packed, groups, offsets, factors, blocks = weight.tensors
    assert packed is not None and groups is not None
    words = packed.clone() if packed.storage_offset() % 4 or packed.data_ptr() % 4 else packed.contiguous()
    return weight.with_tensors(
        (
            turned(words.view(torch.int32)).view(torch.uint8),
            turned(groups),
            None if offsets is None else turned(offsets),
            factors,
            None if blocks is None else turned(blocks),
        )
    )


class NativeGroupedLinear(NativeLinear):
    """x W^T + b with W in 4, 6 or 8 bits, in groups.

    On processors that multiply bytes, inputs are rounded to 16-bit fixed point relative to the largest of their row, where
    the number of outputs is a multiple of 32.
    Numbers that were rounded make a different model; "the model's own output" then means that of this model.
    Raises what `NativeLinear` raises.
    """

    def __init__(self, weight: GroupedWeight, bias: Tensor | None = None) -> None:
        chosen = library.kernels()
        self._interleaved = chosen is not None and bool(chosen.interleaves()) and len(weight.packed) % _WHOLE == 0
        if self._interleaved:
            weight = interleaved(weight)
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
        """The weight as it was given. Where the kernels keep it interleaved, a copy."""
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

    def _by_operators(self, x: Tensor) -> Tensor:
        return grouped_product(x, self.numbers, self._bias)
