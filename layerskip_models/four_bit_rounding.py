"""Weights rounded to 4 bits: for each group of inputs the scale, among some, that leaves the smallest squared error.

Rounding to nearest with the scale that just holds the largest number is wasteful, because most numbers of a group are much
smaller. So a few steps around that one are tried. For each, the numbers are rounded, and the scale is fitted to what they
were rounded to by least squares. The best is kept. No text is needed for it. The native library does it where it is there
(four_bit_rounding.h).
"""

from __future__ import annotations

import torch
from torch import Tensor

from layerskip_models.grouped_weight import GROUP_SIZES, GroupedWeight, group_size, pack_nibbles, powers_of_two
from layerskip_models.kernels.pages import expect_large_pages
from layerskip_models.kernels.weights import four_bits

_PIECE = 1 << 18  # numbers that are rounded at a time: a few times their size is in memory, whatever the weight's
_TRIALS = 7  # of which 21 would lower the error of normal weights by 0.1 %, and 1 raises it by 4 %
_STEPS = [-8.8 + (-7.2 - -8.8) * trial / (_TRIALS - 1) for trial in range(_TRIALS)]
"""Steps that a group's largest number is tried as."""
_LEAST_PEAK = 2.0**-60  # of a group: a smaller one has a scale of 0 in float16, and an inverse that may be too large
_EXPONENTS = range(-6, 16)  # of a row's largest number, for scales that float16 holds without loss of precision


def round_to_four_bits(weight: Tensor, *, group: int) -> GroupedWeight:
    """Round a weight [out, in] in groups of `group` inputs, or of 64 or 32 if these do not divide the inputs.

    Each group has a scale: 4 + 16 / group bits a weight.
    NaN stays NaN. Raises ValueError where the number of inputs is not a multiple of 64 (`fits_four_bits`).
    """
    rows, columns = weight.shape
    size = _size(columns, group)
    if size is None:
        raise ValueError(f"4-bit weights need a multiple of 64 inputs, got {columns}")
    values = weight.new_empty(rows, columns // 2, dtype=torch.uint8)
    groups = weight.new_empty(rows, columns // size, dtype=torch.float16)
    expect_large_pages(values)
    factors = weight.new_empty(rows, dtype=torch.float32)
    steps = torch.tensor(_STEPS, dtype=torch.float32, device="cpu")
    contiguous = weight.detach().contiguous()
    if four_bits(contiguous, steps=steps, exponents=_EXPONENTS, packed=values, groups=groups, factors=factors):
        return GroupedWeight(values, groups, None, None if bool((factors == 1).all()) else factors)
    return _by_operators(weight, values, groups)


def _by_operators(weight: Tensor, values: Tensor, groups: Tensor) -> GroupedWeight:
    rows, columns = weight.shape
    size = columns // groups.shape[1]
    factors = _factors(weight.detach().abs().amax(dim=1))
    step = max(_PIECE // columns, 1)
    for first in range(0, rows, step):
        here = slice(first, first + step)
        part = weight[here].detach().float()
        if factors is not None:
            part = part / factors[here].unsqueeze(1)
        part = part.unflatten(1, (-1, size))
        numbers, scale = _rounded(part)
        values[here] = pack_nibbles(numbers.flatten(1))
        groups[here] = scale.squeeze(2)
    return GroupedWeight(values, groups, None, factors)


def fits_four_bits(columns: int) -> bool:
    """Return whether 4-bit weights can have this many inputs."""
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


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers and scales of x, [rows, groups, size], so that the largest number of a group is near -8 scales."""
    peak = x.gather(2, x.abs().argmax(dim=2, keepdim=True))
    inverse = torch.where(peak.abs() < _LEAST_PEAK, 0.0, 1 / peak)
    best, numbers, scale = torch.full_like(peak, torch.inf), torch.zeros_like(x), torch.zeros_like(peak)
    for steps in _STEPS:
        tried = (x * (steps * inverse)).round_().clamp_(-8, 7)
        fitted = _quotient(_sum(tried * x), tried.square().sum(2, keepdim=True)).half().float()
        error = _sum((x - tried * fitted).square_())
        better = ~(error >= best)  # NaN is taken, and stays
        best, scale = torch.where(better, error, best), torch.where(better, fitted, scale)
        numbers = torch.where(better, tried, numbers)
    return numbers.add_(8), scale


def _sum(x: Tensor) -> Tensor:
    """Over a group, input by input: in the order of the native library."""
    total = torch.zeros_like(x[:, :, :1])
    for one in x.unbind(2):
        total += one.unsqueeze(2)
    return total


def _quotient(of: Tensor, by: Tensor) -> Tensor:
    """0 where it is divided by 0; NaN stays."""
    return torch.where(by == 0, 0.0, of / by)
