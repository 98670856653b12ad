"""Weights of few bits on the kernels: rows as integers are multiplied without any rounding but the row's own."""

from __future__ import annotations

from ctypes import addressof

import pytest
import torch
from torch import Tensor

from layerskip_models.checkpoints.gguf_blocks import GROUPED
from layerskip_models.four_bit_rounding import round_to_four_bits
from layerskip_models.grouped_weight import GroupedWeight, pack_sixes
from layerskip_models.kernels import library
from layerskip_models.kernels.library import Matrix
from layerskip_models.kernels.native_linear import NativeGroupedLinear, NativeInt8Linear
from layerskip_models.kernels.weights import in_rows, interleaved
from test_native import drawn, needs_native, use
from test_products import MIXTURES, rounded_rows, weight_of

VARIANTS = library.runnable_variants() if library.LIBRARY.is_file() else ()
integers = pytest.mark.skipif("vnni" not in VARIANTS, reason="this processor multiplies no bytes (AVX-512 VNNI)")


def product(variant: str, matrix: Matrix, x: Tensor, threads: int = 1) -> Tensor:
    y = torch.empty(x.shape[0], matrix.out_features)
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


def rows_with_outliers(count: int, columns: int) -> Tensor:
    """Some with outliers, which get finer limbs."""
    x = drawn(count, columns, seed=1)
    x[::3, 5] *= 1e4
    return x


@integers
@pytest.mark.parametrize(("out", "width"), [(32, 64), (64, 192), (160, 1024), (32, 8256)])
def test_eight_bit_weights_are_multiplied_exactly(out: int, width: int) -> None:
    torch.manual_seed(out)
    rounded = NativeInt8Linear(torch.randn(out, width)).numbers_in_rows
    rounded[0] = -128  # the largest magnitude that a byte holds, everywhere
    linear = NativeInt8Linear.__new__(NativeInt8Linear)
    linear._keep(rounded.clone(), torch.rand(out), None)
    assert linear.matrix.interleaved and torch.equal(linear.numbers_in_rows, rounded)
    x = rows_of(9, width)
    q, unit = fixed_point(x)
    expected = ((q @ rounded.long().T).double() * unit).float() * linear.tensors[1]
    alone = torch.cat([product("vnni", linear.matrix, row) for row in x.split(1)])
    assert torch.equal(alone, expected)
    for threads in (1, 3):
        assert torch.equal(product("vnni", linear.matrix, x, threads), expected)


@integers
@pytest.mark.parametrize("width", [1 << 16, 70_016])
def test_no_sum_of_eight_bit_weights_is_too_large_for_its_integer(width: int) -> None:
    """The largest weights and limbs: sums of more inputs would not fit 32 bits, so these are multiplied as floats."""
    linear = NativeInt8Linear(torch.full((32, width), 127.0))
    for x in (torch.full((2, width), 127 / 64), torch.full((2, width), -127 / 64)):  # 127, 0, 0 in limbs
        expected = (x.double() @ linear.weight.double().T).float()
        torch.testing.assert_close(product("vnni", linear.matrix, x), expected, rtol=1e-3, atol=0)


def largest() -> dict[str, GroupedWeight]:
    """The largest numbers of either sign, and numbers and scales as large as files may have."""
    found = {}
    for form in ("Q8_0", "Q4_0", "Q6_K"):
        data = weight_of(form, 32, 512)
        for byte in (0, 255):
            found[f"{form} {byte}"] = data.with_tensors((torch.full_like(data.packed, byte), *data.tensors[1:]))
    ones = torch.ones(32, 2, 1, dtype=torch.float16)
    groups = torch.full((32, 32), -128, dtype=torch.int8)
    found["Q6"] = GroupedWeight(pack_sixes(torch.zeros(32, 512)), groups, blocks=ones, bits=6, zero=32)
    found["Q6 with offsets"] = found["Q6"].as_sixes_in_blocks()
    found["Q5"] = GroupedWeight(
        torch.full((32, 512), 31, dtype=torch.uint8),
        torch.full((32, 16), 63, dtype=torch.uint8),
        torch.zeros(32, 16, dtype=torch.uint8),
        blocks=ones.repeat(1, 1, 2),
        bits=8,
    )
    return found


LARGEST = largest()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("form", LARGEST)
@pytest.mark.parametrize("bits", [8, 16])
def test_no_sum_of_groups_is_too_large_for_its_integer(form: str, variant: str, bits: int) -> None:
    """With rows whose numbers are all the largest, of either sign, and with signs that alternate."""
    weight = LARGEST[form]
    with use(variant):
        linear = NativeGroupedLinear(weight, rows=bits)
    x = torch.ones(20, 512) * torch.tensor([1.0, -1.0, 1.99, 1.0, -32639.0]).repeat(4).unsqueeze(1)
    x[3, ::2] = -1
    expected = x.double() @ weight.values().double().T
    bound = 1e-4 * (x.abs().double() @ weight.values().abs().double().T)
    for count in (1, 5, 20):
        assert bool(((product(variant, linear.matrix, x[:count]) - expected[:count]).abs() < bound[:count]).all())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("columns", [64, 256])
def test_an_outlier_costs_small_numbers_nothing(columns: int, variant: str) -> None:
    """However short the row is: of 64 numbers none is more than 64 times the mean of all, itself included."""
    weight = round_to_four_bits(drawn(32, columns), group=32)
    with use(variant):
        linear = NativeGroupedLinear(weight, rows=16)
    x = drawn(7, columns, seed=1)
    x[:, 5] *= torch.tensor([1e4, 1, 1e4, 100, 1, 1e5, 30])  # rows without outliers beside those with one
    expected = x.double() @ weight.values().double().T
    bound = 1e-4 * (x.abs().double() @ weight.values().abs().double().T)
    bound[[0, 2, 5]] /= 10  # the outliers' rows get finer limbs
    assert bool(((product(variant, linear.matrix, x) - expected).abs() < bound).all())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("form", ["Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_rows_of_8_bits_of_all_sizes(form: str, variant: str) -> None:
    """Compare with rounding in groups of 32: zeros, outliers, and numbers too small or large for a factor of their own."""
    weight = weight_of(form, 64, 512)
    with use(variant):
        linear = NativeGroupedLinear(weight)
    x = drawn(41, 512, seed=1) * torch.logspace(-42, 30, 41).unsqueeze(1)
    x[1], x[30, 100:300], x[::3, 7], x[20, 64:96] = 0, 0, x[::3, 7] * 1e4, 3e-44
    rounded = rounded_rows(x)
    found = product(variant, linear.matrix, x)
    size = rounded.abs() @ weight.values().double().abs().T
    assert linear.row_bits == 8 and NativeGroupedLinear(weight_of("Q8_0", 64, 512), rows=8).row_bits == 16
    assert bool(((found - rounded @ weight.values().double().T).abs() <= 2e-6 * size + 1e-37).all())
    for name in {*VARIANTS} - {"baseline"} if variant != "baseline" else ():  # which has no fused multiply-add
        assert torch.equal(product(name, linear.matrix, x, 3), found)
    x[7, 100], x[9, 3] = torch.nan, torch.inf
    spoilt = product(variant, linear.matrix, x)
    assert spoilt[[7, 9]].isnan().all() and torch.equal(spoilt[10:], found[10:])


@pytest.mark.parametrize("form", [*GROUPED, *MIXTURES])
def test_sixteen_outputs_side_by_side_and_back(form: str) -> None:
    weight = weight_of(form, 48, 512)
    for ours, theirs in zip(in_rows(interleaved(weight)).tensors, weight.tensors):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)  # type: ignore[arg-type]
    words, wanted = interleaved(weight).packed.view(-1, 16, 4), weight.packed.view(3, 16, -1, 4)
    assert torch.equal(words[1], wanted[0, :, 1]) and torch.equal(words[-1], wanted[2, :, -1])


@needs_native
@pytest.mark.parametrize("outputs", [9, 32])
@pytest.mark.parametrize("kind", [NativeInt8Linear, NativeGroupedLinear])
def test_what_is_no_number_is_not_lost_and_spoils_no_other(kind: type, outputs: int) -> None:
    x = drawn(7, 128)
    x[2, 5], x[4, 127] = torch.nan, -torch.inf
    if kind is NativeInt8Linear:
        found = kind(drawn(outputs, 128))(x)
        assert not found[[2, 4]].isfinite().any()
    else:
        weight = round_to_four_bits(drawn(outputs, 128), group=32)
        whole = kind(weight)(x)
        assert not whole[[2, 4]].isfinite().any()
        weight.groups[3, 1] = torch.nan
        found = kind(weight)(x)
        assert found[:, 3].isnan().all()
        found[:, 3] = whole[:, 3]
    assert found[[0, 1, 3, 5, 6]].isfinite().all()
