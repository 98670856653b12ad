"""The order of weights in memory that the kernels multiply fastest: 16 outputs side by side (interleaved.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from layerskip_models.grouped_weight import GroupedWeight
from layerskip_models.kernels import library
from layerskip_models.kernels.native_rounding import in_shares

_LANES = 16
_FLIP = 0x80808080
"""Turns four signed bytes into unsigned ones that are 128 more, and back."""


def takes_interleaved(kind: int, outputs: int, inputs: int) -> bool:
    """Whether this process's kernels want a matrix of this kind (`KINDS`, `GROUPED_KINDS`) interleaved (matrix.h)."""
    kernels = library.kernels()
    return kernels is not None and bool(kernels.interleaves(kind, outputs, inputs))


def interleaved_floats(weight: Tensor) -> Tensor:
    """Weights in bfloat16, [out, in], in that order, two inputs at a time; in memory of their own."""
    made = weight.clone(memory_format=torch.contiguous_format)
    _interleave(made, words=True)
    return made


def floats_in_rows(stored: Tensor) -> Tensor:
    """Return what `interleaved_floats` was given."""
    return _in_rows(stored, words=True)


def interleave_bytes(rounded: Tensor) -> None:
    """Reorder 8-bit weights, int8 [out, in], contiguous, in place. Each becomes an unsigned byte, 128 more."""
    _interleave(rounded, words=True, flip=_FLIP)


def bytes_in_rows(stored: Tensor) -> Tensor:
    """Return what `interleave_bytes` was given."""
    return (_in_rows(stored, words=True).view(torch.uint8) ^ 128).view(torch.int8)


def interleaved(weight: GroupedWeight, *, in_place: bool = False) -> GroupedWeight:
    """Return a weight in groups in that order, except its outputs' factors. Shapes stay, but do not say what is where.

    in_place: in the memory of `weight`, which is then of no more use.
    """
    packed, groups, offsets, factors, blocks = weight.tensors
    assert packed is not None and groups is not None
    reordered = [None if one is None else _own(one, in_place) for one in (packed, groups, offsets, blocks)]
    for tensor in reordered:
        if tensor is not None:
            _interleave(tensor, words=tensor is reordered[0])
    packed, groups, offsets, blocks = reordered
    return weight.with_tensors((packed, groups, offsets, factors, blocks))


def _own(tensor: Tensor, in_place: bool) -> Tensor:
    """Contiguous, in memory that may be written to, at an address that suits words."""
    reused = in_place and tensor.is_contiguous() and tensor.data_ptr() % 4 == 0
    return tensor if reused else tensor.clone(memory_format=torch.contiguous_format)


def in_rows(weight: GroupedWeight) -> GroupedWeight:
    """Return what `interleaved` was made of, in memory of its own."""
    packed, groups, offsets, factors, blocks = weight.tensors
    assert packed is not None
    others = (None if one is None else _in_rows(one) for one in (groups, offsets, blocks))
    groups, offsets, blocks = others
    return weight.with_tensors((_in_rows(packed, words=True), groups, offsets, factors, blocks))


def _interleave(tensor: Tensor, *, words: bool = False, flip: int = 0) -> None:
    """words: four bytes move as one."""
    kernels, row = library.kernels(), tensor[0].numel() * tensor.element_size()
    assert kernels is not None
    size = 4 if words else tensor.element_size()

    def some(rows: range) -> bool:
        scratch = torch.empty(_LANES * row // 4 + 1, dtype=torch.int32, device="cpu")
        first = tensor.data_ptr() + rows.start * row
        kernels.interleave(first, len(rows), row // size, size, flip, scratch.data_ptr())
        return True

    in_shares(tensor, some, step=_LANES)


def _in_rows(tensor: Tensor, *, words: bool = False) -> Tensor:
    numbers = tensor.view(-1).view(torch.int32) if words else tensor
    blocks = numbers.view(len(tensor) // _LANES, -1, _LANES)
    return blocks.mT.contiguous().view(-1).view(tensor.dtype).view(tensor.shape)
