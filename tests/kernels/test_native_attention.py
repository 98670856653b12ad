"""Attention of our own kernels over long texts: against float64, and the same bits however it is divided."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attending import Attending, exactly
from layerskip_models.kernels.library import SECTION
from layerskip_models.kernels.native_layers import KV_DTYPES, NativeLayers
from layerskip_models.kernels.threads import on_threads
from layerskip_models.kv_cache import CacheRows, KVCache
from test_native import drawn, every_variant, needs_native, use

pytestmark = needs_native
HIDDEN = 6
shapes = st.sampled_from([(4, 2, 18), (3, 1, 64), (5, 5, 34), (12, 1, 16), (8, 2, 82), (6, 2, 256)])
"""Heads, heads of keys and values, and their size: whole vectors and not, groups of all sizes that are computed together."""


def narrow(attending: Attending) -> NativeLayers:
    """Layers whose rows are of a few numbers, so that a row is soon run."""
    attended = attending.heads * attending.head_dim
    qkv, output = drawn(attending.width, HIDDEN, seed=1), drawn(HIDDEN, attended, seed=2)
    return attending.layers(0.8 * qkv, 2 * attended**-0.5 * output)


def rotary(positions: int, dim: int) -> Tensor:
    return torch.ones(positions, 1, dim // 2, dtype=torch.complex64)


@every_variant
@given(
    shape=shapes,
    window=st.sampled_from([1, 3, 100, SECTION, SECTION + 1, 700, 3000]),
    kv_dtype=st.sampled_from(KV_DTYPES),
    earlier=st.one_of(st.integers(0, 40), st.integers(SECTION - 12, SECTION + 2), st.integers(2 * SECTION - 9, 1300)),
    rows=st.integers(1, 45),
    others=st.lists(st.tuples(st.integers(0, 1100), st.integers(1, 9)), max_size=2),
    threads=st.sampled_from([1, 2, 3, 7]),
)
@settings(max_examples=40, deadline=None)
def test_a_row_is_the_same_however_attention_is_divided(
    variant: str, shape: tuple[int, int, int], window: int, kv_dtype: torch.dtype, earlier: int, rows: int,
    others: list[tuple[int, int]], threads: int,
) -> None:  # fmt: skip
    """One row after the other on one thread; and in company, beside texts of other lengths, on several."""
    attending = Attending(*shape, kv_dtype, (None, window))
    with use(variant):
        layers = narrow(attending)
    x, table = drawn(rows, HIDDEN, seed=7), rotary(1400, shape[2])
    cache, again = attending.cache(earlier, rows), attending.cache(earlier, rows)
    with on_threads(1):
        alone = [layers.run(row, 0, 2, ((cache, 1),), table, None) for row in x.split(1)]
    beside: CacheRows = [(attending.cache(length, number), number) for length, number in others]
    company = drawn(sum(number for _, number in others), HIDDEN, seed=8)
    with on_threads(threads):
        found = layers.run(torch.cat([x, company]), 0, 2, ((again, rows), *beside), table, None)
    assert not found.isnan().any()
    assert torch.equal(found[:rows], torch.cat(alone))
    assert torch.equal(again.keys, cache.keys) and torch.equal(again.values, cache.values)


@every_variant
@pytest.mark.parametrize("shape", [(4, 2, 18), (12, 1, 16)])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("window", "earlier", "rows"), [(None, 1290, 9), (None, 3, 2), (600, 1290, 33), (7, 1020, 12)])
def test_attention_is_softmax(
    variant: str, shape: tuple[int, int, int], kv_dtype: torch.dtype, window: int | None, earlier: int, rows: int
) -> None:
    """Of the keys and values as they are kept, also where one score stands out by far."""
    attending = Attending(*shape, kv_dtype, (window,))
    heads, _, dim = shape
    with use(variant):
        layers = attending.layers()
    cache, x = attending.cache(earlier, rows), drawn(rows, attending.width, seed=9)
    cache.keys[..., 1] *= 20
    with on_threads(2):
        found = layers.run(x, 0, 1, ((cache, rows),), rotary(1400, dim), None) - x
    query = x[:, : heads * dim].unflatten(1, (heads, dim))
    expected = exactly(attending, query, cache.keys[0].mT, cache.values[0])
    torch.testing.assert_close(found[:, : heads * dim].double(), expected, rtol=1e-5, atol=2e-5)


@every_variant
def test_rows_are_rounded_to_bfloat16_as_pytorch_does(variant: str) -> None:
    """Ties, subnormal numbers, what becomes infinite, infinities and NaN."""
    patterns = torch.tensor([
        0, 1, 0x7FFF, 0x8000, 0x8001, 0x3F808000, 0x3F818000, 0x3F808001, 0x7F7F8000, 0x7F7F7FFF, 0x7F800000, 0x7FC01234,
    ])  # fmt: skip
    numbers = torch.cat([patterns.to(torch.int32).view(torch.float32), drawn(300)])
    numbers = torch.cat([numbers, -numbers]).unsqueeze(1)
    attending = Attending(1, 1, 2, torch.bfloat16)
    with use(variant):
        layers = attending.layers(torch.ones(6, 1), torch.zeros(1, 2))
    cache = KVCache(attending, len(numbers))
    layers.run(numbers, 0, 1, ((cache, len(numbers)),), rotary(len(numbers), 2), None)
    expected = numbers.bfloat16().expand(-1, 2)
    for kept in (cache.keys[0, 0].mT, cache.values[0, 0]):
        torch.testing.assert_close(kept.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


def test_a_far_text_is_divided_among_threads() -> None:
    """Or nothing above would have been: one head of keys and values, one row."""
    attending = Attending(3, 1, 64, torch.float32)
    layers, cache, table = narrow(attending), attending.cache(8 * SECTION, 2), rotary(8 * SECTION + 2, 64)
    with on_threads(2):
        layers.run(drawn(1, HIDDEN), 0, 1, ((cache, 1),), table, None)
        parts = layers.workspace()._parts.fill_(torch.nan)
        layers.run(drawn(1, HIDDEN, seed=1), 0, 1, ((cache, 1),), table, None)
    # Of 9 sections and 3 queries: 64 numbers, the largest score and the sum of each.
    assert int(parts.isfinite().sum()) == 9 * 3 * (64 + 2)
