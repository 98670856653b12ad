"""Products with weights in groups, for every form that a GGUF file's numbers are kept in, and for mixtures of forms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from layerskip_models.checkpoints.gguf_blocks import GROUPED, numbers_of_blocks
from layerskip_models.grouped_linear import GroupedLinear
from layerskip_models.grouped_weight import GroupedWeight, pack_sixes
from layerskip_models.kernels import library
from layerskip_models.kernels.interleaving import in_rows, interleaved
from layerskip_models.kernels.native_grouped import NativeGroupedLinear
from layerskip_models.kernels.native_linear import operators_only
from test_integer_rows import CUT_ROWS, VARIANTS, product
from test_native import use

MIXTURES = ("Q4_K, Q6_K", "Q4_0, Q8_0")


def weight_of(form: str, rows: int, columns: int, seed: int = 0) -> GroupedWeight:
    """Random numbers with scales of about the same size, of one or several forms, a part of the rows each."""
    kinds = form.split(", ")
    if len(kinds) > 1:
        sizes = rows - rows // 3, rows // 3
        return GroupedWeight.cat([weight_of(kind, sizes[k], columns, k) for k, kind in enumerate(kinds)])
    kept, rng = GROUPED[form], np.random.default_rng(seed)
    inputs = 256 if kept.in_blocks else 32
    data = rng.integers(0, 256, (rows, columns // inputs, kept.block_bytes), np.uint8)
    scales = (rng.random((rows, columns // inputs, 2)) + 0.5).astype(np.float16) / (2000 if kept.in_blocks else 100)
    count = 1 if form in ("Q6_K", "Q8_0", "Q4_0", "IQ4_NL") else 2
    place = kept.block_bytes - 2 if form == "Q6_K" else 0
    data[..., place : place + 2 * count] = scales[..., :count].astype(np.float16).view(np.uint8)
    return numbers_of_blocks(torch.from_numpy(data).flatten(1), form)


def rows_of(count: int, columns: int) -> Tensor:
    """Some with outliers, which get finer digits."""
    x = torch.randn(count, columns, generator=torch.Generator().manual_seed(1))
    x[::3, 5] *= 1e4
    return x


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("form", [*GROUPED, *MIXTURES])
def test_products(form: str, variant: str) -> None:
    """A row's are the same in any company and on any number of threads, and near those in float64."""
    for out, columns in ((6, 256), (160, 768), (32, 2048)):
        weight = weight_of(form, out, columns)
        with use(variant):
            linear = NativeGroupedLinear(weight)
        assert linear.matrix.interleaved == (variant in CUT_ROWS and out % 32 == 0)
        x = rows_of(35, columns)
        alone = torch.cat([product(variant, linear.matrix, row, out) for row in x.split(1)])
        for rows, threads in ((2, 1), (3, 2), (7, 1), (35, 2)):
            assert torch.equal(product(variant, linear.matrix, x[:rows], out, threads), alone[:rows])
        expected = x.double() @ weight.values().double().T
        bound = 2e-4 if linear.matrix.interleaved else 2e-6  # there rows are cut to 16 bits, or to 31
        errors = (alone - expected).abs().amax(1) / expected.abs().amax(1)
        assert float(errors.max()) < bound
        with operators_only():
            assert torch.allclose(linear(x).double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


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


@pytest.mark.skipif(not VARIANTS, reason="needs the native kernels")
@pytest.mark.parametrize("form", [*GROUPED, *MIXTURES])
def test_linears_with_and_without_kernels(form: str) -> None:
    weight = weight_of(form, 21, 512)
    bias = torch.randn(len(weight.packed), generator=torch.Generator().manual_seed(2))
    ours, plain = NativeGroupedLinear(weight, bias), GroupedLinear(weight, bias)
    assert ours.num_bytes == plain.num_bytes == weight.num_bytes
    assert torch.equal(ours.weight, plain.weight)
    assert all(tensor is not None for tensor in ours.tensors)
    x = rows_of(4, 512)
    scale = float(plain(x).abs().max())
    assert torch.allclose(ours(x), plain(x), rtol=0, atol=2e-4 * scale)
    assert library.kernels() is None or ours.matrix.kind == library.GROUPED_KINDS[weight.bits]


def test_parts_that_do_not_fit_together() -> None:
    weight = weight_of("Q4_K", 4, 512)
    with pytest.raises(ValueError, match="do not fit together"):
        GroupedWeight(weight.packed, weight.groups, weight.offsets)  # integers, and nothing that multiplies them
    with pytest.raises(ValueError, match="do not fit together"):
        GroupedWeight(weight.packed, weight.groups, None, blocks=weight.blocks)
    with pytest.raises(ValueError, match="groups must be of 128 or 64 or 32"):
        GroupedWeight(weight.packed, torch.ones(4, 32).half())


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


@pytest.mark.parametrize("variant", VARIANTS)
def test_numbers_that_no_file_has(variant: str) -> None:
    """Larger than those of files, with larger scales."""
    weight = weight_of("Q5_K", 32, 512)
    wide = replace(weight, packed=torch.full_like(weight.packed, 255), groups=torch.full_like(weight.groups, 255))
    with use(variant):
        linear = NativeGroupedLinear(wide)
    x = rows_of(20, 512)
    expected, bound = x @ wide.values().T, 1e-3 * (x.abs() @ wide.values().abs().T)
    assert ((linear(x) - expected).abs() <= bound).all()
