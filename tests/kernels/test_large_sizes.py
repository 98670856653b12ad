"""Sizes that do not fit 32 bits: matrices of over 2^31 numbers, caches of over 4 GiB, the end of a context of 128k positions.

Nearly all of their memory is never written, so the system gives none for it: what is read there are zeros that it shares.
"""

from __future__ import annotations

import mmap
import sys
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from attending import Attending, exactly
from layerskip_models.kernels import native_linear
from layerskip_models.kernels.library import SECTION
from layerskip_models.kernels.native_layers import KV_DTYPES
from layerskip_models.kernels.native_linear import NativeLinear
from layerskip_models.kernels.threads import on_threads
from layerskip_models.kernels.weights import LANES, side_by_side
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


def some_side_by_side(weight: Tensor, rows: list[int]) -> Tensor:
    """Only the blocks that these rows are in: the rest stays zeros that take no memory."""
    laid = sparse(torch.bfloat16, OUT // LANES, IN // 2, LANES, 2)
    for block in {row // LANES for row in rows}:
        laid[block] = side_by_side(weight[block * LANES : (block + 1) * LANES])
    return laid


def test_a_matrix_of_over_two_to_the_31_numbers() -> None:
    rows, weight = some_rows(OUT), sparse(torch.bfloat16, OUT, IN)
    weight[rows] = drawn(len(rows), IN, seed=1).bfloat16()
    with patch.object(native_linear, "side_by_side", partial(some_side_by_side, rows=rows)):
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
    angles = torch.rand(positions, dim // 2, generator=torch.Generator().manual_seed(5)) * 6
    return torch.polar(torch.ones_like(angles), angles).unsqueeze(1)


def filled(attending: Attending, first: int, rows: int) -> KVCache:
    """A cache for the whole context: the last layer's keys and values from `first` on are drawn, but for the last rows."""
    cache = KVCache(attending, CONTEXT)
    keys, values = drawn(2, attending.num_kv_heads, CONTEXT - rows - first, attending.head_dim, seed=6)
    cache.keys[-1, :, :, first:-rows], cache.values[-1, :, first:-rows] = keys.mT, values
    cache.declare(CONTEXT - rows)
    return cache


def assert_attends(attending: Attending, cache: KVCache, first: int, threads: tuple[int, ...]) -> None:
    """Of the last rows of a context, in its last layer, against float64. first: the first position that they may see."""
    table, x = turns(CONTEXT, attending.head_dim), drawn(3, attending.width, seed=9)
    layers, last, width = attending.layers(), attending.num_layers - 1, attending.heads * attending.head_dim
    results = []
    for count in threads:
        cache.declare(CONTEXT - len(x))
        with on_threads(count):
            results.append(layers.run(x, last, last + 1, ((cache, len(x)),), table, None) - x)
        assert torch.equal(results[0], results[-1])
    pairs = torch.view_as_complex(x[:, :width].double().unflatten(1, (attending.heads, -1, 2)))
    query = torch.view_as_real(pairs * table[-len(x) :].to(torch.complex128)).flatten(2)
    expected = exactly(attending, query, cache.keys[-1, ..., first:].mT, cache.values[-1, :, first:])
    torch.testing.assert_close(results[0][:, :width].double(), expected, rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_cache_of_over_four_gib(kv_dtype: torch.dtype) -> None:
    """The end of the last layer's context, whose keys begin behind 4 GiB of others."""
    num_layers = (1 << 32) // (8 * CONTEXT * 128 * kv_dtype.itemsize) + 2
    attending = Attending(8, 8, 128, kv_dtype, (700,) * num_layers, rotated=True)
    first = CONTEXT - 4 * SECTION
    cache = filled(attending, first, 3)
    assert cache.keys[-1].data_ptr() - cache.keys.data_ptr() > 1 << 32
    assert_attends(attending, cache, first, (2,))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_end_of_128k_positions(kv_dtype: torch.dtype) -> None:
    """All 256 sections, divided among any number of threads."""
    attending = Attending(4, 2, 16, kv_dtype, rotated=True)
    assert_attends(attending, filled(attending, 0, 3), 0, (1, 2, 32))
