"""Sizes that do not fit 32 bits: matrices of over 2^31 numbers, caches of over 4 GiB, the end of a context of 128k positions.

Nearly all of their memory is never written, so the system gives none for it: what is read there are zeros that it shares.
"""

from __future__ import annotations

import mmap
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attending import Attending, exactly
from layerskip_models.kernels import native_linear
from layerskip_models.kernels.library import LIBRARY, SECTION
from layerskip_models.kernels.native_layers import KV_DTYPES
from layerskip_models.kernels.native_linear import NativeLinear
from layerskip_models.kernels.threads import on_threads
from layerskip_models.kv_cache import KVCache
from layerskip_models.norm import RMSNorm
from test_native import drawn, needs_native

pytestmark = [
    needs_native,
    pytest.mark.skipif(sys.platform != "linux", reason="needs memory that is given when it is written"),
]

IN, OUT = 4096, (1 << 19) + 64  # over 2^31 numbers
CONTEXT = 1 << 17
_NO_RESERVE = 0x4000  # MAP_NORESERVE on Linux


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a row would have a large page to itself."""
    monkeypatch.setattr(native_linear, "use_large_pages", lambda tensor: None)


def sparse(dtype: torch.dtype, *shape: int) -> Tensor:
    """Zeros that take no memory until they are written to."""
    size = torch.Size(shape).numel()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    return torch.frombuffer(mmap.mmap(-1, size * dtype.itemsize, flags=flags), dtype=dtype, count=size).view(shape)


def some_rows(out: int) -> list[int]:
    """The first rows, the last, and those around which numbers and bytes before them leave 31 bits."""
    edges = [(1 << bits) // IN for bits in (29, 30, 31)]
    return sorted({0, 1, out // 3, out - 2, out - 1, *(edge + by for edge in edges for by in (-1, 0, 1))})


def test_a_matrix_of_over_two_to_the_31_numbers() -> None:
    rows, weight = some_rows(OUT), sparse(torch.bfloat16, OUT, IN)
    weight[rows] = drawn(len(rows), IN, seed=1).bfloat16()
    linear = NativeLinear(weight)
    assert OUT * IN > 1 << 31
    x = drawn(2, IN, seed=4)
    with on_threads(2):
        found = linear(x)
        expected = (x.double() @ weight[rows].double().T).float()
        torch.testing.assert_close(found[:, rows], expected, rtol=1e-3, atol=2e-2)
        assert found.count_nonzero() == 2 * len(rows)
        norm = RMSNorm(torch.ones(IN), 1e-5)
        choices = linear.choices_of_normalised(norm, x, "token")
    assert choices.tokens.tolist() == [rows[int(row.argmax())] for row in found[:, rows]]


def turns(positions: int, dim: int) -> Tensor:
    """A rotary table."""
    angles = torch.rand(positions, dim // 2, generator=torch.Generator().manual_seed(5)) * 6
    return torch.polar(torch.ones_like(angles), angles).unsqueeze(1)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_cache_of_over_four_gib(kv_dtype: torch.dtype) -> None:
    """The end of the last layer's context, beside a short cache that begins four sections before that end."""
    kv_heads, dim, rows, window, end = 8, 128, 5, 700, CONTEXT - 3
    num_layers = (1 << 32) // (kv_heads * CONTEXT * dim * kv_dtype.itemsize) + 2
    start = CONTEXT - 4 * SECTION
    large = Attending(kv_heads, kv_heads, dim, kv_dtype, (window,) * num_layers, rotated=True)
    small = replace(large, windows=(window,))
    whole, short = KVCache(large, CONTEXT), KVCache(small, CONTEXT - start)
    # The last layer's keys begin behind 4 GiB of others.
    assert whole.keys[-1].data_ptr() - whole.keys.data_ptr() > 1 << 32
    held = end - rows - start
    keys, values = drawn(kv_heads, held, dim, seed=6), drawn(kv_heads, held, dim, seed=7)
    for cache, first in ((whole, start), (short, 0)):
        cache.keys[-1, :, :, first : first + held] = keys.mT
        cache.values[-1, :, first : first + held] = values
        cache.declare(first + held)
    x, table = drawn(rows, large.width, seed=8), turns(CONTEXT, dim)
    with on_threads(2):
        found = large.layers().run(x, num_layers - 1, num_layers, ((whole, rows),), table, None)
        expected = small.layers().run(x, 0, 1, ((short, rows),), table[start:].contiguous(), None)
    assert (found - x).count_nonzero() and torch.equal(found, expected)
    assert torch.equal(whole.keys[-1, ..., end - rows : end], short.keys[-1, ..., held : held + rows])
    assert torch.equal(whole.values[-1, :, end - rows : end], short.values[-1, :, held : held + rows])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_end_of_128k_positions(kv_dtype: torch.dtype) -> None:
    """All 256 sections, divided among any number of threads, against float64."""
    heads, kv_heads, dim, rows = 4, 2, 16, 3
    attending = Attending(heads, kv_heads, dim, kv_dtype, rotated=True)
    layers, table, x = attending.layers(), turns(CONTEXT, dim), drawn(rows, attending.width, seed=9)
    cache = KVCache(attending, CONTEXT)
    cache.keys[0, :, :, :-rows] = drawn(kv_heads, CONTEXT - rows, dim, seed=10).mT
    cache.values[0, :, :-rows] = drawn(kv_heads, CONTEXT - rows, dim, seed=11)
    results = []
    for threads in (1, 2, 32):
        cache.declare(CONTEXT - rows)
        with on_threads(threads):
            results.append(layers.run(x, 0, 1, ((cache, rows),), table, None) - x)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    pairs = torch.view_as_complex(x[:, : heads * dim].double().unflatten(1, (heads, dim // 2, 2)))
    query = torch.view_as_real(pairs * table[-rows:].to(torch.complex128)).flatten(2)
    expected = exactly(attending, query, cache.keys[0].mT, cache.values[0])
    torch.testing.assert_close(results[0][:, : heads * dim].double(), expected, rtol=1e-5, atol=2e-6)


CUT = re.compile(
    r"from .(?:u?int64_t|s?size_t|(?:unsigned )?long)\b.* to .(?:u?int(?:32_t|16_t|8_t)?|unsigned|short|char)\b"
)
CLANG_CUT = re.compile(r"loses integer precision: .(?:u?int64_t|s?size_t|(?:unsigned )?long)\b")


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_no_size_is_cut_to_32_bits_in_c() -> None:
    """By the compiler's own warnings, which nothing in the sources may raise without a cast."""
    pytest.importorskip("setuptools.command.bdist_wheel")
    build = runpy.run_path(str(Path(__file__).parents[2] / "setup.py"))
    flags, folder = [*build["FLAGS"], "-O0", "-Wconversion", "-fsyntax-only"], LIBRARY.parent

    def warnings(*command: str, text: str = "") -> list[str]:
        command = ("cc", *flags, *command)
        environment = {**os.environ, "LC_ALL": "C"}
        result = subprocess.run(command, input=text, capture_output=True, text=True, check=False, env=environment)
        return [line for line in result.stderr.splitlines() if CUT.search(line) or CLANG_CUT.search(line)]

    assert warnings("-x", "c", "-", text="#include <stdint.h>\nint cut(int64_t size) { return size; }")
    assert not warnings(str(folder / "pool.c"))
    for variant, own in build["VARIANTS"].get(platform.machine().lower(), {"baseline": []}).items():
        assert not warnings(*own, f"-DVARIANT={variant}", str(folder / "kernels.c"))
