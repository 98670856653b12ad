"""Attention of our own kernels over long texts: against float64, and the same bits however it is divided."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from layerskip_models.decoder_layer import DecoderLayer
from layerskip_models.kernels.library import SECTION
from layerskip_models.kernels.native_layers import KV_DTYPES, NativeLayers
from layerskip_models.kernels.native_linear import NativeLinear
from layerskip_models.kernels.threads import on_threads
from layerskip_models.kv_cache import CacheRows, KVCache
from layerskip_models.norm import RMSNorm
from test_native import drawn, every_variant, needs_native, use

HIDDEN, LAYERS = 6, 2
shapes = st.sampled_from([(4, 2, 18), (3, 1, 64), (5, 5, 34), (12, 1, 16), (8, 2, 82), (6, 2, 256)])
"""Heads, heads of keys and values, and their size: whole vectors and not, groups of all sizes that are computed together."""


@dataclass(frozen=True)
class Attending:
    """Two layers that are little but attention, one of them with a sliding window; what a cache must know of them."""

    heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    kv_dtype: torch.dtype
    num_layers: int = LAYERS
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def prepare(self, max_length: int) -> None:
        pass

    def layers(self) -> NativeLayers:
        width, dim = self.heads * self.head_dim, self.head_dim

        def matrix(out: int, size: int, seed: int) -> NativeLinear:
            return NativeLinear(drawn(out, size, seed=seed) * 2 * size**-0.5)

        norm = RMSNorm(torch.ones(HIDDEN), 1e-5)
        layers = [
            DecoderLayer(
                input_norm=norm, qkv=matrix(width + 2 * self.num_kv_heads * dim, HIDDEN, 1), output=matrix(HIDDEN, width, 2),
                post_attention_norm=norm, gate_up=matrix(2 * HIDDEN, HIDDEN, 3), down=matrix(HIDDEN, HIDDEN, 4),
                interleaved=True, sliding_window=window, rotated=False,
            )
            for window in (None, self.window)
        ]  # fmt: skip
        return NativeLayers(
            layers, hidden_size=HIDDEN, heads=self.heads, kv_heads=self.num_kv_heads, head_dim=dim, eps=1e-5
        )

    def cache(self, earlier: int, rows: int) -> KVCache:
        """Behind `earlier` drawn positions there is NaN, which nobody may read."""
        cache = KVCache(self, earlier + rows)
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
        size = (LAYERS, self.num_kv_heads, earlier, self.head_dim)
        cache.keys[..., :earlier] = drawn(*size, seed=5).mT
        cache.values[:, :, :earlier] = drawn(*size, seed=6)
        cache.declare(earlier)
        return cache


def rotary(positions: int, dim: int) -> Tensor:
    return torch.ones(positions, 1, dim // 2, dtype=torch.complex64)


@needs_native
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
    variant: str,
    shape: tuple[int, int, int],
    window: int,
    kv_dtype: torch.dtype,
    earlier: int,
    rows: int,
    others: list[tuple[int, int]],
    threads: int,
) -> None:
    """One row after the other on one thread; and in company, beside texts of other lengths, on several."""
    attending = Attending(*shape, window, kv_dtype)
    with use(variant):
        layers = attending.layers()
    x, table = drawn(rows, HIDDEN, seed=7), rotary(1400, shape[2])
    alone, cache = [], attending.cache(earlier, rows)
    with on_threads(1):
        for row in x.split(1):
            alone.append(layers.run(row, 0, LAYERS, ((cache, 1),), table, None))
    beside: CacheRows = [(attending.cache(length, number), number) for length, number in others]
    batch_size = drawn(sum(number for _, number in others), HIDDEN, seed=8)
    again = attending.cache(earlier, rows)
    with on_threads(threads):
        found = layers.run(torch.cat([x, batch_size]), 0, LAYERS, ((again, rows), *beside), table, None)
    assert not found.isnan().any()
    assert torch.equal(found[:rows], torch.cat(alone))
    assert torch.equal(again.keys, cache.keys) and torch.equal(again.values, cache.values)


def exactly(attending: Attending, window: int | None, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """In float64. query: [rows, heads, head_dim], of the last rows. keys, values: [kv_heads, positions, head_dim]."""
    group, (rows, positions) = attending.heads // attending.num_kv_heads, (len(query), keys.shape[1])
    keys, values = (part.double().repeat_interleave(group, 0) for part in (keys, values))
    scores = query.double().transpose(0, 1) @ keys.mT * attending.head_dim**-0.5
    behind = torch.arange(positions) - torch.arange(positions - rows, positions).unsqueeze(1)
    unseen = (behind > 0) | (False if window is None else behind <= -window)
    return (scores.masked_fill(unseen, -torch.inf).softmax(-1) @ values).transpose(0, 1).flatten(1)


@needs_native
@every_variant
@pytest.mark.parametrize("shape", [(4, 2, 18), (12, 1, 16)])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("window", "earlier", "rows"), [(None, 1290, 9), (None, 3, 2), (600, 1290, 33), (7, 1020, 12)])
def test_attention_is_softmax(
    variant: str, shape: tuple[int, int, int], kv_dtype: torch.dtype, window: int | None, earlier: int, rows: int
) -> None:
    """Of the keys and values as they are kept, also where one score stands out by far."""
    attending = Attending(*shape, window or 10**6, kv_dtype)
    heads, kv_heads, dim = shape
    width = (heads + 2 * kv_heads) * dim
    # All of a row goes through unchanged: what it adds to 0 is what it attends to.
    nothing = NativeLinear(torch.zeros(width, width))
    with use(variant):
        layer = DecoderLayer(
            input_norm=None, qkv=NativeLinear(torch.eye(width)), output=NativeLinear(torch.eye(width, heads * dim)),
            post_attention_norm=None, gate_up=NativeLinear(torch.zeros(2 * width, width)), down=nothing,
            interleaved=True, sliding_window=window, rotated=False,
        )  # fmt: skip
        layers = NativeLayers([layer], hidden_size=width, heads=heads, kv_heads=kv_heads, head_dim=dim, eps=1e-5)
    cache, x = attending.cache(earlier, rows), drawn(rows, width, seed=9)
    cache.keys[..., 1] *= 20
    with on_threads(2):
        found = layers.run(x, 0, 1, ((cache, rows),), rotary(1400, dim), None) - x
    query = x[:, : heads * dim].unflatten(1, (heads, dim))
    expected = exactly(attending, window, query, cache.keys[0].mT, cache.values[0])
    torch.testing.assert_close(found[:, : heads * dim].double(), expected, rtol=1e-5, atol=2e-5)


@needs_native
@every_variant
def test_rows_are_rounded_to_bfloat16_as_pytorch_does(variant: str) -> None:
    """Ties, subnormal numbers, what becomes infinite, infinities and NaN."""
    patterns = torch.tensor(
        [
            0,
            1,
            0x7FFF,
            0x8000,
            0x8001,
            0x3F808000,
            0x3F818000,
            0x3F80_8001,
            0x7F7F8000,
            0x7F7F7FFF,
            0x7F800000,
            0x7FC01234,
        ]
    )
    numbers = torch.cat([patterns.to(torch.int32).view(torch.float32), drawn(300)])
    numbers = torch.cat([numbers, -numbers]).unsqueeze(1)
    attending = Attending(1, 1, 2, 10**6, torch.bfloat16, num_layers=1)
    column = NativeLinear(torch.ones(6, 1))
    with use(variant):
        layer = DecoderLayer(
            input_norm=None, qkv=column, output=NativeLinear(torch.zeros(1, 2)), post_attention_norm=None,
            gate_up=NativeLinear(torch.zeros(2, 1)), down=NativeLinear(torch.zeros(1, 1)), interleaved=True, rotated=False,
        )  # fmt: skip
        layers = NativeLayers([layer], hidden_size=1, heads=1, kv_heads=1, head_dim=2, eps=1e-5)
    cache = KVCache(attending, len(numbers))
    layers.run(numbers, 0, 1, ((cache, len(numbers)),), rotary(len(numbers), 2), None)
    expected = numbers.bfloat16().expand(-1, 2)
    for kept in (cache.keys[0, 0].mT, cache.values[0, 0]):
        torch.testing.assert_close(kept.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


@needs_native
def test_a_far_text_is_divided_among_threads() -> None:
    """Or nothing above would have been: one head of keys and values, one row."""
    attending = Attending(3, 1, 64, 10**6, torch.float32)
    layers, cache, table = attending.layers(), attending.cache(8 * SECTION, 2), rotary(8 * SECTION + 2, 64)
    with on_threads(2):
        layers.run(drawn(1, HIDDEN), 0, LAYERS, ((cache, 1),), table, None)
        parts = layers.workspace()._parts.fill_(torch.nan)
        layers.run(drawn(1, HIDDEN, seed=1), 0, LAYERS, ((cache, 1),), table, None)
    # Of 9 sections and 3 queries: 64 numbers, the largest score and the sum of each.
    assert int(parts.isfinite().sum()) == 9 * 3 * (64 + 2)
