"""Weights that others quantised, as the two published layouts store them, and what they stand for in float32.

Every linear of such a checkpoint is several tensors instead of one `weight`. What is read is decided by the tensors that are
there, module by module, not by the names of a family's modules: bits and groups follow from the shapes.

compressed-tensors, "pack-quantized": `weight_packed` int32 [out, ceil(in / values per int32)], the first value in the lowest
bits and each stored with 2^(bits-1) added; `weight_scale` [out, groups]; `weight_shape` [2]; of asymmetric weights
`weight_zero_point` int32 [ceil(out / values per int32), groups], packed the same way along the outputs; `weight_g_idx`
int32 [in], the group of every input, where the groups were reordered.
compressed-tensors, "int-quantized": `weight` int8 [out, in], `weight_scale` and `weight_zero_point` [out, groups].
GPTQ: `qweight` int32 [in / values per int32, out], packed along the inputs; `qzeros` int32 [groups, out / values per int32],
in the first version of the format with 1 subtracted; `scales` [groups, out]; `g_idx` int32 [in].

In all of them weight = (q - zero) * scale. The product is made in float32, where it is exact for the 16-bit scales that are
published. Where groups are of neighbours, 4-bit numbers can stay in 4 bits (`in_four_bits`).

Sources: the README and the docstrings of vllm-project/compressed-tensors; AutoGPTQ's and GPTQModel's linears.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from layerskip_models.four_bits import FourBitWeight, exact

WORD_BITS = 32
_LAYOUTS = {  # the tensor that a layout is known by, before the names of all its tensors; looked for in this order
    "weight_packed": ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
    "weight_scale": ("weight", "weight_scale", "weight_zero_point"),
    "qweight": ("qweight", "qzeros", "scales", "g_idx"),
}


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Unsigned numbers of 4 or 8 bits out of int32 words, along the last dimension: [.., words] to int32 [.., count]."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    values = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return values.flatten(-2)[..., :count]


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What a module's tensors say: weight = (values - zeros) * scale.

    values: integers [out, in], unsigned if `bits` are given. scale, zeros: [out, groups], [out] or of one number; without
    zeros these are 2^(bits - 1), or 0 for signed values. groups: int [in], the group of each input; None, or -1 in it, for
    groups of neighbours.
    """

    values: Tensor
    scale: Tensor
    zeros: Tensor | None
    groups: Tensor | None
    bits: int | None = None


def dequantise(parts: Mapping[str, Tensor], *, first_version: bool = True) -> Tensor:
    """The weight that a module's tensors stand for, float32 [out, in].

    parts: by their names within the module, of one of the three layouts. first_version: of GPTQ, whose zero points are then
    stored with 1 subtracted.
    Raises ValueError for tensors that do not fit together, such as other numbers of bits than 4 and 8.
    """
    found = _numbers(parts, first_version)
    values = found.values
    if found.zeros is None and found.bits is not None:
        values = values - 2 ** (found.bits - 1)
    return _scaled(values, found.scale, found.zeros, found.groups)


def in_four_bits(parts: Mapping[str, Tensor], *, first_version: bool = True) -> FourBitWeight | None:
    """The same numbers in 4 bits; None where they cannot be kept so.

    That is where they have 8 bits, groups of other inputs than neighbours or of a number that is no multiple of 32, scales of
    32 bits for groups, or rows of other than a multiple of 64.
    Raises as `dequantise`.
    """
    found = _numbers(parts, first_version)
    rows, columns = found.values.shape
    scale = _rows(found.scale, rows)
    count = scale.shape[1]
    if found.bits != 4 or columns % count:
        return None
    if found.groups is not None and not bool((found.groups < 0).any()):
        neighbours = torch.arange(columns, device=found.groups.device) // (columns // count)
        if not torch.equal(found.groups.long(), neighbours):
            return None
    return exact(found.values, scale, None if found.zeros is None else _rows(found.zeros, rows))


def _numbers(parts: Mapping[str, Tensor], first_version: bool) -> _Numbers:
    if "weight_packed" in parts:
        return _packed(parts)
    if "qweight" in parts:
        return _gptq(parts, first_version)
    if parts["weight"].dtype != torch.int8:
        raise ValueError(f"weight is of {parts['weight'].dtype}; weights of 8-bit integers are read")
    return _Numbers(parts["weight"], parts["weight_scale"], parts.get("weight_zero_point"), None)


def _packed(parts: Mapping[str, Tensor]) -> _Numbers:
    words = parts["weight_packed"]
    rows, columns = (int(size) for size in parts["weight_shape"])
    bits = _bits(words.shape[1], columns)
    stored = parts.get("weight_zero_point")
    zeros = None if stored is None else unpack(stored.t(), bits, rows).t()  # both have the same 2^(bits-1) added
    return _Numbers(unpack(words, bits, columns), parts["weight_scale"], zeros, parts.get("weight_g_idx"), bits)


def _gptq(parts: Mapping[str, Tensor], first_version: bool) -> _Numbers:
    words, groups = parts["qweight"], parts.get("g_idx")
    rows = words.shape[1]
    per_word = -(-rows // parts["qzeros"].shape[1])
    bits = WORD_BITS // per_word
    if bits not in (4, 8) or (groups is not None and len(groups) != words.shape[0] * per_word):
        raise ValueError(f"qweight has a shape of neither 4 nor 8 bits, {list(words.shape)}")
    zeros = unpack(parts["qzeros"], bits, rows)
    if first_version:
        zeros = (zeros + 1) & (2**bits - 1)
    return _Numbers(unpack(words.t(), bits, words.shape[0] * per_word), parts["scales"].t(), zeros.t(), groups, bits)


def _bits(words: int, columns: int) -> int:
    found = [bits for bits in (4, 8) if words == -(-columns * bits // WORD_BITS)]
    if not found:
        raise ValueError(f"{columns} inputs in {words} words are neither of 4 nor of 8 bits")
    return found[0]


def _scaled(values: Tensor, scale: Tensor, zeros: Tensor | None, groups: Tensor | None) -> Tensor:
    """(values - zeros) * scale. values: integers [out, in]; scale, zeros: [out, groups], [out] or of one number.

    groups: int [in], the group of each input; None, or -1 in it, for groups of neighbours.
    """
    rows, columns = values.shape
    result = values.float().contiguous()
    scale = _rows(scale.float(), rows)
    zeros = None if zeros is None else _rows(zeros.float(), rows)
    count = scale.shape[1]
    if groups is not None and not bool((groups < 0).any()):
        if int(groups.max()) >= count:
            raise ValueError(f"an input is of group {int(groups.max())}, but there are {count}")
        scale = scale[:, groups.long()]
        zeros = None if zeros is None else zeros[:, groups.long()]
    elif columns % count:
        raise ValueError(f"{columns} inputs are no multiple of {count} groups")
    else:
        result = result.view(rows, count, columns // count)
        scale = scale.unsqueeze(-1)
        zeros = None if zeros is None else zeros.unsqueeze(-1)
    if zeros is not None:
        result.sub_(zeros)
    return result.mul_(scale).view(rows, columns)


def _rows(numbers: Tensor, rows: int) -> Tensor:
    """Scales or zero points as [out, groups]."""
    return numbers.reshape(-1, 1).expand(rows, 1) if numbers.numel() == 1 else numbers.reshape(rows, -1)


def modules_of(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The modules that are stored quantised, each with those of its tensors that are there.

    names: of all tensors of a checkpoint.
    """
    there = set(names)
    found: dict[str, tuple[str, ...]] = {}
    for mark, parts in _LAYOUTS.items():
        for module in sorted(name.removesuffix(f".{mark}") for name in there if name.endswith(f".{mark}")):
            found.setdefault(module, tuple(part for part in parts if f"{module}.{part}" in there))
    return found
