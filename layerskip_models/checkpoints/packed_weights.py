"""Weights that others quantised, as the two published layouts store them, and what they stand for in float32.

Every linear of such a checkpoint is several tensors instead of one `weight`. What is read is decided by the tensors that are
there, module by module, not by the names of a family's modules: bits and groups follow from shapes and types. What
config.json says (`schemes`) must agree with them; all else is refused.

compressed-tensors, "pack-quantized": `weight_packed` int32 [out, ceil(in / values per int32)], the first value in the lowest
bits and each stored with 2^(bits-1) added; `weight_scale` [out, groups]; `weight_shape` [2]; of asymmetric weights
`weight_zero_point` int32 [ceil(out / values per int32), groups], packed the same way along the outputs, or, as versions
before April 2025 wrote it, int8 [out, groups] without the 2^(bits-1); `weight_g_idx` int32 [in], the group of every input,
where the groups were reordered.
compressed-tensors, "int-quantized": `weight` int8 [out, in], `weight_scale` and `weight_zero_point` [out, groups], and
`weight_g_idx` as above.
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

from layerskip_models.checkpoints.schemes import NOTHING_SAID, Scheme
from layerskip_models.grouped_weight import GroupedWeight, exact

WORD_BITS = 32
_LAYOUTS = {  # the tensor that a layout is known by, before the names of all its tensors; looked for in this order
    "weight_packed": ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
    "weight_scale": ("weight", "weight_scale", "weight_zero_point", "weight_g_idx"),
    "qweight": ("qweight", "qzeros", "scales", "g_idx"),
}
Stored = Mapping[str, Tensor]
"""A module's tensors by their names within it."""
_SCALES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INDICES = (torch.int32, torch.int64)


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Unsigned numbers of 4 or 8 bits out of int32 words, along the last dimension: [.., words] to int32 [.., count]."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    values = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return values.flatten(-2)[..., :count]


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What a module's tensors say: weight = (values - zeros) * scale.

    values: integers [out, in], unsigned if `bits` are given. scale, zeros: [out, groups]; without zeros these are
    2^(bits - 1), or 0 for signed values. groups: int [in], the group of each input; None for equal groups of neighbours.
    """

    values: Tensor
    scale: Tensor
    zeros: Tensor | None
    groups: Tensor | None
    bits: int | None = None


def dequantise(parts: Stored, *, scheme: Scheme = NOTHING_SAID) -> Tensor:
    """Compute the weight that a module's tensors stand for, float32 [out, in].

    parts: of one of the three layouts. scheme: what is said of them.
    Raises ValueError for tensors that do not fit together or are not what is said, such as other numbers of bits than 4 and
    8.
    """
    found = _numbers(parts, scheme)

    def spread(numbers: Tensor) -> Tensor:
        """For each group of neighbours, or each input: float32 [out, groups, 1]."""
        wide = numbers.float()
        return (wide if found.groups is None else wide[:, found.groups.long()]).unsqueeze(2)

    scale = spread(found.scale)
    result = found.values.float().unflatten(1, (scale.shape[1], -1))
    if found.zeros is not None:
        result.sub_(spread(found.zeros))
    elif found.bits is not None:
        result.sub_(2 ** (found.bits - 1))
    return result.mul_(scale).flatten(1)


def in_four_bits(parts: Stored, *, scheme: Scheme = NOTHING_SAID) -> GroupedWeight | None:
    """Return the same numbers in 4 bits, or None where the matrix cannot be kept so.

    That is where they have 8 bits, groups of other inputs than neighbours or of a number that is no multiple of 32, scales of
    32 bits for groups, or rows of other than a multiple of 64. Raises as `dequantise`.
    """
    found = _numbers(parts, scheme)
    columns, count = found.values.shape[1], found.scale.shape[1]
    if found.bits != 4 or columns % count:
        return None
    if found.groups is not None:
        neighbours = torch.arange(columns, device=found.groups.device) // (columns // count)
        if not torch.equal(found.groups.long(), neighbours):
            return None
    return exact(found.values, found.scale, found.zeros)


def _numbers(parts: Stored, scheme: Scheme) -> _Numbers:
    read = _packed if "weight_packed" in parts else _gptq if "qweight" in parts else _integers
    return read(parts, scheme)


def _integers(parts: Stored, scheme: Scheme) -> _Numbers:
    values = _part(parts, "weight")
    rows, columns = _matrix(values, "weight")
    _check_shape(rows, columns, scheme)
    if values.dtype != torch.int8:
        raise ValueError(f"weight is of {values.dtype}; weights of 8-bit integers are read")
    scale = _scale(parts, "weight_scale", rows, columns, scheme)
    zeros = _stored_zeros(parts, scheme)
    if zeros is not None:
        zeros = _zeros(zeros, parts["weight_scale"], scale, 0, 128)
    groups = _groups(parts, "weight_g_idx", columns, scale.shape[1], scheme)
    return _Numbers(values, scale, zeros, groups)


def _packed(parts: Stored, scheme: Scheme) -> _Numbers:
    words, shape = _part(parts, "weight_packed"), _part(parts, "weight_shape")
    if shape.dtype not in _INDICES or shape.numel() != 2:
        raise ValueError(f"weight_shape is {list(shape.shape)} of {shape.dtype}; two integers are meant")
    rows, columns = (int(size) for size in shape)
    stored_rows, num_words = _matrix(words, "weight_packed")
    if rows != stored_rows or columns < 1:
        raise ValueError(f"weight_packed has {stored_rows} outputs, and weight_shape is {[rows, columns]}")
    bits = _bits(num_words, columns, scheme)
    _check_shape(rows, columns, scheme)
    values = unpack(_of_words(words, "weight_packed"), bits, columns)
    scale = _scale(parts, "weight_scale", rows, columns, scheme)
    zeros, middle = _stored_zeros(parts, scheme), 2 ** (bits - 1)
    if zeros is not None and zeros.dtype == torch.int8:
        zeros = _zeros(zeros, parts["weight_scale"], scale, middle, middle)
    elif zeros is not None:
        packed = [-(-rows * bits // WORD_BITS), scale.shape[1]]
        if [*zeros.shape] != packed:
            raise ValueError(f"weight_zero_point has shape {[*zeros.shape]} of {zeros.dtype}, {packed} is meant")
        zeros = unpack(_of_words(zeros, "weight_zero_point").t(), bits, rows).t()  # both have the same 2^(bits-1) added
    groups = _groups(parts, "weight_g_idx", columns, scale.shape[1], scheme)
    return _Numbers(values, scale, zeros, groups, bits)


def _gptq(parts: Stored, scheme: Scheme) -> _Numbers:
    words, stored = _part(parts, "qweight"), _of_words(_part(parts, "qzeros"), "qzeros")
    num_words, rows = _matrix(words, "qweight")
    fits = [bits for bits in (4, 8) if stored.dim() == 2 and stored.shape[1] == -(-rows * bits // WORD_BITS)]
    bits = scheme.bits if scheme.bits in fits else fits[0] if fits and scheme.bits is None else 0
    columns = num_words * WORD_BITS // bits if bits else 0
    if not bits or ("g_idx" in parts and len(parts["g_idx"]) != columns):
        said = "neither 4 nor 8" if scheme.bits is None else f"not {scheme.bits}"
        raise ValueError(f"qweight has a shape of {said} bits, {[num_words, rows]}")
    _check_shape(rows, columns, scheme)
    values = unpack(_of_words(words, "qweight").t(), bits, columns)
    scale = _scale({**parts, "scales": _part(parts, "scales").t()}, "scales", rows, columns, scheme)
    if len(stored) != scale.shape[1]:
        raise ValueError(f"qzeros has {len(stored)} groups, and scales has {scale.shape[1]}")
    zeros = unpack(stored, bits, rows)
    if scheme.first_version:
        zeros = (zeros + 1) & (2**bits - 1)
    groups = _groups(parts, "g_idx", columns, scale.shape[1], scheme)
    return _Numbers(values, scale, zeros.t(), groups, bits)


def _part(parts: Stored, name: str) -> Tensor:
    """One of a module's tensors. ValueError if the file lacks it."""
    if name not in parts:
        raise ValueError(f"{name} is missing")
    return parts[name]


def _matrix(stored: Tensor, name: str) -> tuple[int, int]:
    """Return the shape of what must be a matrix."""
    shape = [*stored.shape]
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"{name} has shape {shape}, which is no matrix")
    return shape[0], shape[1]


def _of_words(words: Tensor, name: str) -> Tensor:
    if words.dtype != torch.int32:
        raise ValueError(f"{name} is of {words.dtype}; words of int32 are read")
    return words


def _scale(parts: Stored, name: str, rows: int, columns: int, scheme: Scheme) -> Tensor:
    """Return the scales as [out, groups].

    Raises ValueError for other shapes, such as those of blocks of a matrix, other types, and another number of groups than is
    said.
    """
    scale: Tensor = _part(parts, name)
    if scale.dtype not in _SCALES:
        raise ValueError(f"{name} is of {scale.dtype}; scales of {', '.join(map(str, _SCALES[:3]))} are read")
    if scale.numel() == 1 and scheme.strategy in (None, "tensor"):
        return scale.reshape(1, 1).expand(rows, 1)
    found = scale.unsqueeze(1) if scale.dim() == 1 else scale
    count, said = found.shape[-1], scheme.num_groups(columns)
    if scheme.strategy == "tensor" or found.dim() != 2 or found.shape[0] != rows or not 1 <= count <= columns:
        meant = "one number is" if scheme.strategy == "tensor" else f"{rows} outputs and their groups are"
        raise ValueError(f"{name} has shape {[*scale.shape]}, where {meant} meant")
    if count != (count if said is None else said):
        raise ValueError(f"{name} has {count} groups of {columns} inputs, and config.json says {said}")
    return found


def _stored_zeros(parts: Stored, scheme: Scheme) -> Tensor | None:
    """As compressed-tensors stores them. ValueError if they are said to be there and are not."""
    return _part(parts, "weight_zero_point") if scheme.has_zeros else parts.get("weight_zero_point")


def _zeros(stored: Tensor, stored_scale: Tensor, scale: Tensor, middle: int, largest: int) -> Tensor:
    """Zero points that are not packed, as [out, groups]. middle: what is added. largest: of their absolute numbers."""
    if stored.dtype != torch.int8 or stored.shape != stored_scale.shape:
        raise ValueError(
            f"weight_zero_point has shape {[*stored.shape]} of {stored.dtype}, {[*stored_scale.shape]} of int8 is meant"
        )
    numbers = stored.int()
    if bool((numbers < -largest).any()) or bool((numbers >= largest).any()):
        raise ValueError(f"weight_zero_point holds numbers beyond {-largest} to {largest - 1}")
    moved = numbers + middle
    return moved.reshape(1, 1).expand_as(scale) if moved.numel() == 1 else moved.reshape(scale.shape)


def _groups(parts: Stored, name: str, columns: int, count: int, scheme: Scheme) -> Tensor | None:
    """Return the group of each input, int [in]; None for equal groups of neighbours.

    -1 everywhere means groups of neighbours, too. Raises ValueError for groups that there are not, and where nothing says
    which inputs they have.
    """
    groups = parts.get(name)
    if groups is not None:
        if groups.dtype not in _INDICES or [*groups.shape] != [columns]:
            raise ValueError(f"{name} has shape {[*groups.shape]} of {groups.dtype}, {[columns]} of int32 is meant")
        if not bool((groups == -1).all()):
            if int(groups.min()) < 0 or int(groups.max()) >= count:
                raise ValueError(
                    f"an input is of group {int(groups.max())} or {int(groups.min())}, but there are {count}"
                )
            return groups
    if scheme.reordered and count > 1 and groups is None:
        raise ValueError(f"config.json says that groups were reordered, but {name} is missing")
    size = scheme.group_size
    if size is not None and count > 1 and columns != count * size:
        if "qweight" not in parts:  # compressed-tensors knows no such groups
            raise ValueError(f"config.json says groups of {size}, and {columns} inputs are no multiple of it")
        return torch.arange(columns) // size  # the last group is not full
    if columns % count:
        raise ValueError(f"{columns} inputs are no multiple of {count} groups")
    return None


def _check_shape(rows: int, columns: int, scheme: Scheme) -> None:
    """Raise ValueError for another shape than is said."""
    if scheme.shape not in (None, (rows, columns)):
        raise ValueError(f"it has another shape, {[rows, columns]}, which config.json does not fit")


def _bits(words: int, columns: int, scheme: Scheme) -> int:
    found = [bits for bits in (4, 8) if words == -(-columns * bits // WORD_BITS)]
    if not found:
        raise ValueError(f"{columns} inputs in {words} words are neither of 4 nor of 8 bits")
    if scheme.bits is not None and scheme.bits not in found:
        raise ValueError(
            f"{columns} inputs in {words} words are of {found[0]} bits, and config.json says {scheme.bits}"
        )
    return scheme.bits or found[0]


def modules_of(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Find the modules that are stored quantised, each with those of its tensors that are there.

    names: of all tensors of a checkpoint.
    """
    there = set(names)
    found: dict[str, tuple[str, ...]] = {}
    for mark, parts in _LAYOUTS.items():
        for module in sorted(name.removesuffix(f".{mark}") for name in there if name.endswith(f".{mark}")):
            found.setdefault(module, tuple(part for part in parts if f"{module}.{part}" in there))
    return found
