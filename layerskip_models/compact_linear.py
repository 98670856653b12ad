"""Linears whose weights take fewer bytes than the dtype they compute in: 16 bits without loss, 8 and 4 bits with some.

At batch 1 reading the weights is what a pass costs, so half the bytes are nearly half the time; and FBGEMM, whose kernels
these are (PyTorch's public `torch.ops.quantized`, x86 processors only), takes about as long for nine rows as for one, which
is what verification needs. Both fall away where the build lacks them (`half_works`, `int8_works`). It has no kernel for our
4 bits: these are converted piece by piece, which saves memory and no time.
"""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip_models.grouped_weight import GroupedWeight

_CONVERTED = 1 << 21  # numbers of a weight in groups that are float32 at a time
_HALF_EXPONENT = 15  # largest power of two that a float16 holds is 2^15


def _exponent_to_half(weight: Tensor) -> int | None:
    """k such that weight * 2^k is the same numbers in float16, all of them, or None."""
    peak = float(weight.detach().abs().max())
    if not 0 < peak < float("inf"):
        return 0 if peak == 0 else None
    exponent = _HALF_EXPONENT - int(torch.frexp(torch.tensor(peak, dtype=torch.float64, device="cpu")).exponent)
    for shift in (0, exponent):
        scaled = weight.float() * 2.0**shift
        if torch.equal(scaled.half().float(), scaled):
            return shift
    return None


def fits_half(weight: Tensor) -> bool:
    """Whether float16, times a power of two for all of the weight, holds it exactly.

    True of nearly every weight that was stored in bfloat16, whose mantissa is shorter; a checkpoint in bfloat16 that is run
    in float32 (the default on a CPU) then needs half the memory and gives float32's results.
    """
    return _exponent_to_half(weight) is not None


class HalfLinear:
    """x W^T + b with W kept in float16, without loss, and all arithmetic in float32. See `fits_half`.

    Raises ValueError for a weight that float16 cannot hold.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        shift = _exponent_to_half(weight)
        if shift is None:
            raise ValueError("this weight does not fit into float16 without loss")
        self._scale = 2.0**-shift
        scaled_bias = None if bias is None else bias.float() * 2.0**shift
        self._weight = torch.ops.quantized.linear_prepack_fp16(weight.float() * 2.0**shift, scaled_bias)
        self._run = torch.ops.quantized.linear_dynamic_fp16.default
        self._factor = torch.tensor(self._scale, dtype=torch.float32, device="cpu")
        self._dtype = weight.dtype
        self.num_bytes = 2 * weight.numel()

    @property
    def weight(self) -> Tensor:
        """A copy of the weight, [out, in]."""
        weight: Tensor = torch.ops.quantized.linear_unpack_fp16(self._weight)[0]
        return weight.float().mul_(self._factor).to(self._dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in]. Returns [rows, out]."""
        product = self._run(x.float(), self._weight)
        return (product if self._scale == 1 else product.mul_(self._factor)).to(self._dtype)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x W^T + b, rounded once."""
        return torch.add(residual.float(), self._run(x.float(), self._weight), alpha=self._scale).to(self._dtype)


class Int8Linear:
    """x W^T + b with W rounded to 8 bits, one scale per output, and each row of x to 8 bits, one scale per row.

    The products are summed as integers, hence exactly: a row's result does not depend on the other rows, so what
    drafts and what verifies agree as they do in float32. It is another model than the one with the full weights, though:
    "the model's own output" then means this one's. peaks: float32 [out], each output's largest magnitude, if the weight is
    a part of one with more inputs.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, peaks: Tensor | None = None) -> None:
        peaks = weight.float().abs().amax(dim=1) if peaks is None else peaks
        scales = peaks.clamp_min(torch.finfo(torch.float32).tiny) / 127
        # Two more inputs, whose weights are 0 and which are set to 1 and -1, pin the range that the kernel rounds within.
        wide = F.pad(weight.float(), (0, 2))
        with warnings.catch_warnings():  # PyTorch means to move these tensors to torchao: `int8_works` will say when
            warnings.filterwarnings("ignore", message="torch.quantize_per_tensor, torch.quantize_per_channel")
            zeros = torch.zeros(len(scales), dtype=torch.long)
            quantised = torch.quantize_per_channel(wide, scales.double(), zeros, 0, torch.qint8)
        self._weight = torch.ops.quantized.linear_prepack(quantised, None)
        self._run = torch.ops.quantized.linear_dynamic.default
        self._ends = torch.tensor([1.0, -1.0], dtype=torch.float32, device="cpu")
        self._tiny = torch.tensor(torch.finfo(torch.float32).tiny, dtype=torch.float32, device="cpu")
        self._bias = None if bias is None else bias.float()
        self._dtype = weight.dtype
        self.num_bytes = weight.numel() + 4 * len(scales)
        # Without VNNI the kernel adds two products in 16 bits, which a full 8-bit range would overflow.
        self._reduce_range = not getattr(torch.cpu, "_is_vnni_supported", bool)()

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in]. Returns [rows, out]."""
        return self._product(x).to(self._dtype)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x W^T + b, rounded once."""
        return self._product(x).add_(residual).to(self._dtype)

    def _product(self, x: Tensor) -> Tensor:
        rows, size = x.shape
        x = x.float()
        peak = torch.linalg.vector_norm(x, float("inf"), -1, True).clamp_min_(self._tiny)
        ranged = x.new_empty(rows, size + 2)
        torch.div(x, peak, out=ranged[:, :size])
        ranged[:, size:] = self._ends
        product = self._run(ranged, self._weight, self._reduce_range).mul_(peak)
        return product if self._bias is None else product.add_(self._bias)


class GroupedLinear:
    """x W^T + b with W in groups, by PyTorch's operators: a piece of W at a time is float32. x is float32 and not rounded."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None = None) -> None:
        self.numbers = weight
        self._bias = None if bias is None else bias.float()
        self.num_bytes = weight.num_bytes

    @property
    def weight(self) -> Tensor:
        """The weight in float32, [out, in]."""
        return self.numbers.values()

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in]. Returns [rows, out]."""
        return grouped_product(x, self.numbers, self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x W^T + b."""
        return self(x).add_(residual)


def grouped_product(x: Tensor, weight: GroupedWeight, bias: Tensor | None) -> Tensor:
    """x W^T + b by PyTorch's operators. x: float32 [rows, in]. Returns float32 [rows, out]."""
    outputs, inputs = weight.shape
    step = max(_CONVERTED // inputs, 1)
    y = x.new_empty(x.shape[0], outputs)
    for first in range(0, outputs, step):
        torch.mm(x, weight.values(first, first + step).t(), out=y[:, first : first + step])
    return y if bias is None else y.add_(bias)


def _works(kind: type[HalfLinear] | type[Int8Linear], device: torch.device, dtype: torch.dtype, bound: float) -> bool:
    """Whether this build of torch has the kernels and they compute what they should."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return False
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(24, 16, generator=generator).bfloat16().to(dtype)
    x = torch.randn(3, 16, generator=generator).to(dtype)
    try:
        result = kind(probe)(x)
    except (AttributeError, RuntimeError, TypeError):  # another processor, or a build without FBGEMM
        return False
    return torch.allclose(result.float(), F.linear(x, probe).float(), rtol=bound, atol=bound)


def half_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `HalfLinear` computes what `F.linear` does, here and in this dtype."""
    return _works(HalfLinear, device, dtype, 1e-5 if dtype == torch.float32 else 2e-2)


def int8_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `Int8Linear` computes nearly what `F.linear` does, here and in this dtype."""
    return _works(Int8Linear, device, dtype, 0.1)
