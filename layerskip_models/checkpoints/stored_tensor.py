"""A parameter that stays in its file until its place in memory is known, and then goes there a few rows at a time.

A row is read once, by one of a few threads, and takes its final form while it is in a cache: copied, widened to float32,
rounded to 8 bits, or in the file's own 4 bits. So no matrix is in memory twice, and none is in float32 that does not stay so.
Without the native library PyTorch and gguf do the same, one thread at a time, which is slower.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from layerskip_models.checkpoints.finite import is_finite, not_finite
from layerskip_models.checkpoints.gguf_blocks import numbers_of_blocks, room_for_numbers
from layerskip_models.checkpoints.read_ahead import ReadAhead, ReadFile
from layerskip_models.grouped_weight import GroupedWeight
from layerskip_models.kernels import library
from layerskip_models.kernels.threads import num_threads

FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
"""Forms of unquantised numbers, as safetensors and GGUF files call them."""
_KINDS = {
    name: kind
    for kind, name in enumerate(
        ("F32", "BF16", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")
    )
}
"""`enum Stored` of stored.h."""
_PIECE = 1 << 19  # bytes of a file that are read at a time, and worked on while they are in a cache
_SHARE = 1 << 22
"""Bytes that one thread reads before it takes others. Two threads that write to one large page for the first time would both
prepare it, one of them for nothing."""
_MAX_THREADS = 8
_Work = Callable[[range, Tensor | None], bool]
"""Called with some rows of a file and the places where they go; says whether their numbers are finite."""


class TensorReader:
    """The threads that read tensors, and what is asked for ahead of them. Close it when all are read."""

    def __init__(self) -> None:
        self.ahead = ReadAhead()
        self._threads = max(1, min(num_threads(), _MAX_THREADS))
        self._pool = ThreadPoolExecutor(self._threads, "reading")
        self._scratch = threading.local()

    def scratch(self, name: str, size: int) -> Tensor:
        """Memory of the calling thread, uint8 [size], that it gets again when it asks again."""
        held: Tensor | None = getattr(self._scratch, name, None)
        if held is None or len(held) < size:
            held = torch.empty(size, dtype=torch.uint8, device="cpu")
            setattr(self._scratch, name, held)
        return held[:size]

    def every(self, work: Callable[[range], bool], shares: list[range]) -> bool:
        """Whether the work on every share says True."""
        if self._threads == 1 or len(shares) < 2 or library.kernels() is None:
            return all(map(work, shares))
        return all([*self._pool.map(work, shares)])

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A matrix [out, in] in a file, or a vector, which is one row.

    form: of its numbers, as safetensors and GGUF files call it. row_bytes: of a row in the file. dtype: that its numbers are
    meant to have. order: the file's row of each row of the parameter; None where they are in order. is_quantised: whether
    they are to be kept. checkpoint, name: for messages.
    """

    reader: TensorReader = field(repr=False)
    file: ReadFile = field(repr=False)
    begin: int
    shape: tuple[int, ...]
    form: str
    row_bytes: int
    dtype: torch.dtype
    checkpoint: str
    name: str
    order: Tensor | None = None
    is_quantised: bool = False

    @property
    def rows(self) -> int:
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def num_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def is_exact(self) -> bool:
        """Whether `dtype` holds the file's numbers."""
        return self.dtype == FLOATS.get(self.form, torch.float32)

    def tensor(self) -> Tensor:
        """Its numbers in new memory, in `dtype`. Raises ValueError if one is not finite, as do all that follow."""
        room = torch.empty(self.rows, self.columns, dtype=self.dtype, device="cpu")
        self.into(room, None)
        return room.view(self.shape)

    def into(self, room: Tensor, places: Tensor | None) -> None:
        """Write its numbers to rows of a matrix of any float dtype. places: which rows, int64; None for all, in order."""
        if room.dtype == FLOATS.get(self.form):
            self._for_rows(partial(self._copy, room), places)
        elif room.dtype == torch.float32 and library.kernels() is not None:
            self._for_rows(partial(self._widen, room), places)
        else:
            self._for_rows(partial(self._convert, room), places, alone=True)

    def eight_bits_into(self, rounded: Tensor, scales: Tensor, places: Tensor | None) -> None:
        """Write its numbers rounded to 8 bits, as `NativeInt8Linear` rounds them. Only with the native library.

        rounded: int8 [rows, in]. scales: float32 [rows].
        """
        self._for_rows(partial(self._round, rounded, scales), places)

    def read_quantised_into(self, room: GroupedWeight, places: Tensor | None) -> None:
        """Write its own numbers to rows of a weight that `room_for_numbers` made."""
        self._for_rows(partial(self._repack, room), places, alone=library.kernels() is None)

    def quantised(self) -> GroupedWeight:
        """Its own numbers in new memory."""
        room = room_for_numbers(self.rows, self.columns, self.form)
        self.read_quantised_into(room, None)
        return room

    def _for_rows(self, work: _Work, places: Tensor | None, *, alone: bool = False) -> None:
        """Run `work` on all rows, a few at a time. alone: by the calling thread, whose operators have threads themselves."""
        if self.order is not None:
            own = torch.arange(self.rows) if places is None else places
            places = torch.empty_like(own)
            places[self.order] = own
        if places is not None and torch.equal(places, torch.arange(self.rows)):
            places = None
        step = max(_PIECE // self.row_bytes, 1)

        def do(share: range) -> bool:
            finite = True
            for first in share[::step]:
                piece = range(first, min(first + step, share.stop))
                self.reader.ahead.reached(self.file, self.begin, piece.start * self.row_bytes)
                finite &= work(piece, None if places is None else places[piece.start : piece.stop])
            place, size = self.begin + share.start * self.row_bytes, len(share) * self.row_bytes
            self.reader.ahead.passed(self.file, place, size)
            return finite

        rows = step * max(_SHARE // _PIECE, 1)
        shares = [range(first, min(first + rows, self.rows)) for first in range(0, self.rows, rows)]
        if not (all(map(do, shares)) if alone else self.reader.every(do, shares)):
            raise not_finite(self.checkpoint, self.name)

    def _read(self, piece: range, room: Tensor | None = None) -> Tensor:
        """Read these rows as the file has them, uint8 [rows, row_bytes]: into `room`, or the thread's scratch."""
        size = len(piece) * self.row_bytes
        flat = self.reader.scratch("read", size) if room is None else room.view(torch.uint8).view(-1)
        self.file.read(flat.numpy().data, self.begin + piece.start * self.row_bytes)
        return flat.view(len(piece), self.row_bytes)

    def _copy(self, room: Tensor, piece: range, places: Tensor | None) -> bool:
        """Numbers that stay what they are are read where they go, unless their rows are in another order."""
        if places is None:
            return _are_finite(self._read(piece, room[piece.start : piece.stop]).view(room.dtype), self.form)
        found = self._read(piece).view(room.dtype)
        numbers = torch.int64 if room.dtype.itemsize == 8 else torch.int32 if room.dtype.itemsize == 4 else torch.int16
        room.view(numbers).numpy()[places.numpy()] = found.view(numbers).numpy()
        return _are_finite(found, self.form)

    def _widen(self, room: Tensor, piece: range, places: Tensor | None) -> bool:
        kernels = library.kernels()
        assert kernels is not None
        kind, found = self._of_kernels(piece)
        target = _rows_from(room, piece, places)
        return bool(kernels.float_rows(kind, *_described(found, self.columns), _address(places), target.data_ptr()))

    def _convert(self, room: Tensor, piece: range, places: Tensor | None) -> bool:
        found = self._floats(piece)
        if places is None:
            room[piece.start : piece.stop] = found
        else:
            room[places] = found.to(room.dtype)
        return is_finite(found)

    def _round(self, rounded: Tensor, scales: Tensor, piece: range, places: Tensor | None) -> bool:
        kernels = library.kernels()
        assert kernels is not None
        kind, found = self._of_kernels(piece)
        row = self.reader.scratch("row", 4 * self.columns)
        numbers, factors = (_rows_from(one, piece, places) for one in (rounded, scales))
        return bool(
            kernels.eight_bit_rows(
                kind,
                *_described(found, self.columns),
                _address(places),
                row.data_ptr(),
                numbers.data_ptr(),
                factors.data_ptr(),
            )
        )

    def _repack(self, room: GroupedWeight, piece: range, places: Tensor | None) -> bool:
        kernels, found = library.kernels(), self._read(piece)
        if kernels is None:
            own = slice(piece.start, piece.stop) if places is None else places
            made = numbers_of_blocks(found, self.form)
            for target, numbers in zip(room.tensors, made.tensors):
                if target is not None and numbers is not None:
                    target[own] = numbers
            return made.is_finite()
        targets = (
            None if one is None else _rows_from(one, piece, places).data_ptr()
            for one in (room.packed, room.groups, room.offsets, room.blocks)
        )
        to = library.Blocks(*targets)
        rows = _described(found, self.columns)
        return bool(kernels.block_rows(_KINDS[self.form], *rows, _address(places), byref(to)))

    def _of_kernels(self, piece: range) -> tuple[int, Tensor]:
        """Read these rows in a form that the native library reads: its number, and uint8 [rows, bytes]."""
        if self.form in _KINDS:
            return _KINDS[self.form], self._read(piece)
        return _KINDS["F32"], self._floats(piece).float().contiguous().view(torch.uint8)

    def _floats(self, piece: range) -> Tensor:
        """Read these rows as gguf converts them, [rows, in]."""
        found = self._read(piece)
        if self.form in FLOATS:
            return found.view(FLOATS[self.form])
        from gguf import GGMLQuantizationType, dequantize

        return torch.from_numpy(np.array(dequantize(found.numpy(), GGMLQuantizationType[self.form])))


def _are_finite(found: Tensor, form: str) -> bool:
    kernels = library.kernels()
    if kernels is None or form not in _KINDS:
        return is_finite(found)
    return bool(kernels.finite_numbers(_KINDS[form], found.data_ptr(), found.numel()))


def _described(found: Tensor, columns: int) -> tuple[int, int, int, int]:
    """Make the native library's arguments for rows of a file."""
    return found.data_ptr(), len(found), columns, found.shape[1]


def _rows_from(room: Tensor, piece: range, places: Tensor | None) -> Tensor:
    """Return what places are counted from: all of it, or the rows that these rows of the file go to in order."""
    return room if places is not None else room[piece.start :]


def _address(places: Tensor | None) -> int | None:
    return None if places is None else places.data_ptr()
