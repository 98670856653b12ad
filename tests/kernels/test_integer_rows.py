"""Weights of 8 and 4 bits on the kernels: rows as integers are multiplied without any rounding but the row's own."""

from __future__ import annotations

from ctypes import addressof

import pytest
import torch
from torch import Tensor

from cut_rows import limbs, splits
from layerskip_models.kernels import library
from layerskip_models.kernels.library import Matrix
from layerskip_models.kernels.native_linear import NativeInt8Linear

VARIANTS = library.runnable_variants() if library.LIBRARY.is_file() else ()
CUT_ROWS = ("amx", "vnni", "avx512", "avx2")
"""The variants that cut rows to 16 bits for weights in groups."""
integers = pytest.mark.skipif("vnni" not in VARIANTS, reason="this processor multiplies no bytes (AVX-512 VNNI)")


def product(variant: str, matrix: Matrix, x: Tensor, out: int, threads: int = 1) -> Tensor:
    y = torch.empty(x.shape[0], out)
    library.load(variant).linear(addressof(matrix), x.data_ptr(), x.shape[0], None, y.data_ptr(), threads)
    return y


def fixed_point(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as limbs.h has them: whole numbers of three signed bytes, int64 [rows, in], and units, float64 [rows, 1]."""
    peak = x.double().abs().amax(1, keepdim=True)
    exponent = 23 - torch.frexp(peak.float()).exponent
    exponent = torch.where(peak * 2.0**exponent > 127 * 65536 + 127 * 256 + 127, exponent - 1, exponent)
    exponent = torch.where(peak == 0, 0, exponent)
    return (x.double() * 2.0**exponent).round().long(), 2.0 ** -exponent.double()


def rows_of(count: int, width: int) -> Tensor:
    """Rows of all sizes, one with an outlier, one of zeros, one whose largest number is the largest of its power of two."""
    x = torch.randn(count, width) * torch.logspace(-30, 30, count).unsqueeze(1)
    x[0, 0] *= 1000
    x[1] = 0
    x[2] /= x[2].abs().max()
    x[2, -1] = 2 - 2.0**-23
    return x


@integers
@pytest.mark.parametrize(("out", "width"), [(32, 64), (64, 192), (160, 1024), (32, 8256)])
def test_eight_bit_weights_are_multiplied_exactly(out: int, width: int) -> None:
    torch.manual_seed(out)
    rounded = NativeInt8Linear(torch.randn(out, width)).numbers_in_rows
    rounded[0] = -128  # the largest magnitude that a byte holds, everywhere
    linear = NativeInt8Linear.of_rounded(rounded.clone(), torch.rand(out))
    assert linear.matrix.interleaved and torch.equal(linear.numbers_in_rows, rounded)
    x = rows_of(9, width)
    q, unit = fixed_point(x)
    expected = ((q @ rounded.long().T).double() * unit).float() * linear.tensors[1]
    alone = torch.cat([product("vnni", linear.matrix, row, out) for row in x.split(1)])
    assert torch.equal(alone, expected)
    for threads in (1, 3):
        assert torch.equal(product("vnni", linear.matrix, x, out, threads), expected)


@integers
@pytest.mark.parametrize("width", [1 << 16, 70_016])
def test_no_sum_is_too_large_for_its_integer(width: int) -> None:
    """The largest weights and limbs: sums of more inputs would not fit 32 bits, so these are multiplied as floats."""
    linear = NativeInt8Linear(torch.full((32, width), 127.0))
    for x in (torch.full((2, width), 127 / 64), torch.full((2, width), -127 / 64)):  # 127, 0, 0 in limbs
        expected = (x.double() @ linear.weight.double().T).float()
        torch.testing.assert_close(product("vnni", linear.matrix, x, 32), expected, rtol=1e-3, atol=0)


@integers
def test_a_row_that_is_no_number_stays_none_and_spoils_no_other() -> None:
    linear = NativeInt8Linear(torch.randn(32, 128))
    x = torch.randn(5, 128)
    whole = product("vnni", linear.matrix, x, 32)
    x[1, 127], x[3, 0] = torch.nan, -torch.inf
    spoilt = product("vnni", linear.matrix, x, 32)
    assert spoilt[[1, 3]].isnan().all()
    assert torch.equal(spoilt[[0, 2, 4]], whole[[0, 2, 4]])


def test_the_trial_of_splits_cuts_rows_as_the_kernels_do() -> None:
    x = rows_of(9, 70)[3:]  # without the row whose largest number would need one bit more
    q, unit = fixed_point(x)
    assert torch.equal(limbs(3)(x.double()), q * unit)
    x = torch.randn(100, 100)
    assert torch.equal(splits(3)(x), x)
    assert not torch.equal(splits(2)(x), x)
