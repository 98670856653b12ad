"""The header of a GGUF file, and its tensors where they lie in the mapped file.

The package gguf has a reader, which makes several numpy arrays for every string: seconds for a vocabulary. This one checks
every count and length against the file's size before it is used, so a damaged one is an error at once.

The layout is that of the GGUF specification, versions 2 and 3 in little-endian order: keys with typed values, then a
description of each tensor, then the tensors, each at a multiple of the file's alignment.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerskip_models.checkpoints.weights import MappedFile

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_BOOL, _STRING, _ARRAY = 7, 8, 9
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
"""Formats of `struct` for values of a fixed size, by their type."""
_LEAST_KEY, _LEAST_TENSOR = 13, 24  # bytes of an entry with nothing in it
_MAX_NESTED, _MAX_DIMENSIONS = 4, 4


@dataclass(frozen=True, slots=True, eq=False)
class GgufTensor:
    """A tensor in the file. shape: the innermost dimension first, as the file has it.

    tensor_type: gguf's `GGMLQuantizationType`. begin: its place in the file. row_bytes: of a row there.
    """

    name: str
    tensor_type: Any
    shape: tuple[int, ...]
    begin: int
    row_bytes: int


class GgufReader:
    """A mapped file. Raises ValueError for one that is damaged; UnicodeDecodeError is one, too."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, MappedFile(path)
        self._view, self._at = self.file.view, 0
        if bytes(self._take(4)) != _MAGIC:
            raise ValueError("it does not begin as a GGUF file")
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}; versions 2 and 3 are read, in little-endian order")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        self._fits(num_keys, _LEAST_KEY)
        self._places: dict[str, int] = {}
        for _ in range(num_keys):
            key = self._string()
            if key in self._places:
                raise ValueError(f"it has {key} twice")
            self._places[key] = self._at
            self._value(self._number("I"), skip=True)
        self._fits(num_tensors, _LEAST_TENSOR)
        described = [self._described() for _ in range(num_tensors)]
        alignment = self.value("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"its alignment is {alignment!r}, which is no power of two")
        start = -(-self._at // alignment) * alignment
        self.tensors = [self._tensor(start, *one) for one in described]
        if len({tensor.name for tensor in self.tensors}) < len(self.tensors):
            raise ValueError("it has two tensors of one name")

    @property
    def keys(self) -> list[str]:
        return [*self._places]

    def value(self, key: str, default: Any = None) -> Any:
        """Return a key's value: a number, a bool, a string, or a list of these."""
        if key not in self._places:
            return default
        before, self._at = self._at, self._places[key]
        try:
            return self._value(self._number("I"))
        finally:
            self._at = before

    def length(self, key: str) -> int | None:
        """Entries of a key's list; None if there is no such list. Nothing of it is read."""
        if key not in self._places:
            return None
        kind, _, length = struct.unpack_from("<IIQ", self._view, self._places[key])
        return int(length) if kind == _ARRAY else None

    def _fits(self, count: int, least: int) -> None:
        if count * least > len(self._view) - self._at:
            raise ValueError(f"its header has {count} entries where the file has no room for them")

    def _take(self, size: int) -> memoryview:
        self._fits(size, 1)
        self._at += size
        return self._view[self._at - size : self._at]

    def _number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self._take(struct.calcsize(f"<{kind}")))[0]

    def _string(self) -> str:
        return str(self._take(self._number("Q")), "utf-8")

    def _value(self, kind: int, *, skip: bool = False, nested: int = 0) -> Any:
        """Read the value at hand. skip: pass over it and return None."""
        if kind in _FORMATS:
            found = self._number(_FORMATS[kind])
            return bool(found) if kind == _BOOL else found
        if kind == _STRING:
            text = self._take(self._number("Q"))
            return None if skip else str(text, "utf-8")
        if kind != _ARRAY or nested == _MAX_NESTED:
            raise ValueError(f"its header has a value of type {kind}")
        inner, count = self._number("I"), self._number("Q")
        if inner in _FORMATS:
            data = self._take(count * struct.calcsize(f"<{_FORMATS[inner]}"))
            if skip:
                return None
            numbers = list(struct.unpack(f"<{count}{_FORMATS[inner]}", data))
            return [*map(bool, numbers)] if inner == _BOOL else numbers
        self._fits(count, 8)
        if inner == _STRING:  # the vocabulary: most of the header
            return self._strings(count, skip)
        return [self._value(inner, skip=skip, nested=nested + 1) for _ in range(count)]

    def _strings(self, count: int, skip: bool) -> list[str] | None:
        """Read strings, or pass over them. A tuple kept for each would have Python's collector look at all of them often."""
        view, at, end, length_at = self._view, self._at, len(self._view) - 8, struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(count):
            if at > end:
                raise ValueError("its header is longer than the file")
            first = at + 8
            at = first + length_at(view, at)[0]
            if not skip:
                texts.append(str(view[first:at], "utf-8"))
        if at > len(view):
            raise ValueError("its header is longer than the file")
        self._at = at
        return None if skip else texts

    def _described(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read a tensor's name, shape, type and distance from the first one's place."""
        name, dimensions = self._string(), self._number("I")
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"its tensor {name} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))
        return name, shape, self._number("I"), self._number("Q")

    def _tensor(self, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        tensor_type = GGMLQuantizationType(kind)
        block, width = GGML_QUANT_SIZES[tensor_type]
        if not shape or shape[0] % block:
            raise ValueError(f"its tensor {name} has shape {list(shape)}, and blocks of {block} inputs are meant")
        row = shape[0] // block * width
        begin, size = start + offset, row * math.prod(shape[1:])
        if begin + size > len(self._view):
            raise ValueError(f"its tensor {name} reaches beyond the end of the file")
        return GgufTensor(name, tensor_type, shape, begin, row)
