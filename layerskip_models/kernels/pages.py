"""Weights, keys and values in large pages of memory: finding a page costs as much as reading a good part of it."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

from torch import Tensor

LARGE = 1 << 21  # bytes of a large page on x86-64, and on most aarch64
_ADVISE_LARGE, _COLLAPSE = 14, 25  # of madvise(2): ask for large pages; make some of the pages there are (Linux 6.1)


@cache
def _advise() -> ctypes._NamedFuncPointer | None:
    if not sys.platform.startswith("linux"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise


def use_large_pages(tensor: Tensor) -> None:
    """Ask the system to keep a CPU tensor's memory in large pages, as far as whole ones lie within it. Its numbers stay.

    Where the system has none, or will not, for example because the memory is a mapped file, nothing happens.
    """
    _ask(tensor, _ADVISE_LARGE)
    _ask(tensor, _COLLAPSE)


def expect_large_pages(tensor: Tensor) -> None:
    """The same before anything was written to it: the memory is taken as it is written, in large pages from the beginning."""
    _ask(tensor, _ADVISE_LARGE)


def _ask(tensor: Tensor, advice: int) -> None:
    first = -(-tensor.data_ptr() // LARGE) * LARGE
    size = (tensor.data_ptr() + tensor.numel() * tensor.element_size() - first) // LARGE * LARGE
    advise = _advise()
    if advise is not None and size > 0:
        advise(first, size, advice)
