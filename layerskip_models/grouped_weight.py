"""A weight of small numbers with a scale for every few neighbouring inputs: how it is kept, and what it stands for.

A number q stands for scale * q + offset, with the scale and the offset of its output and its group of inputs; without offsets
for scale * (q - zero). An output may have one more factor. The usual types of GGUF files are of this form, and their numbers
are kept exactly (`checkpoints.gguf_blocks`).

In memory 64 inputs of 4 bits are 32 bytes: the low four bits of byte j are input j of the 64, the high four input 32 + j. One
mask and one shift then give two runs of neighbours, which is how a vector register wants them. Numbers of 6 bits have 16
bytes after these 32: bits 2 k and 2 k + 1 of byte j are the upper two of input 16 k + j. Other numbers are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from layerskip_models.kernels.pages import expect_large_pages

CHUNK = 64
"""The number of inputs must be a multiple of it."""
GROUP_SIZES = (128, 64, 32)
"""Inputs to a group of 4-bit weights. Bytes may also have groups of 16."""
BLOCK = 256
"""Inputs that share a block's scale, where the groups' own scales are integers."""
ROW_BITS = (8, 16)
"""Bits that the numbers of a row may have beside weights of at most 6 bits. Beside weights of 8 bits they have 16."""
ROW_GROUP = 32
"""Numbers of a row that share a scale where they have 8 bits."""
_SMALLEST = 2.0**-120  # magnitude that a group of a row is rounded to 0 below: 127 divided by it is finite
_MIDDLE = 8  # of 4 bits
_SIGNED = 128  # of a signed byte
_ALL = slice(None)
_CONVERTED = 1 << 21  # numbers that are float32 at a time in a product by PyTorch's operators


def pack_nibbles(values: Tensor) -> Tensor:
    """Numbers 0 to 15, [out, in], as uint8 [out, in / 2]. in: a multiple of `CHUNK`."""
    low, high = values.to(torch.uint8).unflatten(1, (-1, 2, CHUNK // 2)).unbind(2)
    return (low | (high << 4)).flatten(1)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Unpack the numbers 0 to 15, uint8 [out, in], of `pack_nibbles`."""
    halves = packed.unflatten(1, (-1, CHUNK // 2))
    return torch.stack((halves & 15, halves >> 4), dim=2).flatten(1)


def pack_sixes(values: Tensor) -> Tensor:
    """Numbers 0 to 63, [out, in], as uint8 [out, 3 in / 4]. in: a multiple of `CHUNK`."""
    values = values.to(torch.uint8)
    low = pack_nibbles(values & 15).unflatten(1, (-1, CHUNK // 2))
    parts = (values >> 4).unflatten(1, (-1, 4, CHUNK // 4)).unbind(2)
    upper = parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6
    return torch.cat((low, upper), dim=2).flatten(1)


def unpack_sixes(packed: Tensor) -> Tensor:
    """Unpack the numbers 0 to 63, uint8 [out, in], of `pack_sixes`."""
    chunks = packed.unflatten(1, (-1, 3 * CHUNK // 4))
    upper = torch.stack([chunks[..., CHUNK // 2 :] >> 2 * part & 3 for part in range(4)], dim=2).flatten(1)
    return unpack_nibbles(chunks[..., : CHUNK // 2].flatten(1)) | upper << 4


_UNPACK = {4: unpack_nibbles, 6: unpack_sixes, 8: lambda packed: packed}


@dataclass(frozen=True, slots=True, eq=False)
class GroupedWeight:
    """A matrix [out, in]: (scale * q + offset) * factor.

    packed: uint8 [out, bits in / 8], see above. groups: scales, float16 or float32 [out, in / group], with 16 (not of 4
    bits), 32, 64 or 128 inputs to a group; or integers, uint8 or int8, that `blocks` multiply.
    offsets: float32 of that shape, or with blocks integers as scales are; None for -zero * scale.
    factors: float32 [out]; None for 1. blocks: float16 [out, in / 256, 2], the factors of the scales and, negated, of the
    offsets; without offsets [out, in / 256, 1].
    interleaved: whether the kernels alone know what is where (`kernels.weights`); shapes are the same.
    Raises ValueError for tensors that do not fit together.
    """

    packed: Tensor
    groups: Tensor
    offsets: Tensor | None = None
    factors: Tensor | None = None
    blocks: Tensor | None = None
    bits: int = 4
    zero: int = _MIDDLE
    interleaved: bool = False

    def __post_init__(self) -> None:
        rows, columns = self.shape
        count = self.groups.shape[-1]
        scales = (torch.float16, torch.float32) if self.blocks is None else (torch.uint8, torch.int8)
        offsets = torch.float32 if self.blocks is None else self.groups.dtype
        each = 1 if self.offsets is None else 2
        wanted: list[tuple[Tensor | None, tuple[torch.dtype, ...], tuple[int, ...]]] = [
            (self.packed, (torch.uint8,), (rows, columns * self.bits // 8)),
            (self.groups, scales, (rows, count)),
            (self.offsets, (offsets,), (rows, count)),
            (self.factors, (torch.float32,), (rows,)),
            (self.blocks, (torch.float16,), (rows, columns // BLOCK, each)),
        ]
        if self.bits not in _UNPACK or any(
            tensor is not None and (tensor.dtype not in dtypes or tuple(tensor.shape) != shape)
            for tensor, dtypes, shape in wanted
        ):
            found = [None if tensor is None else (tensor.dtype, [*tensor.shape]) for tensor, _, _ in wanted]
            raise ValueError(f"the parts of a weight in groups do not fit together: {found}")
        sizes = GROUP_SIZES if self.bits == 4 else (*GROUP_SIZES, 16)
        if not count or columns % CHUNK or columns % count or self.group not in sizes:
            meant = " or ".join(map(str, sizes))
            raise ValueError(f"{columns} inputs in {count} groups: groups must be of {meant}, inputs times 64")
        if self.blocks is not None and (columns % BLOCK or self.group > 32):
            raise ValueError(f"{columns} inputs in {count} groups: blocks are of {BLOCK}, their groups of 16 or 32")

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Packed, groups, offsets, factors, blocks."""
        return self.packed, self.groups, self.offsets, self.factors, self.blocks

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> GroupedWeight:
        """Other tensors of the same form, in the order of `tensors`."""
        packed, groups, offsets, factors, blocks = tensors
        assert packed is not None and groups is not None
        return GroupedWeight(packed, groups, offsets, factors, blocks, self.bits, self.zero, self.interleaved)

    def _of(self, change: Callable[[Tensor], Tensor]) -> GroupedWeight:
        """Apply a function to every tensor."""
        return self.with_tensors([None if tensor is None else change(tensor) for tensor in self.tensors])

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.packed.shape[0], self.packed.shape[1] * 8 // self.bits

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.shape[1] // self.groups.shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors if tensor is not None)

    def is_finite(self) -> bool:
        """Return whether no number is NaN or infinite."""
        return all(bool(tensor.isfinite().all()) for tensor in self.tensors[1:] if tensor is not None)

    def scales_and_offsets(self, rows: slice = _ALL) -> tuple[Tensor, Tensor]:
        """Return the scales and offsets of these outputs, two tensors of float32 [outputs, in / group]."""
        scales = self.groups[rows].float()
        if self.blocks is None:
            return scales, -self.zero * scales if self.offsets is None else self.offsets[rows]
        blocks = self.blocks[rows].float().repeat_interleave(BLOCK // self.group, dim=1)
        scales *= blocks[..., 0]
        return scales, -self.zero * scales if self.offsets is None else -(self.offsets[rows].float() * blocks[..., 1])

    def values(self, first: int = 0, last: int | None = None) -> Tensor:
        """Return the numbers of outputs first .. last - 1, all by default, as float32 [outputs, in]."""
        rows = slice(first, last)
        scales, offsets = (one.unsqueeze(2) for one in self.scales_and_offsets(rows))
        values = _UNPACK[self.bits](self.packed[rows]).float().unflatten(1, (-1, self.group))
        values = values.mul_(scales).add_(offsets).flatten(1)
        return values if self.factors is None else values.mul_(self.factors[rows].unsqueeze(1))

    def outputs(self, count: int) -> GroupedWeight:
        """Return the weight of the first `count` outputs, in the same memory."""
        return self._of(lambda tensor: tensor[:count])

    def padded(self, size: int) -> GroupedWeight:
        """Return the weight with outputs of zeros behind its own, up to a multiple of `size`."""
        more = -len(self.packed) % size
        return self._of(lambda tensor: torch.cat((tensor, tensor.new_zeros(more, *tensor.shape[1:])))) if more else self

    def contiguous(self) -> GroupedWeight:
        """Make every tensor contiguous, as the kernels read them."""
        return self._of(Tensor.contiguous)

    def reordered(self, order: Tensor) -> GroupedWeight:
        """Return the weight with its outputs in another order; order: int64 [out]."""

        def taken(tensor: Tensor) -> Tensor:
            room = torch.empty_like(tensor)
            expect_large_pages(room)
            return torch.index_select(tensor, 0, order, out=room)

        return self._of(taken)

    def in_groups_of(self, size: int) -> GroupedWeight:
        """Repeat scales and offsets so that there is one for every `size` inputs. size: must divide `group`."""
        times = self.group // size
        offsets = None if self.offsets is None else self.offsets.repeat_interleave(times, dim=1)
        return replace(self, groups=self.groups.repeat_interleave(times, dim=1), offsets=offsets)

    def as_signed_bytes(self) -> GroupedWeight:
        """Convert a weight without offsets and blocks to bytes of which 128 stands for 0, as Q8_0 has them."""
        numbers = _UNPACK[self.bits](self.packed) + (_SIGNED - self.zero)
        return GroupedWeight(numbers, self.groups, factors=self.factors, bits=8, zero=_SIGNED)

    def as_bytes(self) -> GroupedWeight:
        """Convert to bytes with scales and offsets in float32, which can hold the numbers of any other form."""
        scales, offsets = self.scales_and_offsets()
        return GroupedWeight(_UNPACK[self.bits](self.packed), scales, offsets, self.factors, bits=8)

    def as_sixes_in_blocks(self) -> GroupedWeight:
        """Convert a weight in blocks to 6 bits in blocks, in groups of 16 with offsets and with signed scales.

        Where there are no offsets, they are the scales, and their factors zero times those of the scales. This is exact for a
        power of two unless it is too large for float16: then the result is not finite.
        """
        assert self.blocks is not None
        scales, blocks = self.groups.view(torch.int8).repeat_interleave(self.group // 16, dim=1), self.blocks
        if self.offsets is None:
            offsets, blocks = scales, torch.cat((blocks, self.zero * blocks), dim=2)
        else:
            offsets = self.offsets.view(torch.int8).repeat_interleave(self.group // 16, dim=1)
        numbers = pack_sixes(_UNPACK[self.bits](self.packed))
        return GroupedWeight(numbers, scales, offsets, self.factors, blocks, bits=6)

    def _is_like(self, other: GroupedWeight) -> bool:
        """Return whether scales are of the same form, and numbers stand for the same."""
        mine, theirs = ((one.bits, one.zero, one.groups.dtype, one.blocks is None) for one in (self, other))
        own, others = ((one.group, one.offsets is None) for one in (self, other))
        return mine == theirs and (self.blocks is None or own == others)

    @classmethod
    def cat(cls, weights: Sequence[GroupedWeight]) -> GroupedWeight:
        """Join the outputs of several weights of the same inputs, one after another, with every number kept exactly."""
        alike = all(weights[0]._is_like(weight) for weight in weights)
        plain = {(weight.groups.dtype, weight.offsets is None, weight.blocks is None) for weight in weights}
        if not alike and plain in ({(torch.float16, True, True)}, {(torch.float32, True, True)}):
            weights = [weight.as_signed_bytes() for weight in weights]
        elif not alike:
            in_blocks = [weight.as_sixes_in_blocks() for weight in weights if weight.blocks is not None]
            fits = len(in_blocks) == len(weights) and all(weight.is_finite() for weight in in_blocks)
            weights = in_blocks if fits else [weight.as_bytes() for weight in weights]
        size = min(weight.group for weight in weights)
        parts = [weight.in_groups_of(size) for weight in weights]
        offsets = factors = blocks = None
        if any(part.offsets is not None for part in parts):
            offsets = [part.scales_and_offsets()[1] if part.blocks is None else part.offsets for part in parts]
        if any(part.factors is not None for part in parts):
            ones = [part.groups.new_ones(part.shape[0], dtype=torch.float32) for part in parts]
            factors = [one if part.factors is None else part.factors for part, one in zip(parts, ones)]
        if parts[0].blocks is not None:
            blocks = [part.blocks for part in parts]
        return cls(
            _joined([part.packed for part in parts]),
            _joined([part.groups for part in parts]),
            None if offsets is None else _joined(offsets),  # type: ignore[arg-type]
            None if factors is None else _joined(factors),
            None if blocks is None else _joined(blocks),  # type: ignore[arg-type]
            bits=parts[0].bits,
            zero=parts[0].zero,
        )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Join rows, in memory that has large pages from the first write on."""
    room = parts[0].new_empty(sum(len(part) for part in parts), *parts[0].shape[1:])
    expect_large_pages(room)
    return torch.cat([*parts], out=room)


def powers_of_two(exponents: Tensor) -> Tensor:
    """2 to the power of these integers, as float32, exactly."""
    return torch.exp2(exponents.double()).float()


def group_size(columns: int, count: int) -> int | None:
    """In groups of how many inputs a weight of `count` equal groups can be kept: the largest; None if it cannot be."""
    if columns % CHUNK or columns % count:
        return None
    return next((size for size in GROUP_SIZES if columns // count % size == 0), None)


def rounded_rows(x: Tensor) -> Tensor:
    """Round the numbers of rows, float32 [rows, in], to 8 bits with a scale for every `ROW_GROUP`, as the kernels do."""
    groups = x.unflatten(1, (-1, ROW_GROUP))
    largest = groups.abs().amax(2, keepdim=True)
    # As a tensor: 127 / largest is rounded twice.
    factors = torch.where(largest < _SMALLEST, 0.0, torch.full_like(largest, 127) / largest)
    return (groups * factors).round_().mul_(largest / 127).flatten(1)


class GroupedLinear:
    """x W^T + b with W in groups, by PyTorch's operators: a piece of W at a time is float32, and so are rows.

    rows: 8 rounds them where the kernels do (`NativeGroupedLinear`), so that the model is the same. Otherwise they are not
    rounded: that would turn the last digits, which change here with the number of rows, into whole steps.
    """

    def __init__(self, weight: GroupedWeight, bias: Tensor | None = None, *, rows: int | None = None) -> None:
        self.numbers = weight
        self.row_bits = 8 if rows == 8 and weight.bits <= 6 else 32
        self.bits, self.shape = weight.bits, weight.shape
        self.bias = None if bias is None else bias.float()
        self.num_bytes = weight.num_bytes

    def with_rows(self, rows: int) -> GroupedLinear:
        """Return a linear with the same weight in the same memory. rows: as above."""
        return GroupedLinear(self.numbers, self.bias, rows=rows)

    @property
    def weight(self) -> Tensor:
        """The weight in float32, [out, in]."""
        return self.numbers.values()

    def float_pieces(self, outputs: int) -> Iterator[Tensor]:
        """Yield the weight in float32, piece by piece. outputs: in each piece."""
        return (self.numbers.values(first, first + outputs) for first in range(0, self.shape[0], outputs))

    def taking(self, outputs: Tensor | slice) -> GroupedLinear:
        """Return a linear of these outputs alone: of a slice in the same memory, or int64 [count]."""
        taken = self.numbers._of(lambda tensor: tensor[outputs])
        return GroupedLinear(taken, None if self.bias is None else self.bias[outputs], rows=self.row_bits)

    def rows(self, outputs: Tensor) -> Tensor:
        """Return the numbers of these outputs, float32 [outputs, in]."""
        return self.taking(outputs).numbers.values()

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in]. Returns [rows, out]."""
        return grouped_product(rounded_rows(x) if self.row_bits == 8 else x, self.numbers, self.bias)

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
