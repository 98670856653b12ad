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
published. Where groups are of neighbours, 4-bit numbers can stay in 4 bits (`in_four_bits`). Of a part of a matrix only its
own numbers are read, with the scales of all.

Sources: the README and the docstrings of vllm-project/compressed-tensors; AutoGPTQ's and GPTQModel's linears.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerskip_models.four_bits import FourBitWeight, Place, exact

WORD_BITS = 32
_LAYOUTS = {  # the tensor that a layout is known by, before the names of all its tensors; looked for in this order
    "weight_packed": ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
    "weight_scale": ("weight", "weight_scale", "weight_zero_point"),
    "qweight": ("qweight", "qzeros", "scales", "g_idx"),
}
NUMBERS = ("weight_packed", "weight", "qweight")
"""The tensor of each layout that holds the numbers; the others are small beside it."""
Stored = Mapping[str, Any]
"""A module's tensors by their names within it. That of `NUMBERS` may be a slice of an open safetensors file instead."""
Cut = tuple[int, range] | None
"""Which part of a matrix is meant: a dimension and what is kept of it; None for all."""


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Unsigned numbers of 4 or 8 bits out of int32 words, along the last dimension: [.., words] to int32 [.., count]."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    values = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return values.flatten(-2)[..., :count]


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What a module's tensors say: weight = (values - zeros) * scale.

    shape: (out, in) of the matrix. place: of the part of it that values are of. values: integers, unsigned if `bits` are
    given. scale, zeros: of the whole matrix, [out, groups], [out] or of one number; without zeros these are 2^(bits - 1), or
    0 for signed values. groups: int [in], the group of each input; None for groups of neighbours.
    """

    shape: tuple[int, int]
    place: Place
    values: Tensor
    scale: Tensor
    zeros: Tensor | None
    groups: Tensor | None
    bits: int | None = None


def dequantise(parts: Stored, *, first_version: bool = True, cut: Cut = None) -> Tensor:
    """The weight that a module's tensors stand for, float32 [out, in], or the part of it that is asked for.

    parts: of one of the three layouts. first_version: of GPTQ, whose zero points are then stored with 1 subtracted.
    Raises ValueError for tensors that do not fit together, such as other numbers of bits than 4 and 8, and for a part that
    is not there.
    """
    found = _numbers(parts, first_version, cut)
    values, (rows, columns), place = found.values, found.shape, found.place
    if found.zeros is None and found.bits is not None:
        values = values - 2 ** (found.bits - 1)
    scale = _rows(found.scale.float(), rows)
    zeros = None if found.zeros is None else _rows(found.zeros.float(), rows)
    groups, count = found.groups, scale.shape[1]
    if groups is None and columns % count:
        raise ValueError(f"{columns} inputs are no multiple of {count} groups")
    if groups is not None and int(groups.max()) >= count:
        raise ValueError(f"an input is of group {int(groups.max())}, but there are {count}")

    def of_part(numbers: Tensor) -> Tensor:
        """For each group, or each input, of the part."""
        own = place.of_rows(numbers)
        if groups is None:
            return place.of_groups(own, columns)
        return own[:, groups[place.columns.start : place.columns.stop].long()]

    return _scaled(values, of_part(scale), None if zeros is None else of_part(zeros))


def in_four_bits(parts: Stored, *, first_version: bool = True, cut: Cut = None) -> FourBitWeight | None:
    """The same numbers in 4 bits; None where the matrix cannot be kept so, and then none of its parts.

    That is where they have 8 bits, groups of other inputs than neighbours or of a number that is no multiple of 32, scales of
    32 bits for groups, or rows of other than a multiple of 64.
    Raises as `dequantise`, and ValueError for a part that is not cut at multiples of 64 inputs.
    """
    found = _numbers(parts, first_version, cut)
    rows, columns = found.shape
    scale = _rows(found.scale, rows)
    count = scale.shape[1]
    if found.bits != 4 or columns % count:
        return None
    if found.groups is not None:
        neighbours = torch.arange(columns, device=found.groups.device) // (columns // count)
        if not torch.equal(found.groups.long(), neighbours):
            return None
    zeros = None if found.zeros is None else _rows(found.zeros, rows)
    return exact(found.values, scale, zeros, whole=(columns, found.place))


def _numbers(parts: Stored, first_version: bool, cut: Cut) -> _Numbers:
    if "weight_packed" in parts:
        return _packed(parts, cut)
    if "qweight" in parts:
        return _gptq(parts, first_version, cut)
    rows, columns = _shape(parts["weight"])
    place = _place(cut, rows, columns)
    values = parts["weight"][_slice(place.rows), _slice(place.columns)]
    if values.dtype != torch.int8:
        raise ValueError(f"weight is of {values.dtype}; weights of 8-bit integers are read")
    return _Numbers((rows, columns), place, values, parts["weight_scale"], parts.get("weight_zero_point"), None)


def _packed(parts: Stored, cut: Cut) -> _Numbers:
    words = parts["weight_packed"]
    rows, columns = (int(size) for size in parts["weight_shape"])
    bits = _bits(_shape(words)[1], columns)
    place = _place(cut, rows, columns)
    within, there = _words(place.columns, bits)
    values = unpack(words[_slice(place.rows), within], bits, columns)[:, there]
    stored = parts.get("weight_zero_point")
    zeros = None if stored is None else unpack(stored.t(), bits, rows).t()  # both have the same 2^(bits-1) added
    groups = _in_order(parts.get("weight_g_idx"))
    return _Numbers((rows, columns), place, values, parts["weight_scale"], zeros, groups, bits)


def _gptq(parts: Stored, first_version: bool, cut: Cut) -> _Numbers:
    words, groups = parts["qweight"], parts.get("g_idx")
    num_words, rows = _shape(words)
    per_word = -(-rows // parts["qzeros"].shape[1])
    bits, columns = WORD_BITS // per_word, num_words * per_word
    if bits not in (4, 8) or (groups is not None and len(groups) != columns):
        raise ValueError(f"qweight has a shape of neither 4 nor 8 bits, {[num_words, rows]}")
    place = _place(cut, rows, columns)
    within, there = _words(place.columns, bits)
    values = unpack(words[within, _slice(place.rows)].t(), bits, columns)[:, there]
    zeros = unpack(parts["qzeros"], bits, rows)
    if first_version:
        zeros = (zeros + 1) & (2**bits - 1)
    return _Numbers((rows, columns), place, values, parts["scales"].t(), zeros.t(), _in_order(groups), bits)


def _shape(stored: Any) -> list[int]:
    """Of a tensor, or of a safetensors slice."""
    return [*stored.shape] if isinstance(stored, Tensor) else stored.get_shape()


def _slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop)


def _place(cut: Cut, rows: int, columns: int) -> Place:
    """Raises ValueError for a part that reaches beyond the matrix."""
    kept = [range(rows), range(columns)]
    if cut is not None:
        dim, part = cut
        if part.stop > kept[dim].stop:
            raise ValueError(f"its shape is {[rows, columns]}, which config.json does not fit")
        kept[dim] = part
    return Place(*kept)


def _words(columns: range, bits: int) -> tuple[slice, slice]:
    """The words that hold these inputs, and where these are among the numbers of those words."""
    per_word = WORD_BITS // bits
    first = columns.start // per_word
    skipped = columns.start - first * per_word
    return slice(first, -(-columns.stop // per_word)), slice(skipped, skipped + len(columns))


def _in_order(groups: Tensor | None) -> Tensor | None:
    """The group of each input; None if there is none, or -1 among them, for groups of neighbours."""
    return None if groups is None or bool((groups < 0).any()) else groups


def _bits(words: int, columns: int) -> int:
    found = [bits for bits in (4, 8) if words == -(-columns * bits // WORD_BITS)]
    if not found:
        raise ValueError(f"{columns} inputs in {words} words are neither of 4 nor of 8 bits")
    return found[0]


def _scaled(values: Tensor, scale: Tensor, zeros: Tensor | None) -> Tensor:
    """(values - zeros) * scale, float32. values: integers [out, in]; scale, zeros: [out, groups of neighbours]."""
    result = values.float().contiguous().view(len(values), scale.shape[1], -1)
    if zeros is not None:
        result.sub_(zeros.unsqueeze(-1))
    return result.mul_(scale.unsqueeze(-1)).view(values.shape)


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
