"""A weight of 4 bits with a scale for every 32, 64 or 128 neighbouring inputs: how it is kept, and what it stands for.

A number q of 0 to 15 stands for groups * q + offsets, with groups and offsets of its output and its group of inputs; without
offsets for groups * (q - 8). An output may have one more factor. GPTQ, compressed-tensors, Q4_0 and Q4_1 of GGUF files are
all of this form, so their numbers are kept exactly (`exact`).

In memory 64 inputs are 32 bytes: the low four bits of byte j are input j of the 64, the high four input 32 + j. One mask and
one shift then give two runs of neighbours, which is how a vector register wants them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

CHUNK = 64
"""The number of inputs must be a multiple of it."""
GROUP_SIZES = (128, 64, 32)
_MIDDLE = 8  # stands for 0 where there are no offsets
_LARGEST_EXPONENT = 15  # of a float16


def pack_nibbles(values: Tensor) -> Tensor:
    """Numbers 0 to 15, [out, in], as uint8 [out, in / 2]. in: a multiple of `CHUNK`."""
    low, high = values.to(torch.uint8).unflatten(1, (-1, 2, CHUNK // 2)).unbind(2)
    return (low | (high << 4)).flatten(1)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The numbers 0 to 15, uint8 [out, in], of `pack_nibbles`."""
    halves = packed.unflatten(1, (-1, CHUNK // 2))
    return torch.stack((halves & 15, halves >> 4), dim=2).flatten(1)


@dataclass(frozen=True, slots=True)
class Place:
    """The outputs and inputs of a matrix that a part of it covers."""

    rows: range
    columns: range

    def of_rows(self, numbers: Tensor) -> Tensor:
        """The part's share of numbers that the matrix has for each output, [out, ...]."""
        return numbers[self.rows.start : self.rows.stop]

    def of_groups(self, numbers: Tensor, columns: int) -> Tensor:
        """The part's share of numbers that the matrix has for each equal group of inputs, [.., groups].

        columns: inputs of the whole matrix. A group is divided where the part begins or ends within one.
        """
        size = columns // numbers.shape[-1]
        step = gcd(size, self.columns.start, self.columns.stop)
        groups = torch.arange(self.columns.start, self.columns.stop, step, device=numbers.device) // size
        return numbers[..., groups]


@dataclass(frozen=True, slots=True, eq=False)
class FourBitWeight:
    """A matrix [out, in]: (groups * q + offsets) * factors.

    packed: uint8 [out, in / 2], see above. groups: float16 [out, in / group], with 32, 64 or 128 inputs to a group.
    offsets: float32 of that shape; None for -8 * groups. factors: float32 [out]; None for 1.
    Raises ValueError for tensors that do not fit together.
    """

    packed: Tensor
    groups: Tensor
    offsets: Tensor | None = None
    factors: Tensor | None = None

    def __post_init__(self) -> None:
        rows, columns = self.shape
        dtypes = [None if tensor is None else tensor.dtype for tensor in self._all]
        wanted = [torch.uint8, torch.float16, torch.float32, torch.float32]
        shapes = [None if tensor is None else tuple(tensor.shape) for tensor in self._all]
        count = self.groups.shape[-1]
        fits = [(rows, columns // 2), (rows, count), (rows, count), (rows,)]
        if any(kind not in (None, good) for kind, good in zip(dtypes, wanted)) or any(
            shape not in (None, good) for shape, good in zip(shapes, fits)
        ):
            raise ValueError(f"the parts of a 4-bit weight do not fit together: {dtypes}, {shapes}")
        if not count or columns % CHUNK or columns % count or self.group not in GROUP_SIZES:
            raise ValueError(f"{columns} inputs in {count} groups: groups must be of 32, 64 or 128, inputs times 64")

    @property
    def _all(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.packed, self.groups, self.offsets, self.factors

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.packed.shape[0], 2 * self.packed.shape[1]

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.shape[1] // self.groups.shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._all if tensor is not None)

    def is_finite(self) -> bool:
        """Whether no number is NaN or infinite."""
        return all(bool(tensor.isfinite().all()) for tensor in self._all[1:] if tensor is not None)

    def values(self, first: int = 0, last: int | None = None) -> Tensor:
        """The numbers of outputs first .. last - 1, all by default, as float32 [outputs, in]."""
        rows = slice(first, last)
        groups = self.groups[rows].float().unsqueeze(2)
        offsets = -_MIDDLE * groups if self.offsets is None else self.offsets[rows].unsqueeze(2)
        values = unpack_nibbles(self.packed[rows]).float().unflatten(1, (-1, self.group))
        values = values.mul_(groups).add_(offsets).flatten(1)
        return values if self.factors is None else values.mul_(self.factors[rows].unsqueeze(1))

    def contiguous(self) -> FourBitWeight:
        """The same with every tensor contiguous, as the kernels read them."""
        return FourBitWeight(*(None if tensor is None else tensor.contiguous() for tensor in self._all))  # type: ignore[arg-type]

    def reordered(self, order: Tensor) -> FourBitWeight:
        """The outputs in another order; order: int64 [out]."""
        return FourBitWeight(*(None if tensor is None else tensor[order] for tensor in self._all))  # type: ignore[arg-type]

    def in_groups_of(self, size: int) -> FourBitWeight:
        """The same numbers with a scale for every `size` inputs, which must divide `group`."""
        groups, offsets = (
            None if tensor is None else tensor.repeat_interleave(self.group // size, dim=1)
            for tensor in (self.groups, self.offsets)
        )
        assert groups is not None
        return FourBitWeight(self.packed, groups, offsets, self.factors)

    @classmethod
    def cat(cls, weights: Sequence[FourBitWeight]) -> FourBitWeight:
        """The outputs of several weights of the same inputs, one after another, with every number kept exactly."""
        size = min(weight.group for weight in weights)
        parts = [weight.in_groups_of(size) for weight in weights]
        offsets = factors = None
        if any(part.offsets is not None for part in parts):
            offsets = [-_MIDDLE * part.groups.float() if part.offsets is None else part.offsets for part in parts]
        if any(part.factors is not None for part in parts):
            ones = [part.groups.new_ones(part.shape[0], dtype=torch.float32) for part in parts]
            factors = [one if part.factors is None else part.factors for part, one in zip(parts, ones)]
        return cls(
            torch.cat([part.packed for part in parts]),
            torch.cat([part.groups for part in parts]),
            None if offsets is None else torch.cat(offsets),
            None if factors is None else torch.cat(factors),
        )


def powers_of_two(exponents: Tensor) -> Tensor:
    """2 to the power of these integers, as float32, exactly."""
    return torch.exp2(exponents.double()).float()


def group_size(columns: int, count: int) -> int | None:
    """In groups of how many inputs a weight of `count` equal groups can be kept: the largest; None if it cannot be."""
    if columns % CHUNK or columns % count:
        return None
    return next((size for size in GROUP_SIZES if columns // count % size == 0), None)


def exact(
    values: Tensor, scale: Tensor, zeros: Tensor | None = None, *, whole: tuple[int, Place] | None = None
) -> FourBitWeight | None:
    """(values - zeros) * scale, product in float32, with not one number changed; None if it cannot be kept.

    values: 0 to 15, [out, in]. scale: floats [out, groups]. zeros: integers of that shape; None for 8.
    whole: the inputs of a matrix of which `values` is the part at that place, and scale and zeros are all. So all its parts
        can be kept or none, and stand for the numbers of the whole. Raises ValueError for a part that is not cut at multiples
        of 64 inputs.
    Scales of 16 bits always can be, unless those of one row are too far apart; scales of 32 bits if a row has only one.
    """
    columns = values.shape[1] if whole is None else whole[0]
    size = group_size(columns, scale.shape[1])
    split = _halves(scale.float())
    if size is None or split is None:
        return None
    groups, factors = split
    offsets = None if zeros is None or bool((zeros == _MIDDLE).all()) else -zeros.float() * groups.float()
    times = columns // scale.shape[1] // size
    groups = groups.repeat_interleave(times, dim=1)
    offsets = None if offsets is None else offsets.repeat_interleave(times, dim=1)
    if whole is not None:
        place = whole[1]
        groups = place.of_groups(place.of_rows(groups), columns)
        offsets = None if offsets is None else place.of_groups(place.of_rows(offsets), columns)
        factors = None if factors is None else place.of_rows(factors)
    return FourBitWeight(pack_nibbles(values), groups, offsets, factors)


def _halves(scale: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """float16 and, where they are needed, factors of a row that together are these scales exactly; None if none are.

    scale: float32 [out, groups]. The factors are powers of two, except for rows with one scale.
    """
    if torch.equal(scale.half().float(), scale):
        return scale.half(), None
    if bool((scale == scale[:, :1]).all()):
        return torch.ones_like(scale, dtype=torch.float16), scale[:, 0].contiguous()
    exponents = torch.frexp(scale.abs().amax(dim=1)).exponent
    factors = powers_of_two(exponents - _LARGEST_EXPONENT)
    groups = (scale / factors.unsqueeze(1)).half()
    return (groups, factors) if torch.equal(groups.float() * factors.unsqueeze(1), scale) else None
