"""Decoder layers over a few rows in one call of our own kernels: norms, attention and matrices without PyTorch in between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from ctypes import addressof, sizeof
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from layerskip_models.kernels.library import Cache, Layer, Shape, kernels
from layerskip_models.kernels.native_linear import NativeLinear, pieces
from layerskip_models.kernels.threads import keep, num_threads

if TYPE_CHECKING:
    from layerskip_models.model import DecoderLayer, LayerCache


class NativeLayers:
    """All layers of a model whose matrices are `NativeLinear`. float32, one CPU.

    A row's result does not depend on the rows beside it: what verification computes for a drafted token is, bit for bit,
    what decoding it alone would have.
    """

    def __init__(
        self, layers: Sequence[DecoderLayer], *, hidden_size: int, heads: int, kv_heads: int, head_dim: int, eps: float
    ) -> None:
        library = kernels()
        assert library is not None
        self._library = library
        self._shape = Shape(hidden_size, heads, kv_heads, head_dim, eps, head_dim**-0.5)
        self._layers = (Layer * len(layers))()
        self.first = addressof(self._layers)
        self._alive: list[Tensor] = []  # what the pointers below point to, which they do not keep alive
        for described, layer in zip(self._layers, layers):
            for name in ("qkv", "output", "gate_up", "down"):
                linear = getattr(layer, name)
                assert isinstance(linear, NativeLinear)
                setattr(described, name, linear.matrix)
                self._alive += linear.tensors
            for name in ("input_norm", "post_attention_norm"):
                factors = getattr(layer, name).factors.contiguous()
                setattr(described, name, factors.data_ptr())
                self._alive.append(factors)
        self.shape_address = addressof(self._shape)
        self._scratch = threading.local()

    @staticmethod
    def possible(layers: Sequence[DecoderLayer]) -> bool:
        """Whether every matrix of these layers is one that the kernels can read."""
        return all(
            isinstance(linear, NativeLinear) and layer.input_norm.factors is not None
            for layer in layers
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
        )

    def run(
        self,
        hidden: Tensor,
        start: int,
        stop: int,
        cache: LayerCache,
        position: int,
        rotary: Tensor,
        capture: Callable[[int, Tensor], None] | None,
    ) -> Tensor:
        """`LayerSkipModel.run_layers`; rotary: complex [rows, 1, head_dim / 2], of the rows' positions."""
        keys, values = cache.keys, cache.values
        layer_stride, head_stride, _, _ = values.stride()
        first = start * layer_stride * values.element_size()
        where = Cache(keys.data_ptr() + first, values.data_ptr() + first, layer_stride, head_stride)
        hidden = hidden.contiguous()
        rows, size = hidden.shape
        count = stop - start
        outputs = hidden.new_empty(1 if capture is None else count, rows, size)
        threads = num_threads()
        for done, piece in pieces(rows):
            scratch = self.scratch_for(piece)
            job = self._library.run(
                self._shape,
                self.first + start * sizeof(Layer),
                count,
                where,
                hidden.data_ptr() + 4 * done * size,
                piece,
                position + done,
                rotary.data_ptr() + 4 * done * self._shape.head_dim,
                outputs.data_ptr() + 4 * done * size,
                0 if capture is None else rows * size,
                scratch.data_ptr(),
                threads,
            )
            if job:
                keep(job, self, hidden, keys, values, rotary, scratch)
        if capture is not None:
            for index in range(count):
                capture(start + index + 1, outputs[index])
        return outputs[-1]

    def scratch_for(self, rows: int) -> Tensor:
        """Memory for one call, this thread's own; it grows with the number of rows."""
        size = self._library.scratch_size(self._shape, self.first, rows)
        held: Tensor | None = getattr(self._scratch, "memory", None)
        if held is None or held.numel() < size:
            held = self._scratch.memory = torch.empty(size, dtype=torch.float32)
        return held
