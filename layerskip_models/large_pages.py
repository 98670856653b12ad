"""Memory in large pages, where the system gives them to who asks: what is read from end to end then takes fewer look-ups."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache

from torch import Tensor

PAGE = 2 << 20
"""Bytes of a large page; 4 KiB is the usual size."""


@cache
def _madvise() -> ctypes._NamedFuncPointer | None:
    """The C library's, or None on a system that has no such pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return function


def ask_for_large_pages(tensor: Tensor) -> int:
    """Ask for the tensor's memory to be in large pages, before anything is written to it. It must be on a CPU.

    Returns for how many bytes, those of whole pages; 0 where there are none or the system refuses, which changes nothing.
    """
    ask = _madvise()
    first = -(-tensor.data_ptr() // PAGE) * PAGE
    size = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // PAGE * PAGE - first
    if ask is None or size <= 0:
        return 0
    return size if ask(first, size, mmap.MADV_HUGEPAGE) == 0 else 0
