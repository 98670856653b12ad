"""Tensors of a safetensors file where they lie in the mapped file, and the memory of those that were read given back.

The package safetensors maps files as well, but a page that was read stays resident as long as the file is open. Of a model
that fills most of the memory, the file would then be in it twice.
"""

from __future__ import annotations

import json
import mmap
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
_AHEAD = 256 << 20  # bytes after a tensor that the system is asked to read meanwhile


class MappedSafetensors:
    """A file that the package safetensors has opened, and so checked, before."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            self._header: dict[str, Any] = json.loads(file.read(size))
            # Copied on write: nobody writes, and PyTorch has no tensors that cannot be written to.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._start = 8 + size
        self._viewed: list[tuple[int, int]] = []

    def tensor(self, name: str) -> Tensor | None:
        """A view of the file until `forget`; None for a tensor that is not of floats, or not aligned."""
        said = self._header[name]
        dtype, (first, last) = _DTYPES.get(said["dtype"]), said["data_offsets"]
        begin, end = self._start + first, self._start + last
        if dtype is None or begin % dtype.itemsize or first == last:
            return None
        self._advise("MADV_WILLNEED", end, min(end + _AHEAD, len(self._map)))
        self._viewed.append((begin, end))
        flat = torch.frombuffer(self._map, dtype=dtype, count=(last - first) // dtype.itemsize, offset=begin)
        return flat.view(said["shape"])

    def forget(self) -> None:
        """Give back the memory of what was viewed. A view is read from the file again if somebody still has it."""
        for begin, end in self._viewed:
            self._advise("MADV_DONTNEED", begin, end)
        self._viewed.clear()

    def _advise(self, advice: str, begin: int, end: int) -> None:
        page = mmap.PAGESIZE
        begin = begin // page * page
        if end > begin and hasattr(mmap, advice):  # not on every system
            self._map.madvise(getattr(mmap, advice), begin, end - begin)
