"""The kernels of the matrix unit (AMX), on an emulation of its instructions: no such processor is needed."""

from __future__ import annotations

import ctypes
import runpy
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from ctypes import addressof
from pathlib import Path

import pytest
import torch
from test_integer_rows import fixed_point, rows_of
from tiny_llama import tiny_llama
from torch import Tensor

from layerskip_models import from_transformers
from layerskip_models.kernels import library
from layerskip_models.kernels.library import Kernels
from layerskip_models.kernels.native_linear import NativeInt8Linear, NativeLinear
from layerskip_models.kernels.threads import on_threads
from layerskip_models.linear import Layout
from selfspec import SelfSpecGenerator

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "layerskip_models" / "kernels"
VECTORS = "vnni" if library.LIBRARY.is_file() and "vnni" in library.runnable_variants() else "baseline"
"""The variant that is compiled with tiles besides: with AMX that is `vnni`."""
SMALL = 32 * 64 * 2
"""Bytes of the largest matrix here that is too small for tiles, where its weights are in bfloat16."""
SAYS_YES = "int runs_emulated(void) { return 1; }"


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernels]:
    """The kernels compiled for tiles that are loops in C; linears and models made meanwhile take them.

    Where this processor multiplies bytes in vectors, one or two rows of 8-bit weights are multiplied so, as with real tiles.
    """
    pytest.importorskip("setuptools.command.bdist_wheel")
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("emulated")
    (folder / "yes.c").write_text(SAYS_YES)
    setup = runpy.run_path(str(ROOT / "setup.py"))
    flags = [*setup["FLAGS"], *setup["X86"][VECTORS]]
    defined = ["-DVARIANT=emulated", "-DEMULATED_TILES", f"-DTILE_BYTES={SMALL + 1}"]
    options = [*flags, "-fPIC", "-shared", "-fvisibility=default", *defined, "-O1"]
    sources = [KERNELS / "kernels.c", KERNELS / "pool.c", folder / "yes.c"]
    subprocess.run(["cc", *options, "-o", folder / "libkernels.so", *sources, "-lm"], check=True)
    caches = library._library, library.load, library.kernels, library.pool
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "LIBRARY", folder / "libkernels.so")
        patch.setattr(library, "VARIANTS", ("emulated",))
        for cache in caches:
            cache.cache_clear()
        chosen = library.load()
        patch.setattr(library, "kernels", lambda: chosen)
        yield chosen
    for cache in caches:
        cache.cache_clear()


def alone(linear: NativeLinear, x: Tensor) -> Tensor:
    with on_threads(1):
        return torch.cat([linear(row) for row in x.split(1)])


def counts_of(out: int) -> Sequence[int]:
    """How many rows go through a matrix: every number up to two turns and one more for one matrix, some for the others."""
    return range(1, 34) if out == 96 else (2, 5, 6, 17, 37)


@pytest.mark.parametrize(("out", "width"), [(32, 64), (96, 128), (64, 1088)])
def test_eight_bit_weights_come_to_the_same_bits_as_by_whole_numbers(emulated: Kernels, out: int, width: int) -> None:
    torch.manual_seed(out)
    linear, x = NativeInt8Linear(torch.randn(out, width)), rows_of(37, width)
    q, unit = fixed_point(x)
    expected = ((q @ linear.stored.long().T).double() * unit).float() * linear.tensors[1]
    assert torch.equal(alone(linear, x), expected)
    for threads in (1, 2):
        with on_threads(threads):
            assert all(torch.equal(linear(x[:rows]), expected[:rows]) for rows in counts_of(out))


@pytest.mark.parametrize(("out", "width"), [(32, 64), (96, 128), (64, 1088)])
def test_three_bfloat16_parts_are_as_good_as_float32(emulated: Kernels, out: int, width: int) -> None:
    torch.manual_seed(out)
    linear = NativeLinear(torch.randn(out, width).bfloat16(), torch.randn(out))
    x = torch.randn(37, width)
    expected = x.double() @ linear.weight.double().T + linear.tensors[1].double()
    found = alone(linear, x)
    for threads in (1, 2):
        with on_threads(threads):
            assert all(torch.equal(linear(x[:rows]), found[:rows]) for rows in counts_of(out))
    plain = torch.nn.functional.linear(x, linear.weight, linear.tensors[1])
    error, of_float32 = ((result - expected).abs().max() for result in (found, plain))
    assert error < 2 * of_float32


def test_a_small_matrix_in_bfloat16_is_multiplied_by_vectors_for_any_number_of_rows(emulated: Kernels) -> None:
    """Its weights stay in a cache, where vectors are faster. The same numbers as those of the variant without tiles."""
    x = torch.randn(37, 64)
    plain = getattr(ctypes.CDLL(str(KERNELS / "libkernels.so")), f"linear_{VECTORS}")
    plain.argtypes = library._SIGNATURES["linear"][1]
    for out, tiles in ((32, False), (64, True)):
        linear = NativeLinear(torch.randn(out, 64).bfloat16())
        assert (linear.num_bytes > SMALL) is tiles
        y = torch.empty(37, out)
        plain(addressof(linear.matrix), x.data_ptr(), 37, None, y.data_ptr(), 1)
        for rows in (1, 5, 6, 37):
            assert torch.equal(linear(x[:rows]), y[:rows]) is not tiles


def test_a_row_that_is_no_number_spoils_no_other(emulated: Kernels) -> None:
    for linear in (NativeInt8Linear(torch.randn(32, 64)), NativeLinear(torch.randn(32, 64).bfloat16())):
        x = torch.randn(5, 64)
        whole = linear(x)
        x[1, 63], x[3, 0] = torch.nan, -torch.inf
        spoilt = linear(x)
        assert not spoilt[[1, 3]].isfinite().any()
        assert torch.equal(spoilt[[0, 2, 4]], whole[[0, 2, 4]])


@pytest.mark.parametrize("layout", [None, "int8"])
def test_drafts_change_no_token_of_a_model_on_tiles(emulated: Kernels, layout: Layout | None) -> None:
    hub = tiny_llama(hidden_size=64, intermediate_size=128, head_dim=32, vocab_size=64, dtype=torch.bfloat16)
    generator = SelfSpecGenerator(from_transformers(hub, layout=layout))
    assert generator.model.kernels == "emulated"
    prompts = [[1, 2, 3, 4, 5], [7, 8, 9]]
    expected = [generator.generate(prompt, max_new_tokens=24, policy="ar").sequences for prompt in prompts]
    for policy in ("ls:1-3", "auto"):
        together = generator.generate_batch(prompts, max_new_tokens=24, policy=policy)
        assert all(torch.equal(result.sequences, text) for result, text in zip(together, expected))
