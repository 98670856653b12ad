"""The kernels of the matrix unit: on an emulation of its instructions, and on AMX where the processor has it."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from ctypes import addressof
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compiled import FOLDER, build_settings, compile_c
from layerskip_models.checkpoints.gguf_blocks import GROUPED
from layerskip_models.kernels import check, library
from layerskip_models.kernels.native_linear import NativeGroupedLinear, NativeInt8Linear, NativeLinear
from layerskip_models.kernels.threads import on_threads
from test_integer_rows import fixed_point, rows_of, rows_with_outliers
from test_native import use
from test_products import MIXTURES, weight_of

VECTORS = "vnni" if library.LIBRARY.is_file() and "vnni" in library.runnable_variants() else "baseline"
"""The variant that is compiled with tiles besides: with AMX that is `vnni`."""
SMALL = 32 * 64 * 2
"""Bytes of the largest matrix here that is too small for the emulated tiles, where its weights are in bfloat16."""
NEEDS_AMX = pytest.mark.skipif(
    not library.LIBRARY.is_file() or "amx" not in library.runnable_variants(), reason="this processor has no AMX"
)


@pytest.fixture(scope="session")  # a process that takes tests of this file twice compiles once
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels compiled for tiles that are loops in C.

    Where this processor multiplies bytes in vectors, one or two rows of 8-bit weights are multiplied so, as with real tiles.
    """
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("emulated")
    (folder / "yes.c").write_text("int runs_emulated(void) { return 1; }")
    options = [*build_settings()["X86"][VECTORS], "-fPIC", "-shared", "-fvisibility=default", "-DVARIANT=emulated",
               "-DEMULATED_TILES", f"-DTILE_BYTES={SMALL + 1}"]  # fmt: skip
    return compile_c(folder / "libkernels.so", *options, FOLDER / "kernels.c", FOLDER / "pool.c", folder / "yes.c")


@pytest.fixture
def emulated(compiled: Path) -> Iterator[str]:
    """Linears and models made meanwhile are multiplied on the emulation."""
    caches = library._library, library.load, library.kernels, library.pool_oldest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "LIBRARY", compiled)
        patch.setattr(library, "VARIANTS", ("emulated",))
        for cache in caches:
            cache.cache_clear()
        chosen = library.load()
        patch.setattr(library, "kernels", lambda: chosen)
        yield chosen.variant
    for cache in caches:
        cache.cache_clear()


@pytest.fixture(params=["emulated", pytest.param("amx", marks=NEEDS_AMX)])
def unit(request: pytest.FixtureRequest) -> Iterator[str]:
    """Linears and models made meanwhile are multiplied by the kernels of that name."""
    if request.param == "emulated":
        yield request.getfixturevalue("emulated")
        return
    with use("amx"):
        yield "amx"


def on_unit(weight: Tensor, bias: Tensor | None = None) -> NativeLinear:
    """A matrix in bfloat16 that goes to the unit, however small it is."""
    linear = NativeLinear(weight.bfloat16(), bias)
    linear.matrix.interleaved = 1
    return linear


def alone(linear: NativeLinear, x: Tensor) -> Tensor:
    with on_threads(1):
        return torch.cat([linear(row) for row in x.split(1)])


def assert_in_company(linear: NativeLinear, x: Tensor, expected: Tensor) -> None:
    """Every number of rows up to two turns and one more for one matrix, some for the others."""
    for threads in (1, 2):
        with on_threads(threads):
            for rows in range(1, 34) if len(expected.T) == 96 else (2, 5, 6, 17, 37):
                assert torch.equal(linear(x[:rows]), expected[:rows])


def by_vectors(name: str, matrix: library.Matrix, x: Tensor, path: Path = FOLDER / "libkernels.so") -> Tensor:
    """By a variant without tiles, of the library that is in use elsewhere."""
    function = getattr(ctypes.CDLL(str(path)), f"linear_{name}")
    function.argtypes = library._SIGNATURES["linear"][1]
    y = torch.empty(len(x), matrix.out_features)
    function(addressof(matrix), x.data_ptr(), len(x), None, y.data_ptr(), 1)
    return y


@pytest.mark.parametrize(("out", "width"), [(32, 64), (96, 128), (64, 1088)])
def test_eight_bit_weights_come_to_the_same_bits_as_by_whole_numbers(unit: str, out: int, width: int) -> None:
    torch.manual_seed(out)
    linear, x = NativeInt8Linear(torch.randn(out, width)), rows_of(37, width)
    q, unit = fixed_point(x)
    expected = ((q @ linear.numbers_in_rows.long().T).double() * unit).float() * linear.tensors[1]
    assert torch.equal(alone(linear, x), expected)
    assert_in_company(linear, x, expected)


@pytest.mark.skipif(VECTORS != "vnni", reason="this processor multiplies no bytes (AVX-512 VNNI)")
@pytest.mark.parametrize("form", [*GROUPED, *MIXTURES])
@pytest.mark.parametrize("bits", [8, 16])
def test_weights_in_groups_come_to_the_same_bits_as_on_vectors(emulated: str, form: str, bits: int) -> None:
    linear, x = NativeGroupedLinear(weight_of(form, 96, 512), rows=bits), rows_with_outliers(33, 512)
    assert linear.matrix.interleaved
    assert_in_company(linear, x, by_vectors("vnni", linear.matrix, x))


@pytest.mark.skipif(VECTORS != "vnni", reason="this processor multiplies no bytes (AVX-512 VNNI)")
def test_the_instructions_of_avx_vnni_give_the_bits_of_avx2(tmp_path: Path) -> None:
    """In the form of AVX-512, since few processors have both."""
    options = [*build_settings()["X86"]["avx2"], "-fPIC", "-shared", "-fvisibility=default", "-DVARIANT=avxvnni"]
    sources = FOLDER / "kernels.c", FOLDER / "pool.c"
    path = compile_c(tmp_path / "libkernels.so", *options, "-DEMULATED_AVXVNNI", *sources)
    for form, bits in product([*GROUPED, *MIXTURES], (8, 16)):
        with use("avx2"):
            linear, x = NativeGroupedLinear(weight_of(form, 96, 512), rows=bits), rows_with_outliers(33, 512)
        for rows in range(1, 34, 3):
            found, expected = (by_vectors(*one) for one in (
                ("avxvnni", linear.matrix, x[:rows], path), ("avx2", linear.matrix, x[:rows])))  # fmt: skip
            assert torch.equal(found, expected)


@pytest.mark.parametrize(("out", "width"), [(32, 64), (96, 128), (64, 1088)])
def test_three_bfloat16_splits_are_as_good_as_float32(unit: str, out: int, width: int) -> None:
    torch.manual_seed(out)
    weight = torch.randn(out, width)
    linear = on_unit(weight, torch.randn(out))
    assert torch.equal(linear.weight, weight.bfloat16().float())
    x = torch.randn(37, width)
    expected = x.double() @ linear.weight.double().T + linear.tensors[1].double()
    found = alone(linear, x)
    assert_in_company(linear, x, found)
    plain = torch.nn.functional.linear(x, linear.weight, linear.tensors[1])
    error, of_float32 = ((result - expected).abs().max() for result in (found, plain))
    assert error < 2 * of_float32


def test_a_small_matrix_in_bfloat16_is_multiplied_by_vectors_for_any_number_of_rows(emulated: str) -> None:
    """Its weights stay in a cache, where vectors are faster. The same numbers as those of the variant without tiles."""
    x = torch.randn(37, 64)
    for out, tiles in ((32, False), (64, True)):
        linear = NativeLinear(torch.randn(out, 64).bfloat16())
        assert (linear.num_bytes > SMALL) is tiles is bool(linear.matrix.interleaved)
        y = by_vectors(VECTORS, library.Matrix(linear.matrix.weight, kind=1, in_features=64, out_features=out), x)
        for rows in (1, 5, 6, 37):
            assert torch.equal(linear(x[:rows]), y[:rows]) is not tiles


def test_few_rows_share_a_tile_with_the_sums_of_many(unit: str) -> None:
    """Numbers of all sizes, down to those whose products, or which themselves, are too small for a normal float32."""
    torch.manual_seed(1)
    sizes = torch.logspace(-37, 3, 128)
    x = torch.randn(16, 128) * sizes[torch.randperm(128)] * torch.logspace(-6, 3, 16).unsqueeze(1)
    x[:, ::7] = 1e-40
    linear = on_unit(torch.randn(96, 128) * sizes[torch.randperm(128)])
    together = linear(x)  # more rows than a tile holds splits of
    assert together.isfinite().all() and together.count_nonzero() > together.numel() / 2
    for rows in (1, 2, 5, 6):
        assert all(torch.equal(linear(x[at : at + rows]), together[at : at + rows]) for at in range(10))


def test_the_check_before_the_first_use_reaches_the_unit(emulated: str) -> None:
    """Products of bytes, and of bfloat16 numbers."""
    products = (ctypes.c_int64 * 2).in_dll(ctypes.CDLL(str(library.LIBRARY)), "tile_products")
    before = list(products)
    assert check.fault() is None
    assert all(now > 1000 + earlier for now, earlier in zip(products, before))


def test_a_row_that_is_no_number_spoils_no_other(unit: str) -> None:
    for linear in (NativeInt8Linear(torch.randn(32, 64)), on_unit(torch.randn(32, 64))):
        x = torch.randn(5, 64)
        whole = linear(x)
        x[1, 63], x[3, 0] = torch.nan, -torch.inf
        spoilt = linear(x)
        assert not spoilt[[1, 3]].isfinite().any()
        assert torch.equal(spoilt[[0, 2, 4]], whole[[0, 2, 4]])
