"""Decoder layers over a few rows in one call of our own kernels: norms, attention and matrices without PyTorch in between."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from ctypes import addressof
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerskip_models.decoder_layer import DecoderLayer
from layerskip_models.kernels import library
from layerskip_models.kernels.library import KINDS, SECTION, Layer, Shape, Span, Step
from layerskip_models.kernels.native_linear import MAX_ROWS, NativeLinear, check_rows, pointer, readable
from layerskip_models.kernels.threads import keep, num_threads
from layerskip_models.kv_cache import CacheRows, KVCache
from layerskip_models.norm import RMSNorm

_OF_ROWS = ("input_norm", "post_attention_norm", "output_norm", "down_norm", "entry_norm")
_OF_HEADS = ("query_norm", "key_norm")
_UNLIMITED = 2**62  # positions
KV_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes that keys and values may be stored in."""


@functools.cache
def _array_of_spans(num: int) -> Any:
    """Make the type, once. Each time it leaves a circle of objects behind, for Python's collector to find."""
    return Span * num


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """What C needs to know about a KV cache's memory. Checked once, since the check is too slow for every small pass."""

    keys: Tensor
    values: Tensor
    span: Span
    layers: int

    @classmethod
    def checked(cls, keys: Tensor, values: Tensor, kv_heads: int, dim: int) -> Memory:
        """Describe them. Raises ValueError unless both have the memory layout that the kernels read and write."""
        if not (values.dtype is keys.dtype and values.dtype in KV_DTYPES and values.is_cpu and keys.is_cpu):
            raise ValueError("keys and values must be float32 on the CPU, or both bfloat16")
        strides = values.stride()
        if (
            values.dim() != 4
            or (values.shape[1], values.shape[3], *strides[2:]) != (kv_heads, dim, dim, 1)
            or keys.shape != values.mT.shape
            or keys.stride() != values.mT.stride()
        ):
            raise ValueError(
                f"keys {list(keys.shape)}, strides {keys.stride()}, and values {list(values.shape)}, strides {strides}, must "
                f"both be in memory as [layers, {kv_heads}, positions, {dim}], the last two without gaps"
            )
        span = Span(keys.data_ptr(), values.data_ptr(), strides[0], strides[1], 0, 0, KINDS[values.dtype])
        return cls(keys, values, span, values.shape[0])


class Workspace:
    """What a caller of the kernels needs besides the weights: scratch, and the description of a call."""

    def __init__(self, layers: NativeLayers) -> None:
        self.step = Step(shape=layers.shape_address, layers=layers.first)
        self.only = Span()
        self._layers = layers
        self._scratch = self._parts = torch.empty(0, device="cpu")

    def reserve(self, rows: int) -> None:
        """Make sure that there is scratch for this many rows."""
        size = self._layers.scratch_size(rows)
        if self._scratch.numel() < size:
            scratch = torch.empty(size, dtype=torch.float32, device="cpu")
            address = scratch.data_ptr()
            # The next line calls nothing, so no signal handler runs between its stores and sees the address of freed memory.
            self._scratch, self.step.scratch = scratch, address

    def _reserve_parts(self) -> None:
        """Make sure that there is memory for partial attention results of the texts that `step` describes."""
        size = self._layers.parts_size(addressof(self.step))
        if self._parts.numel() < size:
            parts = torch.empty(size, dtype=torch.float32, device="cpu")
            address = parts.data_ptr()
            self._parts, self.step.parts = parts, address

    def run(
        self, rows: CacheRows, positions: Sequence[int], start: int, stop: int, rotary: Tensor, *needed: object
    ) -> None:
        """Run `step` over these rows in layers [start, stop), and count the rows in their caches.

        positions: each text's first row (`NativeLayers.check`). needed: objects that `step` points to.
        """
        spans = self.describe(rows, positions, rotary)
        self.step.first, self.step.count = start, stop - start
        self.keep(self._layers.run_step(addressof(self.step), num_threads()), rows, spans, rotary, *needed)
        for cache, number in rows:
            cache.extend(start, stop, number)

    def describe(self, rows: CacheRows, positions: Sequence[int], rotary: Tensor) -> object:
        """Fill in the texts in `step`. Returns the spans, which `step` then points to."""
        step, count, furthest = self.step, 0, 0
        # Late threads may still read an array of spans, so each call makes a new one.
        spans = self.only if len(rows) == 1 else _array_of_spans(len(rows))()
        for span, (cache, number), position in zip((spans,) if isinstance(spans, Span) else spans, rows, positions):
            memory = cache.described
            assert isinstance(memory, Memory)
            span.keys, span.values = memory.span.keys, memory.span.values
            span.layer_stride, span.head_stride = memory.span.layer_stride, memory.span.head_stride
            span.position, span.rows, span.kind, span.loop = position, number, memory.span.kind, cache.loop_index
            count += number
            furthest = max(furthest, position + number)
        step.spans, step.num_spans, step.rows = addressof(spans), len(rows), count
        step.rotary = rotary.data_ptr()
        if furthest > SECTION:
            self._reserve_parts()
        return spans

    def keep(self, job: int, rows: CacheRows, *needed: object) -> None:
        """Keep a call's arguments alive while late threads may read them. job: what the call returned."""
        if job:
            keep(job, self, self._scratch, self._parts, *needed, *(cache for cache, _ in rows))


class NativeLayers:
    """All layers of a model whose matrices are `NativeLinear`. float32 on a CPU.

    A row's result does not depend on other rows in the pass: what verification computes for a drafted token is bit-identical
    to decoding it alone.
    """

    def __init__(
        self, layers: Sequence[DecoderLayer], *, hidden_size: int, heads: int, kv_heads: int, head_dim: int, eps: float
    ) -> None:
        chosen = library.kernels()
        if chosen is None:
            raise RuntimeError("no native kernels here")
        if heads % kv_heads or head_dim % 2:
            raise ValueError(f"{heads} heads of {head_dim} cannot share {kv_heads} keys, or be rotated in pairs")
        self.variant = chosen.variant
        self._library = chosen
        self._hidden_size, self._kv_heads, self._head_dim = hidden_size, kv_heads, head_dim
        self._shape = Shape(hidden_size, heads, kv_heads, head_dim, eps, head_dim**-0.5)
        self._layers = (Layer * len(layers))()
        self.first = addressof(self._layers)
        self._alive: list[Tensor] = []  # the pointers below do not keep their tensors alive
        intermediate = getattr(layers[0].down, "matrix").in_features  # noqa: B009
        sizes = {
            "qkv": ((heads + 2 * kv_heads) * head_dim, hidden_size),
            "output": (hidden_size, heads * head_dim),
            "gate_up": (2 * intermediate, hidden_size),
            "down": (hidden_size, intermediate),
        }
        for described, layer in zip(self._layers, layers):
            for name, size in sizes.items():
                linear = getattr(layer, name)
                if not isinstance(linear, NativeLinear) or linear.shape != size:
                    raise ValueError(f"{name} must be a NativeLinear of [out, in] = {list(size)}")
                setattr(described, name, linear.matrix)
                self._alive += linear.tensors
            joint = layer.query_norm is not None and layer.query_norm.size != head_dim
            widths = dict.fromkeys(_OF_ROWS, hidden_size) | dict.fromkeys(_OF_HEADS, head_dim)
            if joint:
                widths |= {"query_norm": heads * head_dim, "key_norm": kv_heads * head_dim}
            for name, width in widths.items():
                norm: RMSNorm | None = getattr(layer, name)
                if norm is None:
                    continue
                if norm.factors is None:
                    raise ValueError(f"{name} has no factors of its own")
                factors = readable(norm.factors)
                setattr(described, name, pointer(name, factors, torch.float32, width))
                self._alive.append(factors)
            window = _UNLIMITED if layer.sliding_window is None else layer.sliding_window
            if window < 1:
                raise ValueError(f"a row must attend to at least one position, got a window of {window}")
            described.window, described.joint, described.rotated = window, joint, layer.rotated
        self.shape_address = addressof(self._shape)
        self.run_step, self.parts_size = chosen.step, chosen.parts_size
        self._own = threading.local()
        self._rotary: Tensor | None = None  # the table checked last

    @staticmethod
    def possible(layers: Sequence[DecoderLayer]) -> bool:
        """Return whether the kernels can run these layers: every matrix is a `NativeLinear`, and every norm has factors."""
        return all(
            all(isinstance(linear, NativeLinear) for linear in (layer.qkv, layer.output, layer.gate_up, layer.down))
            and all(norm is None or norm.factors is not None for norm in _norms(layer))
            for layer in layers
        )

    def run(
        self,
        hidden: Tensor,
        start: int,
        stop: int,
        rows: CacheRows,
        rotary: Tensor,
        capture: Callable[[int, Tensor], None] | None,
    ) -> Tensor:
        """`LayerSkipModel.run_layers`. rotary: complex64 [positions, 1, head_dim / 2], for all positions from 0 on.

        Raises ValueError before anything is computed if the arguments do not fit together: C would access other memory.
        """
        check_rows("hidden", hidden, self._hidden_size)
        self.check(hidden.shape[0], start, stop, rows, rotary)
        if start == stop:
            return hidden
        hidden = hidden.contiguous()
        total, size = hidden.shape
        outputs = hidden.new_empty(1 if capture is None else stop - start, total, size)
        space = self.workspace()
        step, done = space.step, 0
        step.stride = 0 if capture is None else total * size
        for part in portions(rows):
            count = sum(number for _, number in part)
            space.reserve(count)
            step.x, step.outputs = hidden.data_ptr() + 4 * done * size, outputs.data_ptr() + 4 * done * size
            positions = [cache.position(start, stop) for cache, _ in part]
            space.run(part, positions, start, stop, rotary, hidden, outputs)
            done += count
        if capture is not None:
            for index in range(stop - start):
                capture(start + index + 1, outputs[index])
        return outputs[-1]

    def check(self, count: int, start: int, stop: int, rows: CacheRows, rotary: Tensor) -> list[int]:
        """Return the position of each text's first row. ValueError if `count` rows do not fit the other arguments."""
        positions: list[int] = []
        if not 0 <= start <= stop <= len(self._layers):
            raise ValueError(f"layers [{start}, {stop}) are not among {len(self._layers)}")
        numbers = [number for _, number in rows]
        if count != sum(numbers) or min(numbers, default=0) < 0:
            raise ValueError(f"{count} rows were given for caches that expect {numbers}")
        if rotary is not self._rotary:
            self._rotary = self._checked_rotary(rotary)
        for cache, number in rows:
            known = cache.described
            if not isinstance(known, Memory) or known.keys is not cache.keys or known.values is not cache.values:
                known = cache.described = Memory.checked(cache.keys, cache.values, self._kv_heads, self._head_dim)
            if start == stop:
                continue
            if stop > known.layers:
                raise ValueError(f"layers [{start}, {stop}) are not among the cache's {known.layers}")
            positions.append(cache.room(start, stop, number))
            end = positions[-1] + number
            if end > known.values.shape[2]:
                raise ValueError(f"{end} rows do not fit into a cache of {known.values.shape[2]} positions")
            if end > rotary.shape[0]:
                raise ValueError(f"{end} rows are more than the rotary table's {rotary.shape[0]} positions")
        return positions

    def _checked_rotary(self, rotary: Tensor) -> Tensor:
        dim = self._head_dim
        if (
            rotary.dtype is not torch.complex64
            or rotary.shape[1:] != (1, dim // 2)
            or not (rotary.is_cpu and rotary.is_contiguous())
            or rotary.is_conj()
        ):
            raise ValueError(
                f"rotary must be contiguous complex64 [positions, 1, {dim // 2}] on the CPU, "
                f"got {rotary.dtype} {list(rotary.shape)} on {rotary.device}"
            )
        return rotary

    def workspace(self) -> Workspace:
        """Return the calling thread's workspace."""
        held: Workspace | None = getattr(self._own, "workspace", None)
        if held is None:
            held = self._own.workspace = Workspace(self)
        return held

    def scratch_size(self, rows: int) -> int:
        """Floats of scratch that a call over this many rows needs."""
        return self._library.scratch_size(self._shape, self.first, rows)


def _norms(layer: DecoderLayer) -> list[RMSNorm | None]:
    return [getattr(layer, name) for name in (*_OF_ROWS, *_OF_HEADS)]


def portions(rows: CacheRows) -> Iterator[CacheRows]:
    """Split the rows into portions of at most `MAX_ROWS`."""
    part: list[tuple[KVCache, int]] = []
    left = MAX_ROWS
    for cache, number in rows:
        while number:
            taken = min(number, left)
            part.append((cache, taken))
            number, left = number - taken, left - taken
            if not left:
                yield part
                part, left = [], MAX_ROWS
    if part:
        yield part
