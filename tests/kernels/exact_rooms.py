"""Kernels in memory of exactly the size that they ask for: what is written behind it is found."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import permutations

import torch
from torch import Tensor

from layerskip_models.decoder_layer import DecoderLayer
from layerskip_models.four_bit_rounding import round_to_four_bits
from layerskip_models.kernels import library
from layerskip_models.kernels.native_layers import NativeLayers
from layerskip_models.kernels.native_linear import NativeGroupedLinear, NativeInt8Linear, NativeLinear
from layerskip_models.kernels.threads import on_threads
from layerskip_models.kv_cache import KVCache
from layerskip_models.norm import RMSNorm

HIDDEN, INNER, HEADS, DIM = 64, 192, 2, 32
KINDS = ("float32", "bfloat16", "float16", "int8", "int4")


@contextmanager
def exact_rooms() -> Iterator[None]:
    """Every request for memory within it gets as much and no more. Fails if a byte behind any of it has changed."""
    loaded = library._library()
    count = loaded.pool_overruns
    count.restype = ctypes.c_int64
    before = count()
    exact = loaded.pool_exact_rooms(1)
    try:
        yield
        for threads in (1, 4):  # the guards of the last requests are looked at when the next ones are made
            with on_threads(threads):
                NativeLinear(torch.ones(512, 64))(torch.ones(1, 64))
    finally:
        loaded.pool_exact_rooms(exact)
    assert count() == before, "the kernels wrote behind the memory that they asked for"


def matrix(kind: str, out: int, size: int) -> NativeLinear:
    weight = torch.randn(out, size, generator=torch.Generator().manual_seed(out)) * size**-0.5
    if kind == "int4":
        rounded = round_to_four_bits(weight, group=64)
        assert rounded.groups is not None
        return NativeGroupedLinear(replace(rounded, offsets=-8 * rounded.groups.float()))  # and so with offsets
    return NativeInt8Linear(weight) if kind == "int8" else NativeLinear(weight.to(getattr(torch, kind)))


class Mixed:
    """Layers with weights of different kinds; also what a cache must know of them."""

    num_kv_heads, head_dim = HEADS, DIM
    kv_dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, *kinds: str) -> None:
        self.num_layers = len(kinds)
        norm = RMSNorm(torch.ones(HIDDEN), 1e-5)
        layers = [
            DecoderLayer(
                input_norm=norm, qkv=matrix(kind, 3 * HEADS * DIM, HIDDEN), output=matrix(kind, HIDDEN, HEADS * DIM),
                post_attention_norm=norm, gate_up=matrix(kind, 2 * INNER, HIDDEN), down=matrix(kind, HIDDEN, INNER),
                interleaved=True,
            )
            for kind in kinds
        ]  # fmt: skip
        self.layers = NativeLayers(layers, hidden_size=HIDDEN, heads=HEADS, kv_heads=HEADS, head_dim=DIM, eps=1e-5)

    def prepare(self, max_length: int) -> None:
        pass

    def run(self, x: Tensor, sizes: list[int]) -> Tensor:
        """The rows of one text, so many in each pass."""
        cache, rotary = KVCache(self, len(x)), torch.ones(len(x), 1, DIM // 2, dtype=torch.complex64)  # type: ignore[arg-type]
        parts = x.split(sizes)
        return torch.cat(
            [self.layers.run(part, 0, self.num_layers, ((cache, len(part)),), rotary, None) for part in parts]
        )


def check_mixed_layers() -> None:
    """Of every two kinds, either first: passes of growing size stay in their memory, and a row is the same in all of them."""
    x = torch.randn(68, HIDDEN, generator=torch.Generator().manual_seed(0))
    for kinds in permutations(KINDS, 2):
        mixed = Mixed(*kinds)
        with on_threads(1):
            alone = mixed.run(x, [1] * len(x))
        for threads in (1, 2):
            with on_threads(threads), exact_rooms():
                assert torch.equal(mixed.run(x, [1, 2, 3, 16, 46]), alone), kinds
