"""Decoder layers over a few rows in one call of our own kernels: norms, attention and matrices without PyTorch in between."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from ctypes import addressof, sizeof
from dataclasses import dataclass
from typing import Protocol
from weakref import ReferenceType

import torch
from torch import Tensor

from layerskip_models.kernels import library
from layerskip_models.kernels.library import Cache, Layer, Shape
from layerskip_models.kernels.native_linear import NativeLinear, check_rows, pieces
from layerskip_models.kernels.threads import keep, num_threads
from layerskip_models.norm import RMSNorm


class LayerWeights(Protocol):
    """One decoder layer; `DecoderLayer` says what each field is."""

    @property
    def input_norm(self) -> RMSNorm: ...
    @property
    def qkv(self) -> object: ...
    @property
    def output(self) -> object: ...
    @property
    def post_attention_norm(self) -> RMSNorm: ...
    @property
    def gate_up(self) -> object: ...
    @property
    def down(self) -> object: ...


class KeysAndValues(Protocol):
    """A KV cache; both are in memory as [layers, kv_heads, positions, head_dim]."""

    keys: Tensor  # [layers, kv_heads, head_dim, positions]
    values: Tensor  # [layers, kv_heads, positions, head_dim]


@dataclass(frozen=True, slots=True)
class Memory:
    """What C must know of a KV cache and a rotary table. It was checked, which takes longer than a small pass may."""

    keys: ReferenceType[Tensor]
    values: ReferenceType[Tensor]
    rotary: ReferenceType[Tensor]
    layers: int
    positions: int
    layer_stride: int
    head_stride: int
    rotary_positions: int

    @classmethod
    def checked(cls, keys: Tensor, values: Tensor, rotary: Tensor, kv_heads: int, dim: int) -> Memory:
        """Raises ValueError unless they are in memory as the kernels read and write them."""
        if not (values.dtype is keys.dtype is torch.float32 and values.is_cpu and keys.is_cpu):
            raise ValueError("keys and values must be float32 on the CPU")
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
        references = weakref.ref(keys), weakref.ref(values), weakref.ref(rotary)
        return cls(*references, values.shape[0], values.shape[2], strides[0], strides[1], rotary.shape[0])


class NativeLayers:
    """All layers of a model whose matrices are `NativeLinear`. float32, one CPU.

    A row's result does not depend on the rows beside it: what verification computes for a drafted token is, bit for bit,
    what decoding it alone would have.
    """

    def __init__(
        self, layers: Sequence[LayerWeights], *, hidden_size: int, heads: int, kv_heads: int, head_dim: int, eps: float
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
        self._alive: list[Tensor] = []  # what the pointers below point to, which they do not keep alive
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
                if not isinstance(linear, NativeLinear) or tuple(linear.stored.shape) != size:
                    raise ValueError(f"{name} must be a NativeLinear of [out, in] = {list(size)}")
                setattr(described, name, linear.matrix)
                self._alive += linear.tensors
            for norm, name in ((layer.input_norm, "input_norm"), (layer.post_attention_norm, "post_attention_norm")):
                if norm.factors is None:
                    raise ValueError(f"{name} has no factors of its own")
                check_rows(name, norm.factors.unsqueeze(0), hidden_size)
                factors = norm.factors.contiguous()
                setattr(described, name, factors.data_ptr())
                self._alive.append(factors)
        self.shape_address = addressof(self._shape)
        self._scratch = threading.local()
        self._memory: Memory | None = None

    @staticmethod
    def possible(layers: Sequence[LayerWeights]) -> bool:
        """Whether every matrix of these layers is one that the kernels can read."""
        return all(
            isinstance(linear, NativeLinear)
            and layer.input_norm.factors is not None
            and layer.post_attention_norm.factors is not None
            for layer in layers
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
        )

    def run(
        self,
        hidden: Tensor,
        start: int,
        stop: int,
        cache: KeysAndValues,
        position: int,
        rotary: Tensor,
        capture: Callable[[int, Tensor], None] | None,
    ) -> Tensor:
        """`LayerSkipModel.run_layers`; rotary: complex64 [positions, 1, head_dim / 2], of all positions from 0 on.

        Raises ValueError, before anything is computed, if an argument does not fit the others: C would read and write beyond.
        """
        keys, values = cache.keys, cache.values
        check_rows("hidden", hidden, self._hidden_size)
        memory = self.check(hidden.shape[0], start, stop, keys, values, rotary, position)
        if start == stop:
            return hidden
        first = 4 * start * memory.layer_stride
        where = Cache(keys.data_ptr() + first, values.data_ptr() + first, memory.layer_stride, memory.head_stride)
        hidden = hidden.contiguous()
        rows, size = hidden.shape
        count = stop - start
        outputs = hidden.new_empty(1 if capture is None else count, rows, size)
        threads = num_threads()
        for done, piece in pieces(rows):
            scratch = self._scratch_for(piece)
            job = self._library.run(
                self._shape,
                self.first + start * sizeof(Layer),
                count,
                where,
                hidden.data_ptr() + 4 * done * size,
                piece,
                position + done,
                rotary.data_ptr() + 4 * (position + done) * self._head_dim,
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

    def check(
        self, rows: int, start: int, stop: int, keys: Tensor, values: Tensor, rotary: Tensor, position: int
    ) -> Memory:
        """What is known of this memory. Raises ValueError if the arguments of a pass do not fit each other."""
        memory = self._memory_of(keys, values, rotary)
        if not 0 <= start <= stop <= min(len(self._layers), memory.layers):
            raise ValueError(f"layers [{start}, {stop}) are not among {len(self._layers)}, cached {memory.layers}")
        if position < 0 or position + rows > memory.positions:
            raise ValueError(
                f"{rows} rows from position {position} on do not fit into a cache of {memory.positions} positions"
            )
        if position + rows > memory.rotary_positions:
            raise ValueError(
                f"{rows} rows from position {position} on are behind the rotary table's {memory.rotary_positions} positions"
            )
        return memory

    def _memory_of(self, keys: Tensor, values: Tensor, rotary: Tensor) -> Memory:
        """What is known of a cache and a rotary table, checked if they are not the ones of the last call."""
        known = self._memory
        if known is None or known.keys() is not keys or known.values() is not values or known.rotary() is not rotary:
            known = self._memory = Memory.checked(keys, values, rotary, self._kv_heads, self._head_dim)
        return known

    def _scratch_for(self, rows: int) -> Tensor:
        """Memory for one call, this thread's own; it grows with the number of rows."""
        size = self._library.scratch_size(self._shape, self.first, rows)
        held: Tensor | None = getattr(self._scratch, "memory", None)
        if held is None or held.numel() < size:
            held = self._scratch.memory = torch.empty(size, dtype=torch.float32)
        return held

    def new_scratch(self, rows: int) -> Tensor:
        """Memory for calls of so many rows at most."""
        size = self._library.scratch_size(self._shape, self.first, rows)
        return torch.empty(size, dtype=torch.float32, device="cpu")
