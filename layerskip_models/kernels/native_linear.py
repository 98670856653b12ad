"""Linears on our own kernels: as fast as the weight comes from memory, for one row as for eight. See `kernels.c`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import addressof
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip_models.choices import Choices, Detail, choices_in_pieces, empty_choices
from layerskip_models.kernels.library import KINDS, Matrix, kernels
from layerskip_models.kernels.threads import keep, num_threads
from layerskip_models.norm import RMSNorm

MOST_ROWS = 128
"""Rows that the kernels take at once, which bounds their scratch; of so many, reading the weights costs next to nothing."""
_CONVERTED = 1 << 23  # numbers of a weight that are float32 at a time for PyTorch's product: memory at hand already
_operators_only: ContextVar[bool] = ContextVar("operators_only", default=False)


@contextmanager
def operators_only() -> Iterator[None]:
    """Within it linears are computed by PyTorch's operators: for those who watch these."""
    token = _operators_only.set(True)
    try:
        yield
    finally:
        _operators_only.reset(token)


def only_operators() -> bool:
    """Whether this is within `operators_only`."""
    return _operators_only.get()


def pieces(rows: int) -> Iterator[tuple[int, int]]:
    """(first row, number of rows) of each call that so many rows take."""
    for first in range(0, rows, MOST_ROWS):
        yield first, min(MOST_ROWS, rows - first)


class NativeLinear:
    """x W^T + b in float32, W kept in bfloat16 where that loses nothing (as of most checkpoints), else in float32.

    A row's result does not depend on the rows beside it, nor on the number of threads.
    Raises RuntimeError where there are no kernels (`native_works`).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        weight = weight.float()
        half = weight.bfloat16()
        self._set(half if torch.equal(half.float(), weight) else weight.contiguous(), None, bias)

    def _set(self, stored: Tensor, scale: Tensor | None, bias: Tensor | None) -> None:
        library = kernels()
        if library is None:
            raise RuntimeError("no native kernels here")
        self.stored = stored
        self._scale = scale
        self._bias = None if bias is None else bias.float().contiguous()
        self._out, size = stored.shape
        self._run = library.linear
        self._run_normalised = library.normalised_linear
        self._pick, self._pick_scratch = library.pick, library.pick_scratch
        self._scratch = threading.local()
        self.matrix = Matrix(
            stored.data_ptr(),
            None if scale is None else scale.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            KINDS[stored.dtype],
            size,
            self._out,
        )
        self._address = addressof(self.matrix)
        self.num_bytes = stored.numel() * stored.element_size() + (0 if scale is None else 4 * self._out)

    @property
    def tensors(self) -> list[Tensor]:
        """The memory that `matrix` points to."""
        return [tensor for tensor in (self.stored, self._scale, self._bias) if tensor is not None]

    @property
    def weight(self) -> Tensor:
        """The weight in float32, [out, in]."""
        full = self.stored.float()
        return full if self._scale is None else full.mul_(self._scale.unsqueeze(1))

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in]. Returns [rows, out]."""
        if _operators_only.get():
            return self._by_operators(x)
        return self._multiply(x.contiguous(), None)

    def _multiply(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """x, residual: contiguous."""
        rows, size = x.shape
        y, threads = x.new_empty(rows, self._out), num_threads()
        for first, count in pieces(rows):
            job = self._run(
                self._address,
                x.data_ptr() + 4 * first * size,
                count,
                None if residual is None else residual.data_ptr() + 4 * first * self._out,
                y.data_ptr() + 4 * first * self._out,
                threads,
            )
            if job:
                keep(job, self, x, residual)
        return y

    def _by_operators(self, x: Tensor) -> Tensor:
        if self.stored.dtype == torch.float32:
            return F.linear(x, self.stored, self._bias)
        step = max(_CONVERTED // self.stored.shape[1], 1)
        y = x.new_empty(x.shape[0], self._out)
        room = x.new_empty(min(step, self._out), self.stored.shape[1])
        for first in range(0, self._out, step):
            part = self.stored[first : first + step]
            full = room[: part.shape[0]].copy_(part)
            torch.mm(x, full.t(), out=y[:, first : first + step])
        if self._scale is not None:
            y.mul_(self._scale)
        return y if self._bias is None else y.add_(self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x W^T + b."""
        if _operators_only.get():
            return self._by_operators(x).add_(residual)
        return self._multiply(x.contiguous(), residual.contiguous())

    def of_normalised(self, norm: RMSNorm, x: Tensor) -> Tensor:
        """norm(x) W^T + b in one call; x: [rows, in]."""
        factors = norm.factors
        if factors is None or _operators_only.get():
            return self(norm(x))
        x, threads = x.contiguous(), num_threads()
        rows, size = x.shape
        y = x.new_empty(rows, self._out)
        for first, count in pieces(rows):
            job = self._run_normalised(
                self._address,
                factors.data_ptr(),
                norm.eps,
                x.data_ptr() + 4 * first * size,
                count,
                y.data_ptr() + 4 * first * self._out,
                threads,
            )
            if job:
                keep(job, self, x, factors)
        return y

    def choices_of_normalised(self, norm: RMSNorm, x: Tensor, detail: Detail) -> Choices:
        """What the rows of `of_normalised`, as logits, come to; none of them is stored. x: [rows, in]."""
        factors = norm.factors
        if factors is None or _operators_only.get():
            return choices_in_pieces(x, self._out, lambda piece: self.of_normalised(norm, piece), detail)
        x = x.contiguous()
        if x.shape[0] <= MOST_ROWS:
            return self._choices(factors, norm.eps, x, detail)
        parts = [self._choices(factors, norm.eps, part, detail) for part in x.split(MOST_ROWS)]
        return Choices(torch.cat([p.tokens for p in parts]), torch.cat([p.numbers for p in parts], dim=1))

    def _choices(self, factors: Tensor, eps: float, x: Tensor, detail: Detail) -> Choices:
        """x: contiguous, of no more rows than the kernels take at once."""
        rows = x.shape[0]
        choices, scratch = empty_choices(rows, detail), self._scratch_for(rows)
        job = self._pick(
            self._address,
            factors.data_ptr(),
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
        """Memory for one call of `pick`, this thread's own; it grows with the number of rows."""
        held: tuple[int, Tensor] | None = getattr(self._scratch, "memory", None)
        if held is None or held[0] < rows:
            size = self._pick_scratch(self._address, rows)
            held = self._scratch.memory = rows, torch.empty(-(-size // 8), dtype=torch.int64, device="cpu")
        return held[1]


class NativeInt8Linear(NativeLinear):
    """The same with W rounded to 8 bits, one scale per output; the inputs are not rounded.

    Another model than the one with the full weights: "the model's own output" then means this one's.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        weight = weight.float()
        scale = weight.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        self._set((weight / scale.unsqueeze(1)).round_().to(torch.int8), scale, bias)


@cache
def _compute_right() -> bool:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(37, 53, generator=generator)
    x = torch.randn(11, 53, generator=generator)
    for linear in (NativeLinear(weight), NativeLinear(weight.bfloat16()), NativeInt8Linear(weight)):
        if not torch.allclose(linear(x), F.linear(x, linear.weight), rtol=1e-4, atol=1e-4):
            return False
    return True


def native_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for this device and dtype, and they compute what `F.linear` does."""
    return device.type == "cpu" and dtype == torch.float32 and kernels() is not None and _compute_right()
