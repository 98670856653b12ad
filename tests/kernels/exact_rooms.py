"""Kernels in memory of exactly the size that they ask for: what is written behind it is found."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from layerskip_models.kernels import library
from layerskip_models.kernels.native_linear import NativeLinear
from layerskip_models.kernels.threads import on_threads


@contextmanager
def exact_rooms() -> Iterator[None]:
    """Every request for memory within it gets as much and no more. Fails if a byte behind any of it has changed."""
    loaded = library._library()
    count = loaded.pool_overruns
    count.restype = ctypes.c_int64
    before = count()
    exact = loaded.pool_exact_rooms(1)
    try:
        yield
        for threads in (1, 4):  # the guards of the last requests are looked at when the next ones are made
            with on_threads(threads):
                NativeLinear(torch.ones(512, 64))(torch.ones(1, 64))
    finally:
        loaded.pool_exact_rooms(exact)
    assert count() == before, "the kernels wrote behind the memory that they asked for"
