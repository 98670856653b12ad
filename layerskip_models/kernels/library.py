"""Load the package's native library, and choose the variant of its functions that suits this processor.

`setup.py` builds the library when the package is built or installed. Nothing is compiled at run time, and no file from
outside the installed package is loaded. If the library is missing or unusable, `kernels()` warns once with the reason and
returns None, and PyTorch's operators do the work. The environment variable SELFSPEC_NATIVE changes that:

    0          never use the library
    require    raise an error, with the reason, if it cannot be used
    a variant  ("baseline", "avx2", ..) use this variant, and raise an error if it cannot be used
"""

from __future__ import annotations

import atexit
import ctypes
import os
import struct
import warnings
from collections.abc import Callable
from ctypes import POINTER, Structure, c_double, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

LIBRARY = Path(__file__).with_name("libkernels.so")
VARIANTS = ("amx", "vnni", "avx512", "avx2", "neon", "baseline")
"""Variants that the functions may be compiled for, best first. setup.py has their compiler flags."""
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.uint8: 4}
"""`enum Kind` of matrix.h, by the dtype a weight is stored in. In a uint8 are numbers in groups: `GROUPED_KINDS`."""
GROUPED_KINDS = {4: 4, 8: 5, 6: 6}
"""`enum Kind` of numbers in groups, by their bits."""
SCALES = {torch.float16: 0, torch.float32: 1, torch.uint8: 2, torch.int8: 3}
"""`enum Scales` of matrix.h, by the dtype of the groups' scales."""
SECTION = 512
"""Positions whose softmax is computed together (attention.h). Longer texts may be divided among threads."""


class KernelsUnavailableError(RuntimeError):
    """The native library cannot be used here; the message says why."""


class Matrix(Structure):
    """`Matrix` of matrix.h: a weight [out, in] with its scales, offsets and bias."""

    _fields_ = (
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("kind", c_int64),
        ("in_features", c_int64),
        ("out_features", c_int64),
        ("groups", c_void_p),
        ("offsets", c_void_p),
        ("group", c_int64),
        ("scales", c_int64),
        ("blocks", c_void_p),
        ("zero", c_int64),
        ("interleaved", c_int64),
    )


class Layer(Structure):
    """`Layer` of pass.h."""

    _fields_ = (
        ("qkv", Matrix),
        ("output", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("input_norm", c_void_p),
        ("post_attention_norm", c_void_p),
        ("output_norm", c_void_p),
        ("down_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("window", c_int64),
        ("joint", c_int32),
        ("rotated", c_int32),
    )


class AdapterWeights(Structure):
    """`Adapter` of kernels.c."""

    _fields_ = (("gate_up", Matrix), ("down", Matrix), ("norm", c_void_p))


class Shape(Structure):
    """`Shape` of pass.h."""

    _fields_ = (
        ("hidden", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("eps", c_float),
        ("scale", c_float),
    )


class Span(Structure):
    """`Span` of pass.h: consecutive rows of one text, and its KV cache."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("layer_stride", c_int64),
        ("head_stride", c_int64),
        ("position", c_int64),
        ("rows", c_int64),
        ("kind", c_int64),
    )


class Step(Structure):
    """`Step` of kernels.c."""

    _fields_ = (
        ("shape", c_void_p),
        ("layers", c_void_p),
        ("spans", c_void_p),
        ("num_spans", c_int64),
        ("embedding", c_void_p),
        ("kind", c_int64),
        ("embedded", c_void_p),
        ("x", c_void_p),
        ("rotary", c_void_p),
        ("outputs", c_void_p),
        ("last", c_void_p),
        ("first", c_int64),
        ("count", c_int64),
        ("rows", c_int64),
        ("stride", c_int64),
        ("scratch", c_void_p),
        ("head", c_void_p),
        ("norm", c_void_p),
        ("eps", c_float),
        ("spread", c_int32),
        ("summaries", c_void_p),
        ("tokens", c_void_p),
        ("numbers", c_void_p),
        ("logits", c_void_p),
        ("adapter", c_void_p),
        ("adapted", c_void_p),
        ("parts", c_void_p),
    )


class Drafts(Structure):
    """`Drafts` of sampling.h."""

    _fields_ = (
        ("count", c_int64),
        ("copied", c_int64),
        ("tokens", c_void_p),
        ("q", c_void_p),
        ("uniforms", c_void_p),
        ("rates", c_void_p),
    )


class Blocks(Structure):
    """`Blocks` of stored.h."""

    _fields_ = (("numbers", c_void_p), ("groups", c_void_p), ("offsets", c_void_p), ("blocks", c_void_p))


class Grouping(Structure):
    """`Grouping` of four_bit_rounding.h."""

    _fields_ = (
        ("size", c_int64),
        ("trials", c_int64),
        ("steps", c_void_p),
        ("least", c_int64),
        ("most", c_int64),
    )


@dataclass(frozen=True, slots=True)
class Kernels:
    """The library's functions, compiled for one of `VARIANTS`."""

    variant: str
    linear: Callable[..., int]
    normalised_linear: Callable[..., int]
    interleaves: Callable[[int, int, int], int]
    scratch_size: Callable[..., int]
    pick: Callable[..., int]
    pick_scratch: Callable[..., int]
    adapt: Callable[..., int]
    step: Callable[..., int]
    parts_size: Callable[..., int]
    division: Callable[..., None]
    eight_bit_rows: Callable[..., int]
    float_rows: Callable[..., int]
    block_rows: Callable[..., int]
    four_bit_rows: Callable[..., int]
    finite_numbers: Callable[..., int]
    interleave: Callable[..., None]
    look: Callable[..., None]
    distribute: Callable[..., None]
    residual: Callable[..., None]
    draw: Callable[..., int]
    accept: Callable[..., int]


_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "linear": (c_int64, [c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int]),
    "normalised_linear": (c_int64, [c_void_p, c_void_p, c_float, c_void_p, c_int64, c_void_p, c_int]),
    "interleaves": (c_int, [c_int64, c_int64, c_int64]),
    "scratch_size": (c_int64, [POINTER(Shape), c_void_p, c_int64]),
    "pick": (c_int64, [c_void_p, c_void_p, c_float, c_void_p, c_int64, c_void_p, c_int, c_void_p, c_void_p, c_int]),
    "pick_scratch": (c_int64, [c_void_p, c_int64]),
    "adapt": (c_int64, [c_void_p, c_float, c_void_p, c_int64, c_void_p, c_void_p, c_int]),
    "step": (c_int64, [c_void_p, c_int]),
    "parts_size": (c_int64, [c_void_p]),
    "division": (None, [c_void_p, c_int64, c_void_p, c_int64, c_int, c_void_p]),
    "eight_bit_rows": (c_int, [c_int, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p]),
    "float_rows": (c_int, [c_int, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p]),
    "finite_numbers": (c_int, [c_int, c_void_p, c_int64]),
    "interleave": (None, [c_void_p, c_int64, c_int64, c_int, c_uint32, c_void_p]),
    "look": (None, [c_void_p, c_int64, c_int64, c_void_p, c_int, c_void_p, c_void_p]),
    "distribute": (None, [c_void_p, c_int64, c_float, c_int64, c_double, c_void_p, c_void_p]),
    "residual": (None, [c_void_p, c_void_p, c_int64, c_void_p]),
    "draw": (c_int64, [c_void_p, c_int64, c_double]),
    "accept": (
        c_int64,
        [c_void_p, c_int64, c_int64, c_float, c_int64, c_double, POINTER(Drafts), c_double, c_void_p, c_void_p, c_void_p,
         c_void_p],
    ),
    "block_rows": (c_int, [c_int, c_void_p, c_int64, c_int64, c_int64, c_void_p, POINTER(Blocks)]),
    "four_bit_rows": (
        c_int,
        [c_int, c_void_p, c_int64, c_int64, c_int64, POINTER(Grouping), c_void_p, c_void_p, c_void_p, c_void_p, c_void_p],
    ),
}  # fmt: skip


@cache
def _library() -> ctypes.CDLL:
    """Load the library. Raises KernelsUnavailableError."""
    if not LIBRARY.is_file():
        raise KernelsUnavailableError(
            f"{LIBRARY.name} is not in the installed package: reinstall selfspec on a machine with a C compiler, "
            "or install a wheel built on one"
        )
    if _is_cut_short(LIBRARY):
        raise KernelsUnavailableError(f"{LIBRARY.name} is cut short: reinstall selfspec")
    try:
        return ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise KernelsUnavailableError(f"{LIBRARY.name} cannot be loaded: {error}") from error


def _is_cut_short(path: Path) -> bool:
    """Whether an ELF file ends before its section headers, which come last. Loading such a file would kill the process."""
    with path.open("rb") as file:
        header = file.read(64)
    if header[:6] != b"\x7fELF\x02\x01":  # 64 bits, little endian; the loader itself refuses other files
        return False
    if len(header) < 64:
        return True
    (start,), (size, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    return path.stat().st_size < start + size * count


@dataclass(frozen=True, slots=True)
class Pool:
    """What Python calls in pool.h, and the setter of OpenMP's number of threads if PyTorch has loaded OpenMP."""

    oldest: Callable[[], int]
    omp_set_num_threads: Callable[[int], None] | None


@cache
def pool() -> Pool:
    """Return the native library's threads, which end with the interpreter. Raises KernelsUnavailableError."""
    library = _library()
    library.pool_oldest.restype = c_int64
    atexit.register(library.pool_stop)
    return Pool(library.pool_oldest, getattr(ctypes.CDLL(None), "omp_set_num_threads", None))


def runnable_variants() -> tuple[str, ...]:
    """List the variants that were built and that this processor can run, best first.

    Raises KernelsUnavailableError.
    """
    library = _library()
    return tuple(
        name for name in VARIANTS if hasattr(library, f"step_{name}") and getattr(library, f"runs_{name}", int)()
    )


@cache
def load(variant: str | None = None) -> Kernels:
    """Load the functions of one variant, the best one for this processor by default. Raises KernelsUnavailableError."""
    runnable = runnable_variants()
    if not runnable or (variant is not None and variant not in runnable):
        raise KernelsUnavailableError(
            f"{LIBRARY.name} has no variant {variant or 'for this processor'!r} that can run here; "
            f"it has {', '.join(runnable) or 'none'}"
        )
    chosen = runnable[0] if variant is None else variant
    functions = {}
    for name, (result, arguments) in _SIGNATURES.items():
        function = functions[name] = getattr(_library(), f"{name}_{chosen}")
        function.restype, function.argtypes = result, arguments
    return Kernels(chosen, **functions)


@cache
def kernels() -> Kernels | None:
    """Return this process's functions, or None if PyTorch's operators do the work. See SELFSPEC_NATIVE above.

    Raises KernelsUnavailableError if the environment demands kernels that cannot be used, ValueError if it asks for something
    unknown.
    """
    choice = os.environ.get("SELFSPEC_NATIVE") or "1"
    if choice == "0":
        return None
    if choice not in ("1", "require", *VARIANTS):
        raise ValueError(f"SELFSPEC_NATIVE must be 0, 1, require or one of {', '.join(VARIANTS)}, got {choice!r}")
    try:
        return load(choice if choice in VARIANTS else None)
    except KernelsUnavailableError as error:
        refuse(str(error))
        return None


def refuse(reason: str) -> None:
    """Warn why the kernels are not used; raise KernelsUnavailableError instead if the environment demands them."""
    choice = os.environ.get("SELFSPEC_NATIVE") or "1"
    if choice != "1":
        raise KernelsUnavailableError(f"SELFSPEC_NATIVE={choice}, but {reason}")
    warnings.warn(f"no native kernels, decoding will be slower: {reason}", RuntimeWarning, stacklevel=3)
