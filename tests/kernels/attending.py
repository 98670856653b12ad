"""Layers that are little but attention, and what they should compute, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from layerskip_models.decoder_layer import DecoderLayer
from layerskip_models.kernels.native_layers import NativeLayers
from layerskip_models.kernels.native_linear import NativeLinear
from layerskip_models.kv_cache import KVCache


@dataclass(frozen=True)
class Attending:
    """Layers with these sliding windows; also what a cache must know of them."""

    heads: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    windows: tuple[int | None, ...] = (None,)
    rotated: bool = False
    device: torch.device = torch.device("cpu")  # noqa: RUF009

    def prepare(self, max_length: int) -> None:
        pass

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.num_kv_heads) * self.head_dim

    def layers(self, qkv: Tensor | None = None, output: Tensor | None = None) -> NativeLayers:
        """By default queries, keys and values go in, and come out with what they attend to added."""
        qkv = torch.eye(self.width) if qkv is None else qkv
        hidden, attended = qkv.shape[1], self.heads * self.head_dim
        shared = {
            "qkv": NativeLinear(qkv),
            "output": NativeLinear(torch.eye(hidden, attended) if output is None else output),
            "gate_up": NativeLinear(torch.zeros(2, hidden)),
            "down": NativeLinear(torch.zeros(hidden, 1)),
        }
        layers = [
            DecoderLayer(
                input_norm=None, post_attention_norm=None, interleaved=True, sliding_window=window, rotated=self.rotated,
                **shared,
            )
            for window in self.windows
        ]  # fmt: skip
        return NativeLayers(
            layers, hidden_size=hidden, heads=self.heads, kv_heads=self.num_kv_heads, head_dim=self.head_dim, eps=1e-5
        )

    def cache(self, earlier: int, rows: int) -> KVCache:
        """Behind `earlier` drawn positions there is NaN, which nobody may read."""
        cache = KVCache(self, earlier + rows)
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
        size = (self.num_layers, self.num_kv_heads, earlier, self.head_dim)
        cache.keys[..., :earlier] = torch.randn(size, generator=torch.Generator().manual_seed(5)).mT
        cache.values[:, :, :earlier] = torch.randn(size, generator=torch.Generator().manual_seed(6))
        cache.declare(earlier)
        return cache


def exactly(attending: Attending, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The first layer's. query: [rows, heads, head_dim], of the last rows. keys, values: [kv_heads, positions, head_dim]."""
    group, (rows, positions) = attending.heads // attending.num_kv_heads, (len(query), keys.shape[1])
    keys, values = (part.double().repeat_interleave(group, 0) for part in (keys, values))
    scores = query.double().transpose(0, 1) @ keys.mT * attending.head_dim**-0.5
    behind = torch.arange(positions) - torch.arange(positions - rows, positions).unsqueeze(1)
    window = attending.windows[0]
    unseen = (behind > 0) | (False if window is None else behind <= -window)
    return (scores.masked_fill(unseen, -torch.inf).softmax(-1) @ values).transpose(0, 1).flatten(1)
