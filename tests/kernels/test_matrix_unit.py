"""The kernels of the matrix unit: on an emulation of its instructions, and on AMX where the processor has it."""

from __future__ import annotations

import ctypes
import os
import runpy
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from ctypes import addressof
from pathlib import Path

import pytest
import torch
from torch import Tensor

from layerskip_models.kernels import check, library
from layerskip_models.kernels.native_linear import NativeGroupedLinear, NativeInt8Linear, NativeLinear
from layerskip_models.kernels.threads import on_threads
from test_grouped_weights import GROUPED
from test_grouped_weights import rows_of as rows_with_outliers
from test_integer_rows import fixed_point, rows_of
from test_native import use
from test_products import weight_of

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "layerskip_models" / "kernels"
VECTORS = "vnni" if library.LIBRARY.is_file() and "vnni" in library.runnable_variants() else "baseline"
"""The variant that is compiled with tiles besides: with AMX that is `vnni`."""
SMALL = 32 * 64 * 2
"""Bytes of the largest matrix here that is too small for the emulated tiles, where its weights are in bfloat16."""
SAYS_YES = "int runs_emulated(void) { return 1; }"
NEEDS_AMX = pytest.mark.skipif(
    not library.LIBRARY.is_file() or "amx" not in library.runnable_variants(), reason="this processor has no AMX"
)


@pytest.fixture(scope="session")  # a process that takes tests of this file twice compiles once
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels compiled for tiles that are loops in C.

    Where this processor multiplies bytes in vectors, one or two rows of 8-bit weights are multiplied so, as with real tiles.
    """
    pytest.importorskip("setuptools.command.bdist_wheel")
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("emulated")
    (folder / "yes.c").write_text(SAYS_YES)
    setup = runpy.run_path(str(ROOT / "setup.py"))
    flags = [*setup["FLAGS"], *setup["X86"][VECTORS], "-O1", *os.environ.get("CFLAGS", "").split()]
    defined = ["-DVARIANT=emulated", "-DEMULATED_TILES", f"-DTILE_BYTES={SMALL + 1}"]
    options = [*flags, "-fPIC", "-shared", "-fvisibility=default", *defined]
    sources = [KERNELS / "kernels.c", KERNELS / "pool.c", folder / "yes.c"]
    subprocess.run(["cc", *options, "-o", folder / "libkernels.so", *sources, "-lm"], check=True)
    return folder / "libkernels.so"


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
    if not linear.matrix.interleaved:
        linear.interleave()
    return linear


def alone(linear: NativeLinear, x: Tensor) -> Tensor:
    with on_threads(1):
        return torch.cat([linear(row) for row in x.split(1)])


def counts_of(out: int) -> Sequence[int]:
    """How many rows go through a matrix: every number up to two turns and one more for one matrix, some for the others."""
    return range(1, 34) if out == 96 else (2, 5, 6, 17, 37)


@pytest.mark.parametrize(("out", "width"), [(32, 64), (96, 128), (64, 1088)])
def test_eight_bit_weights_come_to_the_same_bits_as_by_whole_numbers(unit: str, out: int, width: int) -> None:
    torch.manual_seed(out)
    linear, x = NativeInt8Linear(torch.randn(out, width)), rows_of(37, width)
    q, unit = fixed_point(x)
    expected = ((q @ linear.numbers_in_rows.long().T).double() * unit).float() * linear.tensors[1]
    assert torch.equal(alone(linear, x), expected)
    for threads in (1, 2):
        with on_threads(threads):
            assert all(torch.equal(linear(x[:rows]), expected[:rows]) for rows in counts_of(out))


@pytest.mark.skipif(VECTORS != "vnni", reason="this processor multiplies no bytes (AVX-512 VNNI)")
@pytest.mark.parametrize("form", [*GROUPED, "Q4_K, Q6_K"])
def test_weights_in_groups_come_to_the_same_bits_as_on_vectors(emulated: str, form: str) -> None:
    """For every number of rows up to two turns and one more, some of them with outliers."""
    on_vectors = ctypes.CDLL(str(KERNELS / "libkernels.so")).linear_vnni
    on_vectors.argtypes = library._SIGNATURES["linear"][1]
    linear, x = NativeGroupedLinear(weight_of(form, 96, 512)), rows_with_outliers(33, 512)
    assert linear.matrix.interleaved
    expected = torch.empty(33, linear.shape[0])
    on_vectors(addressof(linear.matrix), x.data_ptr(), 33, None, expected.data_ptr(), 1)
    for threads in (1, 2):
        with on_threads(threads):
            assert all(torch.equal(linear(x[:rows]), expected[:rows]) for rows in counts_of(96))


@pytest.mark.parametrize(("out", "width"), [(32, 64), (96, 128), (64, 1088)])
def test_three_bfloat16_splits_are_as_good_as_float32(unit: str, out: int, width: int) -> None:
    torch.manual_seed(out)
    weight = torch.randn(out, width)
    linear = on_unit(weight, torch.randn(out))
    assert torch.equal(linear.weight, weight.bfloat16().float())
    x = torch.randn(37, width)
    expected = x.double() @ linear.weight.double().T + linear.tensors[1].double()
    found = alone(linear, x)
    for threads in (1, 2):
        with on_threads(threads):
            assert all(torch.equal(linear(x[:rows]), found[:rows]) for rows in counts_of(out))
    plain = torch.nn.functional.linear(x, linear.weight, linear.tensors[1])
    error, of_float32 = ((result - expected).abs().max() for result in (found, plain))
    assert error < 2 * of_float32


def test_a_small_matrix_in_bfloat16_is_multiplied_by_vectors_for_any_number_of_rows(emulated: str) -> None:
    """Its weights stay in a cache, where vectors are faster. The same numbers as those of the variant without tiles."""
    x = torch.randn(37, 64)
    plain = getattr(ctypes.CDLL(str(KERNELS / "libkernels.so")), f"linear_{VECTORS}")
    plain.argtypes = library._SIGNATURES["linear"][1]
    for out, tiles in ((32, False), (64, True)):
        linear = NativeLinear(torch.randn(out, 64).bfloat16())
        assert (linear.num_bytes > SMALL) is tiles is bool(linear.matrix.interleaved)
        y, stored = torch.empty(37, out), linear.numbers_in_rows
        in_rows = library.Matrix(stored.data_ptr(), kind=1, in_features=64, out_features=out)
        plain(addressof(in_rows), x.data_ptr(), 37, None, y.data_ptr(), 1)
        for rows in (1, 5, 6, 37):
            assert torch.equal(linear(x[:rows]), y[:rows]) is not tiles


def test_few_rows_meet_vectors_with_the_sums_of_tiles(unit: str) -> None:
    """Numbers of all sizes, down to those whose products, or which themselves, are too small for a normal float32."""
    torch.manual_seed(1)
    sizes = torch.logspace(-37, 3, 128)
    x = torch.randn(16, 128) * sizes[torch.randperm(128)] * torch.logspace(-6, 3, 16).unsqueeze(1)
    x[:, ::7] = 1e-40
    linear = on_unit(torch.randn(96, 128) * sizes[torch.randperm(128)])
    together = linear(x)  # more rows than vectors multiply
    assert together.isfinite().all() and together.count_nonzero() > together.numel() / 2
    for rows in (1, 2, 3, 4):
        assert all(torch.equal(linear(x[at : at + rows]), together[at : at + rows]) for at in range(12))


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
