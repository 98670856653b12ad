"""The weights of one decoder layer, fused, and the protocol of the linears in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from layerskip_models.norm import RMSNorm


class Linear(Protocol):
    """y = x W^T + b over a few rows. num_bytes: size of the weight as it is stored."""

    num_bytes: int

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in]. Returns [rows, out]."""
        ...

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x W^T + b in a new tensor; residual: [rows, out], x: [rows, in]."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """The weights of one decoder layer: query, key and value in one matrix, gate and up in another.

    A norm that the family does not have is None. input_norm and post_attention_norm are applied to the inputs of attention
    and of the MLP, output_norm and down_norm to their outputs, before these are added to the residual. query_norm and
    key_norm normalise each head by itself, or all heads of a row together if they are as wide as all of them.
    sliding_window: number of positions a row attends to, itself included; None if it attends to all earlier ones.
    entry_norm: of a looped model's first layer, applied to the whole row before the layer, residual included, if the row has
    been through the layers before: it is the norm between loops. None where nothing is between them.
    rotated: whether queries and keys get the rotary embedding.
    interleaved: whether the rows of query and key are reordered within each head (`interleave_heads`), so that the two
    numbers of a rotary pair are neighbours and rotary multiplies complex numbers. The same for all layers of a model.
    """

    input_norm: RMSNorm | None
    qkv: Linear  # hidden -> (heads + 2 * kv_heads) * head_dim
    output: Linear  # heads * head_dim -> hidden
    post_attention_norm: RMSNorm | None
    gate_up: Linear  # hidden -> 2 * intermediate
    down: Linear  # intermediate -> hidden
    interleaved: bool
    output_norm: RMSNorm | None = None
    down_norm: RMSNorm | None = None
    query_norm: RMSNorm | None = None
    key_norm: RMSNorm | None = None
    sliding_window: int | None = None
    rotated: bool = True
    entry_norm: RMSNorm | None = None

    @property
    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """Its matrices, in the order in which a row meets them."""
        return self.qkv, self.output, self.gate_up, self.down

    def with_linears(self, change: Callable[[Linear], Linear]) -> DecoderLayer:
        """Return the same layer with other matrices, each made of its own."""
        qkv, output, gate_up, down = map(change, self.linears)
        return replace(self, qkv=qkv, output=output, gate_up=gate_up, down=down)


def interleave_heads(weight: Tensor, num_heads: int, rotated: int | None = None) -> Tensor:
    """Reorder the rows of a query or key projection so that rotary pairs (i, i + r/2) become (2i, 2i + 1).

    weight: [num_heads * d, ...]. rotated: r, how many of the first numbers of a head rotate; None if all d do. Queries and
    keys are permuted alike, so their products do not change, and rotary becomes one multiplication of complex numbers.
    """
    heads = weight.unflatten(0, (num_heads, -1))
    turning, still = heads[:, :rotated], heads[:, heads.shape[1] if rotated is None else rotated :]
    pairs = turning.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat([pairs, still], dim=1).reshape(weight.shape).contiguous()
