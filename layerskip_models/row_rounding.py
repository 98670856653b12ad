"""Rows rounded to bfloat16 before they meet weights that are kept in bfloat16: `arithmetic="bfloat16"`.

transformers and llama.cpp round rows, too, where a model is in bfloat16. Sums stay float32 here, and so do norms, rotary
positions, attention and the residual stream.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from layerskip_models.compact_linear import HalfLinear
from layerskip_models.decoder_layer import DecoderLayer, Linear
from layerskip_models.kernels.native_linear import NativeLinear
from layerskip_models.linear import PlainLinear
from layerskip_models.norm import RMSNorm

Arithmetic = Literal["float32", "bfloat16"]
"""Whether rows are rounded to bfloat16 before they meet a matrix ("bfloat16"), or stay what they are ("float32")."""
_MATRICES = ("qkv", "output", "gate_up", "down")
_NORMS = {"qkv": "input_norm", "gate_up": "post_attention_norm"}
"""The norm whose factors a matrix may have taken over (`RMSNorm.fold`)."""


def check_arithmetic(
    arithmetic: str, dtype: str | torch.dtype = "auto", device: torch.device | None = None
) -> Arithmetic:
    """Return what is asked for. Raises ValueError for another name, and for weights or a device that it is not for.

    dtype, device: as far as they are known before anything is loaded.
    """
    if arithmetic not in get_args(Arithmetic):
        raise ValueError(f"arithmetic must be {' or '.join(get_args(Arithmetic))}, got {arithmetic!r}")
    if arithmetic == "bfloat16":
        if device is not None and device.type != "cpu":
            raise ValueError(
                f"arithmetic='bfloat16' is for CPUs, and on {device.type} dtype='bfloat16' rounds all arithmetic already: "
                "leave out arithmetic"
            )
        if str(dtype).removeprefix("torch.") in ("float16", "float64", "int8", "int4"):
            raise _other_weights(f"dtype={str(dtype).removeprefix('torch.')!r}")
    return cast(Arithmetic, arithmetic)


def _other_weights(found: str) -> ValueError:
    return ValueError(
        f"arithmetic='bfloat16' needs weights kept in bfloat16, not {found}: load the model with dtype='bfloat16', "
        "or leave out arithmetic"
    )


def to_bfloat16(x: Tensor) -> Tensor:
    """The numbers rounded to bfloat16, to nearest and ties to even, in their own dtype."""
    return x.bfloat16().to(x.dtype)


class RowRounding:
    """A linear on PyTorch's operators whose rows are rounded to bfloat16 first. inner: the linear itself."""

    def __init__(self, inner: PlainLinear | HalfLinear) -> None:
        self.inner = inner
        self.num_bytes = inner.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in]. Returns [rows, out]."""
        return self.inner(to_bfloat16(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x W^T + b."""
        return self.inner.add_to(residual, to_bfloat16(x))


def without_rounding(linear: Linear) -> Linear:
    """The linear that takes rows as they are."""
    if isinstance(linear, RowRounding):
        return linear.inner
    if isinstance(linear, NativeLinear) and linear.rounds_rows:
        return linear.rounding_rows(False)
    return linear


def with_rounding(linear: Linear, name: str) -> Linear:
    """A linear with the same weights that rounds its rows first.

    name: of the matrix, for the message. Raises ValueError unless its weights are kept in bfloat16.
    """
    if isinstance(linear, NativeLinear):
        if linear.stored.dtype != torch.bfloat16:
            raise _other_weights(f"in {linear.stored.dtype} as {name}".replace("torch.", ""))
        return linear.rounding_rows(True)
    if not isinstance(linear, (PlainLinear, HalfLinear)):
        raise _other_weights(f"in few bits as {name}")
    weight = linear.weight
    if not torch.equal(to_bfloat16(weight), weight):
        raise _other_weights(f"in {weight.dtype} as {name}".replace("torch.", ""))
    return RowRounding(linear)


def layer_without_rounding(layer: DecoderLayer) -> DecoderLayer:
    """The layer whose matrices take rows as they are."""
    changed: dict[str, Any] = {name: without_rounding(getattr(layer, name)) for name in _MATRICES}
    return replace(layer, **changed)


def layer_with_rounding(layer: DecoderLayer, index: int) -> DecoderLayer:
    """The layer with its rows rounded. index: its number. Raises as `with_rounding`."""
    changed: dict[str, Any] = {}
    for name in _MATRICES:
        linear: Linear = getattr(layer, name)
        norm: RMSNorm | None = getattr(layer, _NORMS[name]) if name in _NORMS else None
        if norm is not None and norm.folded is not None and isinstance(linear, PlainLinear):
            linear = PlainLinear(_unfolded(linear.weight, norm.folded), linear.bias)
            changed[_NORMS[name]] = norm.unfolded()
        changed[name] = with_rounding(linear, f"{name} of layer {index}")
    return replace(layer, **changed)


def _unfolded(weight: Tensor, factors: Tensor) -> Tensor:
    """The matrix before the norm's factors were multiplied into it, if it was one of bfloat16 numbers; else as it is.

    Dividing errs in the last bits of float32, which rounding to bfloat16 takes away. Where a factor is 0, any number will do.
    """
    own = to_bfloat16(torch.where(factors == 0, torch.zeros_like(weight), weight / factors))
    return own if torch.equal(own * factors, weight) else weight / factors
