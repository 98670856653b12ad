"""Weights in memory: rounded to 8 or 4 bits, and put into the order that the kernels multiply fastest.

Rounding gives the bits that PyTorch's operators give. A few threads take some rows each. Beside the result there
is one row in float32 for each thread, whatever the weight's size. The order is 16 outputs side by side (interleaved.h).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from layerskip_models.grouped_weight import GroupedWeight
from layerskip_models.kernels import library
from layerskip_models.kernels.library import KINDS, Grouping
from layerskip_models.kernels.pages import expect_large_pages
from layerskip_models.kernels.threads import num_threads

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # numbered alike in `Kind` and `Stored`
_SHARE = 1 << 19
"""Least numbers for a thread of its own."""
LANES = 16
"""Outputs that are side by side."""
FLIP = 0x80808080
"""Turns four signed bytes into unsigned ones that are 128 more, and back."""


def eight_bits(weight: Tensor, rounded: Tensor, scale: Tensor) -> bool:
    """Round a weight [out, in] to int8, with float32 scales [out].

    False where the library does not: a number is not finite, or the weight is of another kind.
    """
    chosen = library.kernels()
    if chosen is None or not _is_readable(weight):
        return False

    def some(rows: range) -> bool:
        row = _scratch(weight, torch.float32)
        own = weight[rows.start].data_ptr(), len(rows), weight.shape[1], _row_bytes(weight)
        to = rounded[rows.start].data_ptr(), scale[rows.start].data_ptr()
        return bool(chosen.eight_bit_rows(KINDS[weight.dtype], *own, row.data_ptr(), *to))

    return in_shares(weight, some)


def four_bits(
    weight: Tensor,
    *,
    steps: Tensor,
    exponents: range,
    packed: Tensor,
    groups: Tensor,
    factors: Tensor,
) -> bool:
    """Round a weight [out, in] to 4 bits in groups, with a scale each. `round_to_four_bits` has the meaning of all numbers.

    steps: float32. packed, groups, factors: where the result goes. False as above.
    """
    chosen = library.kernels()
    if chosen is None or not _is_readable(weight):
        return False
    size = weight.shape[1] // groups.shape[1]

    def some(rows: range) -> bool:
        first = rows.start
        by = Grouping(size, len(steps), steps.data_ptr(), exponents[0], exponents[-1])
        scratch = _scratch(weight, torch.float32), _scratch(weight, torch.uint8)
        own = weight[first].data_ptr(), len(rows), weight.shape[1], _row_bytes(weight)
        to = (one[first].data_ptr() for one in (packed, groups, factors))
        found = chosen.four_bit_rows(KINDS[weight.dtype], *own, byref(by), *(one.data_ptr() for one in scratch), *to)
        return bool(found)

    return in_shares(weight, some)


def _is_readable(weight: Tensor) -> bool:
    fits = weight.dtype in _FLOATS and weight.is_cpu and weight.dim() == 2 and 0 not in weight.shape
    return fits and weight.is_contiguous() and weight.data_ptr() % weight.element_size() == 0


def _row_bytes(weight: Tensor) -> int:
    return weight.shape[1] * weight.element_size()


def _scratch(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(weight.shape[1], dtype=dtype, device="cpu")


def in_shares(weight: Tensor, work: Callable[[range], bool], *, step: int = 1) -> bool:
    """Do the work on all rows, on as many threads as there is work for. Whether it says True every time.

    step: a share begins at a multiple of it.
    """
    rows = len(weight) // step
    count = max(1, min(num_threads(), rows, weight.numel() // _SHARE))
    ends = [len(weight) if one == count else rows * one // count * step for one in range(count + 1)]
    shares = [range(first, last) for first, last in pairwise(ends)]
    if count == 1:
        return work(shares[0])
    with ThreadPoolExecutor(count - 1, "rounding") as pool:
        others = [pool.submit(work, share) for share in shares[1:]]
        own = work(shares[0])
        return all([own, *(other.result() for other in others)])


def side_by_side(weight: Tensor) -> Tensor:
    """Copy a readable weight [out, in] with 16 outputs side by side (side_by_side.h), padded with zeros: [blocks, in, 16].

    In bfloat16 [blocks, in / 2, 16, 2].
    """
    kernels, (rows, inputs) = library.kernels(), weight.shape
    assert kernels is not None
    blocks, pair = -(-rows // LANES), 2 if weight.dtype is torch.bfloat16 else 1
    laid = torch.empty(blocks, -(-inputs // pair), LANES, pair, dtype=weight.dtype, device="cpu")
    expect_large_pages(laid)

    def some(rows: range) -> bool:
        to = laid[rows.start // LANES].data_ptr()
        kernels.lay_side_by_side(KINDS[weight.dtype], weight[rows.start].data_ptr(), len(rows), inputs, to)
        return True

    in_shares(weight, some, step=LANES)
    return laid if pair == 2 else laid.squeeze(3)


def rows_of(laid: Tensor, first: int, last: int, inputs: int) -> Tensor:
    """Return rows [first, last) of what `side_by_side` was given, in memory of their own. inputs: numbers in each."""
    blocks = laid[first // LANES : -(-last // LANES)]
    pairs = blocks.view(torch.int32).squeeze(3) if laid.dim() == 4 else blocks  # twice as fast as number by number
    rows = pairs.mT.reshape(-1).view(laid.dtype).view(len(blocks) * LANES, -1)
    start = first // LANES * LANES
    return rows[first - start : last - start, :inputs].contiguous()


def outputs_of(laid: Tensor, blocks: int, outputs: Tensor, *, words: bool) -> Tensor:
    """Copy some outputs, int64 [count], of what has 16 of them side by side to the same form, padded with zeros.

    blocks: of 16 outputs in `laid`. words: four bytes belong together; else each of its numbers is by itself.
    """
    numbers = (laid.view(-1).view(torch.int32) if words else laid).view(blocks, -1, LANES)
    places = torch.arange(len(outputs), device="cpu")
    taken = numbers.new_zeros(-(-len(outputs) // LANES), numbers.shape[1], LANES)
    taken[places // LANES, :, places % LANES] = numbers[outputs // LANES, :, outputs % LANES]
    return taken.view(-1).view(laid.dtype).view(-1, *laid.shape[1:])


def takes_interleaved(kind: int, outputs: int, inputs: int) -> bool:
    """Return whether this process's kernels want a matrix of this kind (`KINDS`) interleaved (matrix.h)."""
    kernels = library.kernels()
    return kernels is not None and bool(kernels.interleaves(kind, outputs, inputs))


def interleaved(weight: GroupedWeight, *, in_place: bool = False) -> GroupedWeight:
    """Return a weight in groups in that order, except its outputs' factors. Shapes stay, but do not say what is where.

    in_place: in the memory of `weight`, which is then of no more use.
    """
    packed, groups, offsets, factors, blocks = weight.tensors
    assert packed is not None and groups is not None
    reordered = [None if one is None else _own(one, in_place) for one in (packed, groups, offsets, blocks)]
    for tensor in reordered:
        if tensor is not None:
            interleave(tensor, words=tensor is reordered[0])
    packed, groups, offsets, blocks = reordered
    return replace(weight.with_tensors((packed, groups, offsets, factors, blocks)), interleaved=True)


def _own(tensor: Tensor, in_place: bool) -> Tensor:
    """Contiguous, in memory that may be written to, at an address that suits words."""
    reused = in_place and tensor.is_contiguous() and tensor.data_ptr() % 4 == 0
    return tensor if reused else tensor.clone(memory_format=torch.contiguous_format)


def in_rows(weight: GroupedWeight) -> GroupedWeight:
    """Return what `interleaved` was made of, in memory of its own; a weight in rows as it is."""
    if not weight.interleaved:
        return weight
    packed, groups, offsets, factors, blocks = weight.tensors
    assert packed is not None
    others = (None if one is None else without_interleaving(one) for one in (groups, offsets, blocks))
    groups, offsets, blocks = others
    rows = weight.with_tensors((without_interleaving(packed, words=True), groups, offsets, factors, blocks))
    return replace(rows, interleaved=False)


def interleave(tensor: Tensor, *, words: bool = False, flip: int = 0) -> None:
    """Reorder a contiguous tensor, [out, ...], in place. words: four bytes move as one. flip: bits to turn over in each."""
    kernels, row = library.kernels(), tensor[0].numel() * tensor.element_size()
    assert kernels is not None
    size = 4 if words else tensor.element_size()

    def some(rows: range) -> bool:
        scratch = torch.empty(LANES * row // 4 + 1, dtype=torch.int32, device="cpu")
        first = tensor.data_ptr() + rows.start * row
        kernels.interleave(first, len(rows), row // size, size, flip, scratch.data_ptr())
        return True

    in_shares(tensor, some, step=LANES)


def without_interleaving(tensor: Tensor, *, words: bool = False) -> Tensor:
    """Return what `interleave` was given, in memory of its own."""
    numbers = tensor.view(-1).view(torch.int32) if words else tensor
    blocks = numbers.view(len(tensor) // LANES, -1, LANES)
    return blocks.mT.contiguous().view(-1).view(tensor.dtype).view(tensor.shape)
