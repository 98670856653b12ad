"""Large memory pages for weights, keys and values: with small ones, a TLB miss costs as much as reading much of the page."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

from torch import Tensor

LARGE = 1 << 21  # bytes of a large page on x86-64, and on most aarch64
_ADVISE_LARGE, _COLLAPSE = 14, 25  # MADV_HUGEPAGE and MADV_COLLAPSE (Linux 6.1) of madvise(2)


@cache
def _advise() -> ctypes._NamedFuncPointer | None:
    if not sys.platform.startswith("linux"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise


def use_large_pages(tensor: Tensor) -> None:
    """Ask the system to move a CPU tensor's memory to large pages, as far as whole ones fit within it. Its data is unchanged.

    Nothing happens if the system has no large pages or refuses, for example because the memory is a mapped file.
    """
    _ask(tensor, _ADVISE_LARGE)
    _ask(tensor, _COLLAPSE)


def expect_large_pages(tensor: Tensor) -> None:
    """Ask for large pages for a tensor that has not been written to yet. They are allocated on first write."""
    _ask(tensor, _ADVISE_LARGE)


def _ask(tensor: Tensor, advice: int) -> None:
    first = -(-tensor.data_ptr() // LARGE) * LARGE
    size = (tensor.data_ptr() + tensor.numel() * tensor.element_size() - first) // LARGE * LARGE
    advise = _advise()
    if advise is not None and size > 0:
        advise(first, size, advice)
