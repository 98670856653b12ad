"""The fastest linear for a weight's shape on this device: our own kernels where they run, else chosen by timing.

On a CPU four compete then: a product with the plain weight, with one whose columns are contiguous, oneDNN's with one that was
packed into the blocked layout its kernels read, and FBGEMM's with one kept in float16, where that loses nothing. Which one
wins depends on the processor, the shape and the number of rows (on one Xeon PyTorch's plain kernels beat its packed ones for
matrices under 5 MB; on one EPYC the packed ones won everywhere), so it is measured, not assumed.
The chosen layout replaces the plain weight: nothing is resident twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip_models.compact_linear import HalfLinear, Int8Linear, fits_half, half_works, int8_works
from layerskip_models.kernels.check import native_works
from layerskip_models.kernels.native_linear import NativeInt8Linear, NativeLinear

Layout = Literal["plain", "transposed", "packed", "half", "int8", "native"]
"""How a weight is stored: row major as in the checkpoint, column major, in oneDNN's blocked layout, in float16 without loss,
in 8 bits, which changes the model and is therefore never chosen by timing, or for our own kernels, without loss, too."""
COMPACT: frozenset[Layout] = frozenset({"half", "int8", "native"})
"""Layouts that need the weight as the checkpoint has it, without a norm's factors in it."""

_PACK_ROWS = 8  # row count the packed layout is laid out for; 4 to 16 measured alike
_TIMED_ROWS = (1, 5)  # a draft or autoregressive step, and a typical verification
_TIMED_BYTES = 64 << 20
_TURNS = 7
# Packing must win clearly: alone in a loop a packed kernel looks better than between a layer's other operations. With 1.05
# the demo's larger matrices were packed on a Xeon, and its autoregressive step took 6.6 ms instead of 4.3.
_HANDICAPS: dict[Layout, float] = {"plain": 1.03, "transposed": 1.0, "packed": 1.5, "half": 1.0}


class Linear(Protocol):
    """y = x W^T + b over a few rows. num_bytes: of the weight, as it is stored."""

    num_bytes: int

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in]. Returns [rows, out]."""
        ...

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x W^T + b in a new tensor; residual: [rows, out], x: [rows, in]."""
        ...


class PlainLinear:
    """What `F.linear` computes, without the operators that it goes through; residual or bias folded into the product."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.num_bytes = weight.numel() * weight.element_size()
        self._transposed = weight.t()

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in]. Returns [rows, out]."""
        if self.bias is None:
            return torch.mm(x, self._transposed)
        return torch.addmm(self.bias, x, self._transposed)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x W^T + b."""
        out = torch.addmm(residual, x, self._transposed)
        return out if self.bias is None else out.add_(self.bias)


class TransposedLinear(PlainLinear):
    """The same on a copy whose columns are contiguous: for few rows MKL streams it faster from memory."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight.t().contiguous().t(), bias)


class PackedLinear:
    """oneDNN's linear on a packed weight (the operators that inductor emits when it freezes a model)."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        self.bias = bias
        self.num_bytes = weight.numel() * weight.element_size()
        self._run = torch.ops.mkldnn._linear_pointwise.default
        self._run_binary = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in]. Returns [rows, out]."""
        return self._run(x, self.weight, self.bias, "none", [], "")

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x W^T + b."""
        return self._run_binary(x, residual, self.weight, self.bias, "add")


def int8_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """A weight in 8 bits: on our own kernels, which do not round inputs, or where there are none on FBGEMM's, which do."""
    native = native_works(weight.device, weight.dtype)
    return NativeInt8Linear(weight, bias) if native else Int8Linear(weight, bias)


LAYOUTS: dict[Layout, Callable[[Tensor, Tensor | None], Linear]] = {
    "plain": PlainLinear,
    "transposed": TransposedLinear,
    "packed": PackedLinear,
    "half": HalfLinear,
    "int8": int8_linear,
    "native": NativeLinear,
}


def packing_works(weight: Tensor) -> bool:
    """Whether this build of torch packs such a weight on this device, and computes with it what `F.linear` does."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(24, 16, generator=generator).to(weight.dtype)
    x = torch.randn(3, 16, generator=generator).to(weight.dtype)
    try:
        packed = PackedLinear(probe)(x)
    except (
        AttributeError,
        RuntimeError,
        TypeError,
    ):  # the operators are private: a build may lack or change them
        return False
    return torch.allclose(packed.float(), F.linear(x, probe).float(), rtol=2e-2, atol=2e-2)


def possible_layouts(weight: Tensor) -> tuple[Layout, ...]:
    """The layouts that give this weight's results here."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return ("plain",)
    layouts: list[Layout] = ["plain"]
    if weight.dtype == torch.float32:
        layouts.append("transposed")
    if packing_works(weight):
        layouts.append("packed")
    if half_works(weight.device, weight.dtype) and fits_half(weight):
        layouts.append("half")
    if native_works(weight.device, weight.dtype):
        layouts.append("native")
    return tuple(layouts)


def check_layout(layout: Layout, weight: Tensor) -> Layout:
    """Return a layout asked for by name. Raises ValueError if this device or build has no kernels for it in this dtype."""
    native = native_works(weight.device, weight.dtype)
    works = {"packed": packing_works(weight), "native": native}
    if layout in COMPACT:
        works["half"] = half_works(weight.device, weight.dtype)
        works["int8"] = native or int8_works(weight.device, weight.dtype)
    if not works.get(layout, True):
        needs = (
            "the native kernels, a CPU and float32"
            if layout == "native"
            else "an x86 CPU, a PyTorch build with its kernels, and float32 or bfloat16"
        )
        raise ValueError(
            f"layout {layout!r} needs {needs}; "
            f"this is {weight.device.type} and {str(weight.dtype).removeprefix('torch.')}"
        )
    return layout


def compact_layout(weight: Tensor) -> Layout:
    """The layout for a float32 weight that was stored in 16 bits, [out, in]: one that keeps it so, if there is one here.

    Our own kernels wherever they run, without timing: with them a row's result does not depend on the rows beside it.
    """
    layouts = possible_layouts(weight)
    return next((layout for layout in ("native", "half") if layout in layouts), "plain")


def fastest_layout(weight: Tensor) -> Layout:
    """The layout that is fastest for weights shaped like this one, [out, in], summed over `_TIMED_ROWS`.

    Copies of the weight are rotated through, since one alone might stay in a cache that the whole model outgrows, and the
    layouts take turns, since a machine's speed drifts. Takes milliseconds for small matrices and a fraction of a second for
    large ones.
    """
    candidates = possible_layouts(weight)
    if "native" in candidates:
        # Where it runs no other has come near. Timing could only be wrong: beside busy processes it was, and chose another.
        return "native"
    if len(candidates) == 1:
        return candidates[0]
    num_bytes = weight.numel() * weight.element_size()
    copies = [weight.clone() for _ in range(min(8, max(1, _TIMED_BYTES // num_bytes)))]
    calls = max(len(copies), min(24, int(2e8 // num_bytes)), 2)
    inputs = [torch.ones(rows, weight.shape[1], dtype=weight.dtype) for rows in _TIMED_ROWS]
    linears = {layout: [LAYOUTS[layout](copy, None) for copy in copies] for layout in candidates}
    turns: dict[Layout, list[float]] = {layout: [] for layout in linears}
    with torch.inference_mode():
        for _ in range(_TURNS):
            for layout, those in linears.items():
                turns[layout].append(sum(_seconds(those, x, calls) for x in inputs))
    return min(turns, key=lambda layout: median(turns[layout]) * _HANDICAPS[layout])


def _seconds(linears: Sequence[Linear], x: Tensor, calls: int) -> float:
    """Seconds per call, going round the linears."""
    start = time.perf_counter()
    for i in range(calls):
        linears[i % len(linears)](x)
    return (time.perf_counter() - start) / calls
