"""Weights rounded to 4 bits: for each group of inputs the scale, among some, that leaves the smallest squared error.

Rounding to nearest with the scale that just holds the largest number is wasteful, because most numbers of a group are much
smaller. So a few steps around that one are tried. For each, the numbers are rounded, and scale and offset fitted to what they
were rounded to by least squares. The best is kept. No text is needed for it. Without offsets, the native library does it
(four_bit_rounding.h).
"""

from __future__ import annotations

import torch
from torch import Tensor

from layerskip_models.grouped_weight import GROUP_SIZES, GroupedWeight, group_size, pack_nibbles, powers_of_two
from layerskip_models.kernels.native_rounding import four_bits
from layerskip_models.kernels.pages import expect_large_pages

_PIECE = 1 << 18  # numbers that are rounded at a time: a few times their size is in memory, whatever the weight's
_TRIALS = 7  # of which 21 would lower the error of normal weights by 0.1 %, and 1 raises it by 4 %
_LEAST_PEAK = 2.0**-60  # of a group: a smaller one has a scale of 0 in float16, and an inverse that may be too large
_EXPONENTS = range(-6, 16)  # of a row's largest number, for scales that float16 holds without loss of precision


def round_to_four_bits(weight: Tensor, *, group: int, symmetric: bool) -> GroupedWeight:
    """Round a weight [out, in] in groups of `group` inputs, or of 64 or 32 if these do not divide the inputs.

    symmetric: a scale for each group, 4 + 16 / group bits a weight; else also an offset, 4 + 48 / group bits.
    NaN stays NaN. Raises ValueError where the number of inputs is not a multiple of 64 (`fits_four_bits`).
    """
    rows, columns = weight.shape
    size = _size(columns, group)
    if size is None:
        raise ValueError(f"4-bit weights need a multiple of 64 inputs, got {columns}")
    values = weight.new_empty(rows, columns // 2, dtype=torch.uint8)
    groups = weight.new_empty(rows, columns // size, dtype=torch.float16)
    expect_large_pages(values)
    if symmetric:
        factors = weight.new_empty(rows, dtype=torch.float32)
        steps = torch.tensor(_SYMMETRIC, dtype=torch.float32, device="cpu")
        if four_bits(
            weight.detach().contiguous(),
            steps=steps,
            exponents=_EXPONENTS,
            packed=values,
            groups=groups,
            factors=factors,
        ):
            return GroupedWeight(values, groups, None, None if bool((factors == 1).all()) else factors)
    return _by_operators(weight, values, groups, symmetric)


def _by_operators(weight: Tensor, values: Tensor, groups: Tensor, symmetric: bool) -> GroupedWeight:
    rows, columns = weight.shape
    size = columns // groups.shape[1]
    offsets = None if symmetric else torch.empty_like(groups, dtype=torch.float32)
    factors = _factors(weight.detach().abs().amax(dim=1))
    step = max(_PIECE // columns, 1)
    for first in range(0, rows, step):
        here = slice(first, first + step)
        part = weight[here].detach().float()
        if factors is not None:
            part = part / factors[here].unsqueeze(1)
        part = part.unflatten(1, (-1, size))
        numbers, scale, offset = _symmetric(part) if symmetric else _with_offsets(part)
        values[here] = pack_nibbles(numbers.flatten(1))
        groups[here] = scale.squeeze(2)
        if offsets is not None:
            offsets[here] = offset.squeeze(2)
    return GroupedWeight(values, groups, offsets, factors)


def fits_four_bits(columns: int) -> bool:
    """Whether 4-bit weights can have this many inputs."""
    return _size(columns, max(GROUP_SIZES)) is not None


def _size(columns: int, most: int) -> int | None:
    sizes = (size for size in GROUP_SIZES if size <= most and columns % size == 0)
    return next((size for size in sizes if group_size(columns, columns // size) == size), None)


def _factors(peaks: Tensor) -> Tensor | None:
    """Powers of two, float32 [out], that bring each row's numbers to where float16 holds their scales; None for 1.

    A row's depends on no other row, so that rows are rounded alike however many are rounded together.
    """
    exponents = torch.frexp(peaks.float()).exponent
    usual = (exponents >= _EXPONENTS[0]) & (exponents <= _EXPONENTS[-1])
    if bool(usual.all()):
        return None
    return powers_of_two(exponents.masked_fill(usual, 0))


def _symmetric(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, scales and offsets of x, [rows, groups, size], so that the largest number of a group is near -8 scales."""
    peak = x.gather(2, x.abs().argmax(dim=2, keepdim=True))
    inverse = torch.where(peak.abs() < _LEAST_PEAK, 0.0, 1 / peak)
    best, numbers, scale = torch.full_like(peak, torch.inf), torch.zeros_like(x), torch.zeros_like(peak)
    for steps in _SYMMETRIC:
        tried = (x * (steps * inverse)).round_().clamp_(-8, 7)
        fitted = _quotient(_sum(tried * x), tried.square().sum(2, keepdim=True)).half().float()
        error = _sum((x - tried * fitted).square_())
        better = ~(error >= best)  # NaN is taken, and stays
        best, scale = torch.where(better, error, best), torch.where(better, fitted, scale)
        numbers = torch.where(better, tried, numbers)
    return numbers.add_(8), scale, -8 * scale


def _with_offsets(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Do the same with numbers around the middle of a group's smallest and largest."""
    low, high = x.amin(2, keepdim=True), x.amax(2, keepdim=True)
    middle, inverse = (low + high) / 2, _quotient(torch.ones_like(low), high - low)
    best, numbers = torch.full_like(low, torch.inf), torch.zeros_like(x)
    scale, offset = torch.zeros_like(low), torch.zeros_like(low)
    mean = x.mean(2, keepdim=True)
    for steps in _trials(14.5, 17.5):
        tried = (x - middle).mul_(steps * inverse).add_(7.5).round_().clamp_(0, 15)
        centre = tried.mean(2, keepdim=True)
        spread = (tried - centre).square_().sum(2, keepdim=True)
        fitted = _quotient(((tried - centre) * (x - mean)).sum(2, keepdim=True), spread).half().float()
        shift = mean - fitted * centre
        error = torch.addcmul(x - shift, tried, fitted, value=-1).square_().sum(2, keepdim=True)
        better = ~(error >= best)
        best, numbers = torch.where(better, error, best), torch.where(better, tried, numbers)
        scale, offset = torch.where(better, fitted, scale), torch.where(better, shift, offset)
    return numbers, scale, offset


def _sum(x: Tensor) -> Tensor:
    """Over a group, input by input: in the order of the native library."""
    total = torch.zeros_like(x[:, :, :1])
    for one in x.unbind(2):
        total += one.unsqueeze(2)
    return total


def _trials(first: float, last: float) -> list[float]:
    """How many steps a group's range is divided into, from `first` to `last`."""
    return [first + (last - first) * trial / (_TRIALS - 1) for trial in range(_TRIALS)]


_SYMMETRIC = _trials(-8.8, -7.2)


def _quotient(of: Tensor, by: Tensor) -> Tensor:
    """0 where it is divided by 0; NaN stays."""
    return torch.where(by == 0, 0.0, of / by)
