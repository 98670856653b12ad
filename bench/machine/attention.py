"""Attention by itself over a long context: its seconds beside those that its keys and values take at the memory's bandwidth.

The layers that are timed have a hidden size so small that their matrices weigh next to nothing: what is left of a pass is
attention. It runs on our own kernels, and the keys and values are random.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from bench.machine.bandwidth import BandwidthInTurn
from layerskip_models.kernels.native_layers import NativeLayers
from layerskip_models.kernels.native_linear import NativeLinear
from layerskip_models.kv_cache import KVCache
from layerskip_models.model import DecoderLayer
from layerskip_models.norm import RMSNorm

_HIDDEN = 16
_BYTES = 256 << 20  # of all layers' keys and values: beyond any cache
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Of a model, as far as attention goes. kv_dtype: that keys and values are kept in, float32 or bfloat16."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype = torch.float32

    def layer_bytes(self, positions: int) -> int:
        """Bytes of one layer's keys and values."""
        return 2 * self.num_kv_heads * self.head_dim * self.kv_dtype.itemsize * positions


class AttentionLayers:
    """Layers of this shape behind `context` positions of random keys and values, float32 on a CPU.

    Raises RuntimeError where there are no native kernels.
    """

    def __init__(self, shape: HeadShape, context: int, most_rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim

        def matrix(out: int, size: int) -> NativeLinear:
            return NativeLinear((torch.randn(out, size, generator=generator) * size**-0.5).bfloat16())

        norm = RMSNorm(torch.ones(_HIDDEN), 1e-5)
        layer = DecoderLayer(
            input_norm=norm,
            qkv=matrix((heads + 2 * kv_heads) * dim, _HIDDEN),
            output=matrix(_HIDDEN, heads * dim),
            post_attention_norm=norm,
            gate_up=matrix(2 * _HIDDEN, _HIDDEN),
            down=matrix(_HIDDEN, _HIDDEN),
            interleaved=True,
        )
        self.shape, self.context = shape, context
        self.num_layers = max(1, -(-_BYTES // shape.layer_bytes(context)))
        self.num_kv_heads, self.head_dim = kv_heads, dim
        self.dtype, self.kv_dtype, self.device = torch.float32, shape.kv_dtype, _CPU
        self._layers = NativeLayers(
            [layer] * self.num_layers, hidden_size=_HIDDEN, heads=heads, kv_heads=kv_heads, head_dim=dim, eps=1e-5
        )
        length = context + most_rows
        angles = torch.rand(length, dim // 2, generator=generator)
        self._rotary = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
        self._cache = KVCache(self, length)
        for part in (self._cache.keys, self._cache.values):
            part.normal_(generator=generator)
        self._x = torch.randn(most_rows, _HIDDEN, generator=generator)

    def prepare(self, max_length: int) -> None:
        """The rotary table is there already."""

    def seconds(self, rows: int) -> float:
        """Seconds of one layer's pass of the last `rows` rows of the context."""
        self._cache.declare(self.context - rows)
        start = perf_counter()
        with torch.inference_mode():
            self._layers.run(self._x[:rows], 0, self.num_layers, ((self._cache, rows),), self._rotary, None)
        return (perf_counter() - start) / self.num_layers
