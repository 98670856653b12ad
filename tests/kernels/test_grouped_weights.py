"""Weights in groups: how they lie in memory, the largest sums, and passes through layers of 4 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from layerskip_models.checkpoints.gguf_blocks import GROUPED
from layerskip_models.four_bit_rounding import round_to_four_bits
from layerskip_models.grouped_weight import GroupedWeight, pack_sixes
from layerskip_models.kernels.native_linear import NativeGroupedLinear
from layerskip_models.kernels.weights import in_rows, interleaved
from test_four_bits import drawn
from test_integer_rows import VARIANTS, product
from test_native import needs_native, use
from test_products import drawn_weight, weight_of


def rows_of(count: int, columns: int) -> Tensor:
    """Some with outliers, which get finer limbs."""
    x = torch.randn(count, columns, generator=torch.Generator().manual_seed(1))
    x[::3, 5] *= 1e4
    return x


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("byte", [0, 255])
@pytest.mark.parametrize("form", ["Q8_0", "Q4_0", "Q6_K"])
def test_no_sum_is_too_large_for_its_integer(form: str, byte: int, variant: str) -> None:
    """The largest numbers of weights and rows everywhere, of either sign, and with signs that alternate."""
    data = weight_of(form, 32, 512)
    weight = data.with_tensors((torch.full_like(data.packed, byte), *data.tensors[1:]))
    with use(variant):
        linear = NativeGroupedLinear(weight)
    x = torch.ones(4, 512) * torch.tensor([[1.0], [-1.0], [1.99], [1.0]])
    x[3, ::2] = -1
    expected = x.double() @ weight.values().double().T
    found = product(variant, linear.matrix, x, 32).double()
    bound = 1e-4 * (x.abs().double() @ weight.values().abs().double().T)
    assert bool(((found - expected).abs() < bound).all())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("columns", [64, 256])
def test_an_outlier_costs_small_numbers_nothing(columns: int, variant: str) -> None:
    """However short the row is: of 64 numbers none is more than 64 times the mean of all, itself included."""
    weight = round_to_four_bits(drawn(32, columns), group=32)
    with use(variant):
        linear = NativeGroupedLinear(weight)
    x = drawn(7, columns, seed=1)
    x[:, 5] *= torch.tensor([1e4, 1, 1e4, 100, 1, 1e5, 30])  # rows without outliers beside those with one
    expected = x.double() @ weight.values().double().T
    bound = 1e-4 * (x.abs().double() @ weight.values().abs().double().T)
    bound[[0, 2, 5]] /= 10  # the outliers' rows get finer limbs
    alone = torch.cat([product(variant, linear.matrix, row, 32) for row in x.split(1)])
    assert bool(((alone.double() - expected).abs() < bound).all())
    for rows, threads in ((2, 1), (4, 1), (7, 1), (7, 2)):
        assert torch.equal(product(variant, linear.matrix, x[:rows], 32, threads), alone[:rows])


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_largest_sums(variant: str) -> None:
    """Numbers and scales as large as files may have, with rows whose numbers are all the largest."""
    rows, columns = 32, 512
    ones = torch.ones(rows, columns // 256, 1, dtype=torch.float16)
    groups = torch.full((rows, columns // 16), -128, dtype=torch.int8)
    sixes = GroupedWeight(pack_sixes(torch.zeros(rows, columns)), groups, blocks=ones, bits=6, zero=32)
    mixed = sixes.as_bytes_in_blocks()
    fives = GroupedWeight(
        torch.full((rows, columns), 31, dtype=torch.uint8),
        torch.full((rows, columns // 32), 63, dtype=torch.uint8),
        torch.zeros(rows, columns // 32, dtype=torch.uint8),
        blocks=ones.repeat(1, 1, 2),
        bits=8,
    )
    for weight in (sixes, mixed, fives):
        with use(variant):
            linear = NativeGroupedLinear(weight)
        for count in (1, 4, 20):
            x = torch.full((count, columns), -32639.0)
            expected = x.double() @ weight.values().double().T
            assert torch.allclose(product(variant, linear.matrix, x, rows).double(), expected, rtol=1e-6)


@pytest.mark.parametrize("form", [*GROUPED, "Q4_K, Q6_K"])
def test_sixteen_outputs_side_by_side_and_back(form: str) -> None:
    weight = weight_of(form, 48, 512)
    for ours, theirs in zip(in_rows(interleaved(weight)).tensors, weight.tensors):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)  # type: ignore[arg-type]
    words, wanted = interleaved(weight).packed.view(-1, 16, 4), weight.packed.view(3, 16, -1, 4)
    assert torch.equal(words[1], wanted[0, :, 1]) and torch.equal(words[-1], wanted[2, :, -1])


@needs_native
def test_not_a_number_is_not_lost() -> None:
    for outputs in (9, 32):
        weight = round_to_four_bits(drawn(outputs, 128), group=32)
        weight.groups[3, 1] = float("nan")
        linear = NativeGroupedLinear(weight)
        x = drawn(7, 128)
        for rows in (1, 7):
            assert linear(x[:rows]).isnan().any(0).tolist() == [output == 3 for output in range(outputs)]
        x[2, 5] = float("nan")
        assert linear(x).isnan().all(1).tolist() == [row == 2 for row in range(7)]


@needs_native
def test_memory_that_is_not_contiguous() -> None:
    x = drawn(3, 128)
    for outputs in (8, 32):
        weight = drawn_weight(outputs, 128, 32, True, False)
        turned = GroupedWeight(*(part.t().contiguous().t() for part in (weight.packed, weight.groups, weight.offsets)))
        room = torch.empty(weight.packed.numel() + 1, dtype=torch.uint8)
        room[1:] = weight.packed.flatten()
        strange = GroupedWeight(room[1:].view_as(weight.packed), weight.groups, weight.offsets)  # at an odd address
        for other in (turned, strange):
            assert torch.equal(NativeGroupedLinear(other)(x), NativeGroupedLinear(weight)(x))
