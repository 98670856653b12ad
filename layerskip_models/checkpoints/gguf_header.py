"""Whether a GGUF file's header can be right, before `gguf` reads it: a damaged count would keep that busy for ever.

The layout is that of the GGUF specification, versions 2 and 3: keys with typed values, then a description of each tensor.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value by its type, of those with a fixed size."""
_LEAST = {**_SIZES, _STRING: 8, _ARRAY: 12}
_LEAST_TENSOR = 24  # the description of a tensor without a name and dimensions
_MOST_NESTED = 4


class _Header:
    def __init__(self, file: BinaryIO, size: int, order: str) -> None:
        self._file, self._size, self._order = file, size, order

    def check(self) -> None:
        tensors, keys = self._number("Q"), self._number("Q")
        self._fits(keys, 13)
        for _ in range(keys):
            self._skip_string()
            self._skip_value(self._number("I"), 0)
        self._fits(tensors, _LEAST_TENSOR)

    def _number(self, kind: str) -> int:
        width = struct.calcsize(f"={kind}")
        found = self._file.read(width)
        if len(found) < width:
            raise ValueError("its header is longer than the file")
        return int(struct.unpack(f"{self._order}{kind}", found)[0])

    def _fits(self, count: int, least: int) -> None:
        if count * least > self._size - self._file.tell():
            raise ValueError(f"its header has {count} entries where the file has no room for them")

    def _skip(self, count: int, width: int) -> None:
        self._fits(count, width)
        self._file.seek(count * width, 1)

    def _skip_string(self) -> None:
        self._skip(self._number("Q"), 1)

    def _skip_value(self, kind: int, nested: int) -> None:
        if kind in _SIZES:
            self._skip(1, _SIZES[kind])
        elif kind == _STRING:
            self._skip_string()
        elif kind == _ARRAY and nested < _MOST_NESTED:
            inner, count = self._number("I"), self._number("Q")
            if inner in _SIZES:
                self._skip(count, _SIZES[inner])
                return
            self._fits(count, _LEAST.get(inner, 1))
            for _ in range(count):
                self._skip_value(inner, nested + 1)
        else:
            raise ValueError(f"its header has a value of type {kind}")


def check_header(path: Path) -> None:
    """Raises ValueError for counts and lengths that the file has no room for, and for types that GGUF does not have."""
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise ValueError("it does not begin as a GGUF file")
        version = file.read(4)
        order = "<" if version[:2] != b"\0\0" else ">"
        _Header(file, path.stat().st_size, order).check()
