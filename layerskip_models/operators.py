"""What runs a model's layers, and the way that works on any device and in any dtype: PyTorch's operators.

`NativeLayers`, the backend of our own kernels, is in `kernels.native_layers`; `SpreadLayers`, for several devices, in
`checkpoints.spread_loading`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip_models.attention import Attention, OperatorAttention
from layerskip_models.decoder_layer import DecoderLayer, Linear
from layerskip_models.kv_cache import CacheRows
from layerskip_models.norm import RMSNorm

Capture = Callable[[int, Tensor], None]
"""Called after each layer as capture(layers_done, hidden), hidden: [rows, hidden]."""


class LayerBackend(Protocol):
    """Runs a range of layers over the next rows of one sequence or of several.

    variant: which variant of our kernels runs the layers ("avx2", ...); None where PyTorch's operators do.
    """

    @property
    def variant(self) -> str | None: ...

    def run(
        self, hidden: Tensor, start: int, stop: int, rows: CacheRows, rotary: Tensor, capture: Capture | None
    ) -> Tensor:
        """Run layers [start, stop), extend the caches, return [rows, hidden]. rotary: the model's table, from 0 on."""
        ...


class OperatorLayers:
    """`LayerBackend` without kernels of ours."""

    variant = None

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = layers
        self._heads, self._kv_heads, self._head_dim, self._dtype = heads, kv_heads, head_dim, dtype
        self._half = dtype not in (torch.float32, torch.float64)
        self._unfused = device.type == "cpu" and not self._half
        self._groups_rows = device.type != "cpu"  # no fused kernel there takes a mask and grouped heads

    def run(
        self, hidden: Tensor, start: int, stop: int, rows: CacheRows, rotary: Tensor, capture: Capture | None
    ) -> Tensor:
        if start == stop:
            return hidden
        attention = OperatorAttention(
            rows, start, stop, rotary=rotary, heads=self._heads, dtype=self._dtype, unfused=self._unfused,
            sliding_windows=[layer.sliding_window for layer in self.layers[start:stop]], groups_rows=self._groups_rows,
        )  # fmt: skip
        norm = self.layers[0].entry_norm
        if start == 0 and norm is not None and any(cache.loop_index for cache, _ in rows):
            parts = zip(rows, hidden.split([number for _, number in rows]))
            hidden = torch.cat([norm(part) if cache.loop_index else part for (cache, _), part in parts])
        hidden = self.walk(hidden, start, stop, attention, capture)
        for cache, number in rows:
            cache.extend(start, stop, number)
        return hidden

    def walk(self, hidden: Tensor, start: int, stop: int, attention: Attention, capture: Capture | None) -> Tensor:
        """Run layers [start, stop) with any attention, which keeps the keys and values."""
        for index in range(start, stop):
            layer = self.layers[index]
            if index and layer.entry_norm is not None:
                hidden = layer.entry_norm(hidden)
            attended = attention(index, *self._project(layer, hidden, attention.rotary))
            hidden = _finish(layer, hidden, attended)
            if capture is not None:
                capture(index + 1, hidden)
        return hidden

    def _project(self, layer: DecoderLayer, hidden: Tensor, rotary: Tensor) -> tuple[Tensor, ...]:
        """Norm, then rotated query, key and value: [rows, heads or kv_heads, head_dim] each. rotary: for these rows."""
        heads, kv_heads = self._heads, self._kv_heads
        normed = hidden if layer.input_norm is None else layer.input_norm(hidden)
        qkv = layer.qkv(normed).view(-1, heads + 2 * kv_heads, self._head_dim)
        if layer.query_norm is not None:
            normalise_heads(layer.query_norm, qkv[:, :heads])
        if layer.key_norm is not None:
            normalise_heads(layer.key_norm, qkv[:, heads : heads + kv_heads])
        if layer.rotated:
            self._rotate(qkv, heads + kv_heads, rotary)
        return qkv.split_with_sizes((heads, kv_heads, kv_heads), 1)

    def _rotate(self, qkv: Tensor, num_rotated: int, rotary: Tensor) -> None:
        """Apply the rotary embedding, in place, to the first `num_rotated` heads of [rows, heads, head_dim]."""
        if not rotary.is_complex():
            halves = qkv[:, :num_rotated, : 2 * rotary.shape[-1]].unflatten(-1, (2, -1))
            itself, other = rotary.unbind(2)
            # In half precision from float32 products.
            torch.addcmul(halves.flip(-2) * other, halves, itself, out=halves)
        elif self._half:
            heads = qkv[:, :num_rotated]
            pairs = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2)))
            heads.copy_(torch.view_as_real(pairs.mul_(rotary)).flatten(-2))
        else:
            qkv.view(rotary.dtype)[:, :num_rotated].mul_(rotary)


def _finish(layer: DecoderLayer, hidden: Tensor, attended: Tensor) -> Tensor:
    """Return the layer's output, from its input and the output of attention, [rows, heads * head_dim]."""
    hidden = _add(hidden, attended, layer.output, layer.output_norm)
    normed = hidden if layer.post_attention_norm is None else layer.post_attention_norm(hidden)
    gate, up = layer.gate_up(normed).view(hidden.shape[0], 2, -1).unbind(1)
    return _add(hidden, F.silu(gate).mul_(up), layer.down, layer.down_norm)


def _add(residual: Tensor, x: Tensor, linear: Linear, norm: RMSNorm | None) -> Tensor:
    """residual + linear(x), or residual + norm(linear(x)), in a new tensor. residual: [rows, out], x: [rows, in]."""
    return linear.add_to(residual, x) if norm is None else norm(linear(x)).add_(residual)


def normalise_heads(norm: RMSNorm, heads: Tensor) -> None:
    """In place: each head alone, or all heads of a row together if the norm is that wide. heads: [rows, heads, head_dim]."""
    heads.copy_(norm(heads.reshape(heads.shape[0], -1, norm.size)).view(heads.shape))
