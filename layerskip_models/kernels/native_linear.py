"""Linears on our own kernels: one row or eight, as fast as the weight can be read from memory. See `kernels.c`."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import addressof

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip_models.choices import Choices, Detail, choices_in_pieces, empty_choices
from layerskip_models.grouped_weight import BLOCK, ROW_BITS, GroupedWeight, rounded_rows
from layerskip_models.kernels import library
from layerskip_models.kernels.library import GROUPED_KINDS, KINDS, SCALES, Matrix
from layerskip_models.kernels.pages import expect_large_pages, use_large_pages
from layerskip_models.kernels.threads import keep, num_threads
from layerskip_models.kernels.weights import (
    FLIP,
    LANES,
    eight_bits,
    in_rows,
    interleave,
    interleaved,
    outputs_of,
    rows_of,
    side_by_side,
    takes_interleaved,
    without_interleaving,
)
from layerskip_models.norm import RMSNorm

MAX_ROWS = 128
"""Most rows per call, which bounds the scratch. With this many, reading the weights costs next to nothing."""
_CONVERTED = 1 << 21  # numbers converted at a time for PyTorch's product
_ROUNDED = 1 << 20  # numbers rounded to 8 bits at a time, which fit into a cache
_operators_only: ContextVar[bool] = ContextVar("operators_only", default=False)


@contextmanager
def operators_only() -> Iterator[None]:
    """While active, linears are computed by PyTorch's operators, for callers that observe these."""
    token = _operators_only.set(True)
    try:
        yield
    finally:
        _operators_only.reset(token)


def only_operators() -> bool:
    """Return whether `operators_only` is active."""
    return _operators_only.get()


def pieces(rows: int) -> Iterator[tuple[int, int]]:
    """(first row, number of rows) of each call needed for this many rows."""
    for first in range(0, rows, MAX_ROWS):
        yield first, min(MAX_ROWS, rows - first)


def _pieces_of(outputs: int, size: int) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of the outputs in each piece of `size`."""
    return ((first, min(first + size, outputs)) for first in range(0, outputs, size))


def without_loss(weight: Tensor) -> Tensor:
    """Convert a weight to the first of bfloat16, float16 and float32 that is exact. 16-bit weights stay as they are."""
    if weight.dtype in (torch.bfloat16, torch.float16):
        return weight
    weight = weight.float()
    for dtype in (torch.bfloat16, torch.float16):
        half = weight.to(dtype)
        if torch.equal(half.float(), weight):
            return half
    return weight


def readable(tensor: Tensor) -> Tensor:
    """Return the tensor as C reads it: contiguous, data aligned to the element size; copied only if it is not so."""
    tensor = tensor.contiguous()
    # a tensor in a mapped file may begin at any address
    return tensor.clone() if tensor.data_ptr() % tensor.element_size() else tensor


def pointer(name: str, tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> int | None:
    """Return a tensor's address, for C. ValueError unless it is contiguous, on the CPU, of this dtype and shape."""
    if tensor is None:
        return None
    if tensor.dtype is not dtype or tensor.shape != shape or not (tensor.is_cpu and tensor.is_contiguous()):
        raise ValueError(
            f"{name} must be contiguous {dtype} {list(shape)} on the CPU, "
            f"got {tensor.dtype} {list(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
        )
    return tensor.data_ptr()


def check_rows(name: str, x: Tensor, width: int) -> None:
    """Raise ValueError unless x is float32 [rows, width] on the CPU: the library would read past its end."""
    if x.dtype is not torch.float32 or not x.is_cpu or x.dim() != 2 or x.shape[1] != width:
        raise ValueError(
            f"{name} must be float32 [rows, {width}] on the CPU, got {x.dtype} {list(x.shape)} on {x.device}"
        )


class NativeLinear:
    """x W^T + b in float32. W is stored in 16 bits where that is exact, as for most checkpoints (`without_loss`).

    stored: W in memory of its own, in the order that the kernels multiply fastest (side_by_side.h).
    A row's result does not depend on other rows, nor on the number of threads.
    Raises RuntimeError if there are no kernels (`native_works`); ValueError if the weight is not a matrix, the bias does not
    fit it, or one of them is not on the CPU.
    """

    stored: Tensor
    matrix: Matrix

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._set(without_loss(weight), None, bias)
        self._lay()
        self.matrix.interleaved = takes_interleaved(KINDS[self.stored.dtype], *self.shape)

    def _lay(self) -> None:
        """Store a copy with 16 outputs side by side in place of the rows."""
        self.stored = side_by_side(self.stored)
        use_large_pages(self.stored)
        self.matrix.weight = self.stored.data_ptr()
        self.num_bytes += (self.stored.numel() - self._out * self._in) * self.stored.element_size()

    def _set(self, stored: Tensor, scale: Tensor | None, bias: Tensor | None, outputs: int | None = None) -> None:
        """Keep these tensors. outputs: how many first rows of `stored` are no padding; None for all."""
        chosen = library.kernels()
        if chosen is None:
            raise RuntimeError("no native kernels here")
        if stored.dim() != 2 or 0 in stored.shape or not stored.is_cpu:
            raise ValueError(
                f"a weight must be [out, in], not empty, on the CPU; got {list(stored.shape)} on {stored.device}"
            )
        self._out, self._in = outputs or len(stored), stored.shape[1]
        if bias is not None and (bias.shape != (self._out,) or not bias.is_cpu):
            raise ValueError(f"bias must be [{self._out}] on the CPU, got {list(bias.shape)} on {bias.device}")
        self.stored = stored = readable(stored)
        self._scale = None if scale is None else readable(scale)
        self._bias = None if bias is None else readable(bias.float())
        self._run = chosen.linear
        self._run_normalised = chosen.normalised_linear
        self._pick, self._pick_scratch = chosen.pick, chosen.pick_scratch
        self._scratch = threading.local()
        self.matrix = Matrix(
            pointer("a weight", stored, stored.dtype, *stored.shape),
            pointer("scale", self._scale, torch.float32, self._out),
            pointer("bias", self._bias, torch.float32, self._out),
            KINDS[stored.dtype],
            self._in,
            self._out,
        )
        self._address = addressof(self.matrix)
        self.num_bytes = stored.numel() * stored.element_size() + (0 if scale is None else 4 * self._out)

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self._out, self._in

    @property
    def tensors(self) -> list[Tensor]:
        """The memory that `matrix` points to."""
        return [tensor for tensor in (self.stored, self._scale, self._bias) if tensor is not None]

    @property
    def bias(self) -> Tensor | None:
        """float32 [out]; None without one."""
        return self._bias

    @property
    def numbers_in_rows(self) -> Tensor:
        """The stored numbers, [out, in], in memory of their own."""
        return self._rows(0, self._out)

    def _rows(self, first: int, last: int) -> Tensor:
        """Return rows [first, last) of the stored numbers, in memory of their own."""
        return rows_of(self.stored, first, last, self._in)

    @property
    def weight(self) -> Tensor:
        """The weight in float32, [out, in]."""
        return next(self.float_pieces(self._out))

    def float_pieces(self, outputs: int) -> Iterator[Tensor]:
        """Yield the weight in float32, piece by piece. outputs: in each piece."""
        return (self._rows(*ends).float() for ends in _pieces_of(self._out, outputs))

    def rows(self, outputs: Tensor) -> Tensor:
        """Return the numbers of these outputs, int64 [rows], as float32 [rows, in]. IndexError if there are no such."""
        outputs, kernels = outputs.contiguous(), library.kernels()
        if outputs.dtype is not torch.int64 or not outputs.is_cpu or kernels is None:
            raise ValueError(f"outputs must be int64 on the CPU, got {outputs.dtype} on {outputs.device}")
        if outputs.numel() and not 0 <= int(outputs.min()) <= int(outputs.max()) < self._out:
            raise IndexError(f"outputs must be below {self._out}, got {outputs.tolist()}")
        y = torch.empty(*outputs.shape, self._in, dtype=torch.float32, device="cpu")
        kernels.rows(self._address, outputs.data_ptr(), outputs.numel(), y.data_ptr())
        return y

    def taking(self, outputs: Tensor | slice) -> NativeLinear:
        """Return a linear of these outputs alone, with the same bits: the first few, in the same memory, or int64 [count]."""
        other, count = copy.copy(self), outputs.stop if isinstance(outputs, slice) else len(outputs)
        other._out, other.num_bytes = count, -(-self.num_bytes * count // self._out)
        other._scratch, other.matrix = threading.local(), Matrix.from_buffer_copy(self.matrix)
        other.matrix.out_features, other._address = count, addressof(other.matrix)
        other._scale, other._bias = (None if one is None else one[outputs] for one in (self._scale, self._bias))
        other.matrix.scale, other.matrix.bias = (
            None if t is None else t.data_ptr() for t in (other._scale, other._bias)
        )
        if not isinstance(outputs, slice):
            other.stored = outputs_of(self.stored, -(-self._out // LANES), outputs, words=self.stored.dim() != 3)
            use_large_pages(other.stored)
            other.matrix.weight = other.stored.data_ptr()
        return other

    def __call__(self, x: Tensor) -> Tensor:
        """x: float32 [rows, in]. Returns float32 [rows, out]. ValueError if x is anything else."""
        if _operators_only.get():
            return self._by_operators(x)
        return self._multiply(x.contiguous(), None)

    def _multiply(self, x: Tensor, residual: Tensor | None, norm: RMSNorm | None = None) -> Tensor:
        """x, residual: contiguous, and at most one of `residual` and `norm`."""
        check_rows("x", x, self._in)
        factors = None if norm is None else norm.factors
        norms = pointer("the norm's factors", factors, torch.float32, self._in)
        if residual is not None:
            check_rows("residual", residual, self._out)
            if residual.shape[0] != x.shape[0]:
                raise ValueError(f"residual has {residual.shape[0]} rows, x has {x.shape[0]}")
        rows, size = x.shape
        y, threads = x.new_empty(rows, self._out), num_threads()
        for first, count in pieces(rows):
            row, to = x.data_ptr() + 4 * first * size, y.data_ptr() + 4 * first * self._out
            if norm is None:
                added = None if residual is None else residual.data_ptr() + 4 * first * self._out
                job = self._run(self._address, row, count, added, to, threads)
            else:
                job = self._run_normalised(self._address, norms, norm.eps, row, count, to, threads)
            if job:
                keep(job, self, x, residual, factors)
        return y

    def _by_operators(self, x: Tensor) -> Tensor:
        """x W^T + b by PyTorch's operators, which take some outputs at a time in float32."""
        y, step = x.new_empty(x.shape[0], self._out), max(_CONVERTED // self._in, 1)
        for first, piece in zip(range(0, self._out, step), self.float_pieces(step)):
            torch.mm(x, piece.t(), out=y[:, first : first + step])
        return y if self._bias is None else y.add_(self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x W^T + b."""
        if _operators_only.get():
            return self._by_operators(x).add_(residual)
        return self._multiply(x.contiguous(), residual.contiguous())

    def of_normalised(self, norm: RMSNorm, x: Tensor) -> Tensor:
        """norm(x) W^T + b in one call; x: [rows, in]."""
        if norm.factors is None or _operators_only.get():
            return self(norm(x))
        return self._multiply(x.contiguous(), None, norm)

    def choices_of_normalised(self, norm: RMSNorm, x: Tensor, detail: Detail) -> Choices:
        """`Choices` from the logits norm(x) W^T + b, without storing the logits. x: [rows, in]."""
        check_rows("x", x, self._in)
        factors = norm.factors
        if factors is None or _operators_only.get():
            return choices_in_pieces(x, self._out, lambda piece: self.of_normalised(norm, piece), detail)
        x = x.contiguous()
        if x.shape[0] <= MAX_ROWS:
            return self._choices(factors, norm.eps, x, detail)
        parts = [self._choices(factors, norm.eps, part, detail) for part in x.split(MAX_ROWS)]
        return Choices(torch.cat([p.tokens for p in parts]), torch.cat([p.numbers for p in parts], dim=1))

    def _choices(self, factors: Tensor, eps: float, x: Tensor, detail: Detail) -> Choices:
        """x: contiguous, at most `MAX_ROWS` rows."""
        rows = x.shape[0]
        choices, scratch = empty_choices(rows, detail), self._scratch_for(rows)
        job = self._pick(
            self._address,
            pointer("the norm's factors", factors, torch.float32, self._in),
            eps,
            x.data_ptr(),
            rows,
            scratch.data_ptr(),
            detail != "token",
            choices.tokens.data_ptr(),
            choices.numbers.data_ptr(),
            num_threads(),
        )
        if job:
            keep(job, self, x, factors, scratch)
        return choices

    def _scratch_for(self, rows: int) -> Tensor:
        """Return the calling thread's scratch for `pick`, large enough for this many rows."""
        held: tuple[int, Tensor] | None = getattr(self._scratch, "memory", None)
        if held is None or held[0] < rows:
            size = self._pick_scratch(self._address, rows)
            held = self._scratch.memory = rows, torch.empty(-(-size // 8), dtype=torch.int64, device="cpu")
        return held[1]


def round_to_eight_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of -127 to 127, int8 [out, in], and the scale of each output, float32 [out]. The library need not be there."""
    rounded = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    expect_large_pages(rounded)
    if eight_bits(readable(weight.detach()), rounded, scale):
        return rounded, scale
    step = max(_ROUNDED // max(weight.shape[1], 1), 1)
    for first in range(0, len(weight), step):
        part, own = weight[first : first + step].float(), slice(first, first + step)
        torch.div(part.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny), 127, out=scale[own])
        rounded[own] = (part / scale[own].unsqueeze(1)).round_()
    return rounded, scale


class NativeInt8Linear(NativeLinear):
    """x W^T + b with W rounded to 8 bits, with one scale per output.

    On processors that multiply bytes, inputs are rounded to 24-bit fixed point relative to the largest of their row, if there
    is a multiple of 32 outputs and one of 64 inputs.
    The rounded weights make a different model; "the model's own output" then means that of this model.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._keep(*round_to_eight_bits(weight), bias)

    def _keep(self, rounded: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        """Keep these tensors. rounded: becomes the linear's own."""
        self._set(rounded, scale, bias)
        if not takes_interleaved(KINDS[torch.int8], *rounded.shape):
            self._lay()
            return
        use_large_pages(self.stored)
        interleave(self.stored, words=True, flip=FLIP)  # each number becomes an unsigned byte, 128 more
        self.matrix.interleaved = 1

    def _rows(self, first: int, last: int) -> Tensor:
        """Return rows [first, last) of the rounded numbers, in memory of their own."""
        if not self.matrix.interleaved:
            return super()._rows(first, last)
        start = first // LANES * LANES
        some = without_interleaving(self.stored[start : -(-last // LANES) * LANES], words=True)
        return (some.view(torch.uint8) ^ 128).view(torch.int8)[first - start : last - start]

    def float_pieces(self, outputs: int) -> Iterator[Tensor]:
        """Yield the weight in float32, piece by piece. outputs: in each piece."""
        assert self._scale is not None
        parts = zip(_pieces_of(self._out, outputs), self._scale.split(outputs))
        return (self._rows(*ends).float().mul_(scale.unsqueeze(1)) for ends, scale in parts)


def _only_looked_up(*_: object) -> int:
    raise TypeError("this weight's outputs are not side by side: its rows can be looked up, and nothing else")


class NativeGroupedLinear(NativeLinear):
    """x W^T + b with W in 4, 6 or 8 bits, in groups.

    Inputs are rounded: to 16-bit fixed point relative to the largest of their row, or to 8 bits relative to the largest of 32
    neighbours.
    Numbers that were rounded make a different model; "the model's own output" then means that of this model.
    own: whether nobody else needs the tensors of `weight`, which may then be reordered in place. reorder: False leaves
        them, for a weight whose rows are only looked up.
    rows: 8 or 16, the bits of the inputs; None for 8. Weights of 8 bits always meet 16 (`row_bits`).
    Raises what `NativeLinear` raises, and ValueError for other `rows`.
    """

    def __init__(
        self,
        weight: GroupedWeight,
        bias: Tensor | None = None,
        *,
        own: bool = False,
        reorder: bool = True,
        rows: int | None = None,
    ) -> None:
        if rows is not None and rows not in ROW_BITS:
            raise ValueError(f"rows must be {' or '.join(map(str, ROW_BITS))} (bits), got {rows!r}")
        outputs = weight.shape[0]
        if reorder and not weight.interleaved:
            weight = interleaved(weight.padded(LANES), in_place=own)
        self._set(weight.packed, None if weight.factors is None else weight.factors[:outputs], bias, outputs)
        use_large_pages(self.stored)
        others = (None if one is None else readable(one) for one in (weight.groups, weight.offsets, weight.blocks))
        groups, offsets, blocks = others
        assert groups is not None
        self._kept = weight = weight.with_tensors((self.stored, groups, offsets, weight.factors, blocks))
        self.bits = weight.bits
        self._in = self.matrix.in_features = weight.shape[1]
        shape = (len(self.stored), self._in // weight.group)
        kind = torch.float32 if blocks is None else groups.dtype
        each = 1 if offsets is None else 2
        self.matrix.kind = GROUPED_KINDS[weight.bits]
        self.matrix.groups = pointer("the groups' scales", groups, groups.dtype, *shape)
        self.matrix.offsets = pointer("the groups' offsets", offsets, kind, *shape)
        self.matrix.blocks = pointer("the blocks' scales", blocks, torch.float16, shape[0], self._in // BLOCK, each)
        self.matrix.group, self.matrix.scales = weight.group, SCALES[groups.dtype]
        self.matrix.zero, self.matrix.interleaved = weight.zero, weight.interleaved
        self.row_bits = self.matrix.row_bits = 16 if weight.bits > 6 else rows or 8
        self.num_bytes = weight.num_bytes
        if not weight.interleaved:
            self._run = self._run_normalised = self._pick = _only_looked_up

    @property
    def numbers(self) -> GroupedWeight:
        """The weight as it was given; a copy if the kernels keep it interleaved."""
        return in_rows(self._kept).outputs(self._out)

    @property
    def tensors(self) -> list[Tensor]:
        """The memory that `matrix` points to."""
        more = (self._kept.groups, self._kept.offsets, self._kept.blocks)
        return [*(tensor for tensor in more if tensor is not None), *super().tensors]

    def taking(self, outputs: Tensor | slice) -> NativeLinear:
        other, kept = super().taking(outputs), self._kept
        assert isinstance(other, NativeGroupedLinear)
        if isinstance(outputs, slice):
            return other
        groups, offsets, blocks = (
            None if one is None else outputs_of(one, len(one) // LANES, outputs, words=False)
            for one in (kept.groups, kept.offsets, kept.blocks)
        )
        factors = None if other._scale is None else F.pad(other._scale, (0, -len(outputs) % LANES))
        other._kept = kept.with_tensors((other.stored, groups, offsets, factors, blocks))
        for name, tensor in (("groups", groups), ("offsets", offsets), ("blocks", blocks)):
            setattr(other.matrix, name, None if tensor is None else tensor.data_ptr())
        return other

    def with_rows(self, rows: int) -> NativeGroupedLinear:
        """Return a linear with the same weight in the same memory. rows: as above; not for weights of 8 bits."""
        other = copy.copy(self)
        other.row_bits = rows
        other.matrix, other._scratch = Matrix.from_buffer_copy(self.matrix), threading.local()
        other.matrix.row_bits, other._address = other.row_bits, addressof(other.matrix)
        return other

    def _by_operators(self, x: Tensor) -> Tensor:
        return super()._by_operators(rounded_rows(x) if self.row_bits == 8 else x)

    def float_pieces(self, outputs: int) -> Iterator[Tensor]:
        """Yield the weight in float32, piece by piece. outputs: in each piece."""
        numbers = self.numbers
        return (numbers.values(first, first + outputs) for first in range(0, self._out, outputs))
