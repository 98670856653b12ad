"""The order of weights in memory that the kernels multiply fastest: 16 outputs side by side (interleaved.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from layerskip_models.grouped_weight import CHUNK, GroupedWeight
from layerskip_models.kernels.library import Kernels
from layerskip_models.kernels.pages import expect_large_pages

_LANES = 16
_MOST_INPUTS = 1 << 16
"""So many products of bytes have a sum that 32 bits hold."""


def takes_interleaved(kernels: Kernels | None, outputs: int, inputs: int, *, grouped: bool) -> bool:
    """Whether these kernels want a matrix interleaved. grouped: of weights in groups, else of 8-bit weights.

    Outputs must be a multiple of 32, so that gates and the ups below them are whole blocks of 16, inputs one of 64.
    """
    fits = outputs % (2 * _LANES) == 0 and inputs % CHUNK == 0 and (grouped or inputs <= _MOST_INPUTS)
    return kernels is not None and fits and bool(kernels.interleaves(grouped))


def interleaved_bytes(rounded: Tensor) -> Tensor:
    """8-bit weights, int8 [out, in], in that order, each plus 128 as an unsigned byte. Their dtype and shape stay."""
    made = _transposed(rounded, (_LANES, -1), words=True)
    made.view(torch.uint8).bitwise_xor_(128)
    return made


def bytes_in_rows(stored: Tensor) -> Tensor:
    """What `interleaved_bytes` was made of."""
    return _transposed(stored.view(torch.uint8) ^ 128, (-1, _LANES), words=True).view(torch.int8)


def interleaved(weight: GroupedWeight) -> GroupedWeight:
    """A weight in groups in that order, but for its outputs' factors. Shapes stay, and no longer say what is where."""
    return _reordered(weight, (_LANES, -1))


def in_rows(weight: GroupedWeight) -> GroupedWeight:
    """What `interleaved` was made of."""
    return _reordered(weight, (-1, _LANES))


def _reordered(weight: GroupedWeight, shape: tuple[int, int]) -> GroupedWeight:
    packed, groups, offsets, factors, blocks = weight.tensors
    assert packed is not None and groups is not None
    others = (None if one is None else _transposed(one, shape) for one in (groups, offsets, blocks))
    groups, offsets, blocks = others
    return weight.with_tensors((_transposed(packed, shape, words=True), groups, offsets, factors, blocks))


def _transposed(tensor: Tensor, shape: tuple[int, int], *, words: bool = False) -> Tensor:
    """Transpose every 16 outputs' numbers, which have this shape before. words: move four bytes at a time."""
    tensor = tensor.contiguous()
    if words and tensor.data_ptr() % 4:
        tensor = tensor.clone()
    numbers = tensor.flatten().view(torch.int32) if words else tensor
    blocks = numbers.view(len(tensor) // _LANES, *shape).mT
    made = torch.empty_like(tensor)
    expect_large_pages(made)
    (made.flatten().view(torch.int32) if words else made).view(blocks.shape).copy_(blocks)
    return made
