"""Attention by itself over a long context: its seconds beside those that its keys and values take at the memory's bandwidth.

The layers that are timed have a hidden size so small that their matrices weigh next to nothing: what is left of a pass is
attention. It runs on our own kernels, and the keys and values are random. With several rows, or several heads to a head of
keys and values, attention is no longer limited by memory but by arithmetic: that speed is measured beside the bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from bench.machine.bandwidth import measure_bandwidth
from bench.record import Line
from layerskip_models.checkpoints.synthetic import SHAPES
from layerskip_models.decoder_layer import DecoderLayer
from layerskip_models.kernels.native_layers import NativeLayers
from layerskip_models.kernels.native_linear import NativeLinear
from layerskip_models.kv_cache import KVCache
from layerskip_models.norm import RMSNorm

_HIDDEN = 16
_BYTES = 256 << 20  # of all layers' keys and values: beyond any cache
_CPU = torch.device("cpu")
_SQUARE, _PRODUCTS = 768, 60
_PASSES = 3  # of which the fastest counts


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """The attention heads of a model. kv_dtype: how keys and values are stored, float32 or bfloat16."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, name: str, kv_dtype: torch.dtype) -> HeadShape:
        """The heads of a shape of synthetic weights. Raises ValueError for an unknown shape."""
        if name not in SHAPES:
            raise ValueError(f"--shape must be one of {', '.join(SHAPES)}, got {name!r}")
        shape = SHAPES[name]
        heads = shape["num_attention_heads"]
        dim = shape.get("head_dim", shape["hidden_size"] // heads)
        return cls(
            name=name, num_heads=heads, num_kv_heads=shape["num_key_value_heads"], head_dim=dim, kv_dtype=kv_dtype
        )

    def layer_products(self, rows: int, context: int) -> int:
        """Multiplications with addition that `rows` rows at the end of a context take in a layer."""
        return 2 * self.num_heads * self.head_dim * rows * context

    def layer_bytes(self, positions: int) -> int:
        """Bytes of one layer's keys and values."""
        return 2 * self.num_kv_heads * self.head_dim * self.kv_dtype.itemsize * positions


class AttentionLayers:
    """Layers of this shape after `context` positions of random keys and values, on a CPU.

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
        self.kv_dtype, self.device = shape.kv_dtype, _CPU
        self._layers = NativeLayers(
            [layer] * self.num_layers, hidden_size=_HIDDEN, heads=heads, kv_heads=kv_heads, head_dim=dim, eps=1e-5
        )
        length = context + most_rows
        angles = torch.rand(length, dim // 2, generator=generator)
        self._rotary = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
        self._cache = KVCache(self, length)
        for part in (self._cache.keys.mT, self._cache.values):
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

    def measure(self, rows: int) -> Line:
        """The fastest of a few passes, by layer."""
        shape = self.shape
        return {
            "kind": "attention",
            "shape": shape.name,
            "kv_dtype": str(shape.kv_dtype).removeprefix("torch."),
            "context": self.context,
            "rows": rows,
            "seconds": min(self.seconds(rows) for _ in range(_PASSES)),
            "bytes": shape.layer_bytes(self.context),
            "products": shape.layer_products(rows, self.context),
        }


def measure_machine() -> Line:
    """What the machine gives now: bytes per second of one large tensor, and multiplications with addition per second.

    The latter are of PyTorch's products of matrices that are in a cache.
    """
    left = torch.ones(_SQUARE, _SQUARE)
    right = torch.ones(_SQUARE, _SQUARE)
    best = float("inf")
    for _ in range(_PRODUCTS):
        start = perf_counter()
        torch.mm(left, right)
        best = min(best, perf_counter() - start)
    return {"kind": "machine", "bytes_per_second": measure_bandwidth(_CPU), "products_per_second": _SQUARE**3 / best}


def measure_attention(shapes: Sequence[HeadShape], context: int, rows: Sequence[int], repeats: int) -> Iterator[Line]:
    """Measure, in each repeat, the machine before each shape, and then attention with each number of rows."""
    places = [AttentionLayers(shape, context, max(rows)) for shape in shapes]
    for layers in places:
        for number in rows:  # the path that is timed
            layers.seconds(number)
    for repeat in range(repeats):
        for layers in places:
            yield {**measure_machine(), "shape": layers.shape.name, "repeat": repeat}
            for number in rows:
                yield {**layers.measure(number), "repeat": repeat}
