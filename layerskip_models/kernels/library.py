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
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch

LIBRARY = Path(__file__).with_name("libkernels.so")
VARIANTS = ("amx", "vnni", "avx512", "avxvnni", "avx2", "dotprod", "neon", "baseline")
"""Variants that the functions may be compiled for, best first. setup.py has their compiler flags."""
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.uint8: 4}
"""`enum Kind` of matrix.h, by the dtype a weight is stored in. In a uint8 are numbers in groups: `GROUPED_KINDS`."""
GROUPED_KINDS = {4: 4, 8: 5, 6: 6}
"""`enum Kind` of numbers in groups, by their bits."""
SCALES = {torch.float16: 0, torch.float32: 1, torch.uint8: 2, torch.int8: 3}
"""`enum Scales` of matrix.h, by the dtype of the groups' scales."""
IN_ROWS = 2
"""`Matrix.interleaved` of an embedding in floats that no product reads (matrix.h)."""
SECTION = 512
"""Positions whose softmax is computed together (attention.h). Longer texts may be divided among threads."""


class KernelsUnavailableError(RuntimeError):
    """The native library cannot be used here; the message says why."""


_C_TYPES: dict[str, type] = {"pointer": c_void_p, "int64": c_int64, "int32": c_int32, "float": c_float}


def _fields(*declarations: str) -> list[tuple[str, type]]:
    """Read the fields of a struct, declared as in C: a type, then names."""
    found = []
    for declaration in declarations:
        kind, *names = declaration.replace(",", " ").split()
        found += [(name, _C_TYPES[kind]) for name in names]
    return found


class Matrix(Structure):
    """`Matrix` of matrix.h: a weight with its scales, offsets and bias."""

    _fields_ = _fields(
        "pointer weight, scale, bias",
        "int64 kind, in_features, out_features",
        "pointer groups, offsets",
        "int64 group, scales",
        "pointer blocks",
        "int64 zero, interleaved, row_bits",
    )


_C_TYPES["Matrix"] = Matrix


class Layer(Structure):
    """`Layer` of pass.h."""

    _fields_ = _fields(
        "Matrix qkv, output, gate_up, down",
        "pointer input_norm, post_attention_norm, output_norm, down_norm, query_norm, key_norm",
        "int64 window",
        "int32 joint, rotated",
        "pointer entry_norm",
    )


class AdapterWeights(Structure):
    """`Adapter` of kernels.c."""

    _fields_ = _fields("Matrix gate_up, down", "pointer norm")


class Shape(Structure):
    """`Shape` of pass.h."""

    _fields_ = _fields("int64 hidden, heads, kv_heads, head_dim", "float eps, scale")


class Span(Structure):
    """`Span` of pass.h: consecutive rows of one text, and its KV cache."""

    _fields_ = _fields("pointer keys, values", "int64 layer_stride, head_stride, position, rows, kind, loop")


class Step(Structure):
    """`Step` of kernels.c."""

    _fields_ = _fields(
        "pointer shape, layers, spans",
        "int64 num_spans",
        "pointer embedding, embedded, x, rotary, outputs, last",
        "int64 first, count, rows, stride",
        "pointer scratch, head, norm",
        "float eps",
        "int32 spread",
        "pointer summaries, tokens, numbers, logits, adapter, adapted, parts",
    )


class Drafts(Structure):
    """`Drafts` of sampling.h."""

    _fields_ = _fields("int64 count, copied", "pointer tokens, q, uniforms, reached")


class Blocks(Structure):
    """`Blocks` of stored.h."""

    _fields_ = _fields("pointer numbers, groups, offsets, blocks")


class Grouping(Structure):
    """`Grouping` of four_bit_rounding.h."""

    _fields_ = _fields("int64 size, trials", "pointer steps", "int64 least, most")


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
    "eight_bit_rows": (c_int, [c_int, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p]),
    "float_rows": (c_int, [c_int, c_void_p, c_int64, c_int64, c_int, c_void_p, c_void_p]),
    "finite_numbers": (c_int, [c_int, c_void_p, c_int64]),
    "interleave": (None, [c_void_p, c_int64, c_int64, c_int, c_uint32, c_void_p]),
    "lay_side_by_side": (None, [c_int64, c_void_p, c_int64, c_int64, c_void_p]),
    "look": (None, [c_void_p, c_int64, c_int64, c_void_p, c_int, c_void_p, c_void_p]),
    "distribute": (None, [c_void_p, c_int64, c_float, c_int64, c_double, c_void_p, c_void_p]),
    "draw": (c_int64, [c_void_p, c_int64, c_double]),
    "accept": (
        c_int64,
        [c_void_p, c_int64, c_int64, c_float, c_int64, c_double, POINTER(Drafts), c_double, c_void_p, c_void_p, c_void_p,
         c_void_p],
    ),
    "block_rows": (c_int, [c_int, c_void_p, c_int64, c_int64, POINTER(Blocks), c_int64, c_void_p]),
    "rows": (None, [c_void_p, c_void_p, c_int64, c_void_p]),
    "four_bit_rows": (
        c_int,
        [c_int, c_void_p, c_int64, c_int64, c_int64, POINTER(Grouping), c_void_p, c_void_p, c_void_p, c_void_p, c_void_p],
    ),
}  # fmt: skip


class Kernels:
    """The library's functions, compiled for one of `VARIANTS`: an attribute for each name in `_SIGNATURES`."""

    def __init__(self, variant: str) -> None:
        self.variant = variant
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(_library(), f"{name}_{variant}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        atexit.register(_library().pool_stop)  # the library's threads end with the interpreter

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., int]: ...


@cache
def _library() -> ctypes.CDLL:
    """Load the library. Raises KernelsUnavailableError."""
    if not LIBRARY.is_file():
        raise KernelsUnavailableError(f"{LIBRARY.name} {_why_missing()}")
    if _is_cut_short(LIBRARY):
        raise KernelsUnavailableError(f"{LIBRARY.name} is cut short: reinstall selfspec")
    try:
        return ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise KernelsUnavailableError(f"{LIBRARY.name} cannot be loaded: {error}") from error


def _why_missing() -> str:
    """Say where the library is not, and what to do about it."""
    folder = LIBRARY.parents[2]
    if not (folder / "setup.py").is_file():
        return "is not in the installed package: reinstall selfspec on a machine with a C compiler, or install a wheel"
    for found in metadata.distributions(name="selfspec"):
        installed = Path(str(found.locate_file("")))
        if (installed / LIBRARY.relative_to(folder)).is_file():
            return (
                f"is not among the sources in {folder}, which Python found before the package installed in {installed}: "
                f"run from another folder, or pip install -e {folder}"
            )
    return f"was not built in {folder}: install a C compiler such as gcc, then pip install -e {folder}"


def _is_cut_short(path: Path) -> bool:
    """Return whether an ELF file lacks its last part, the section headers. Loading such a file would kill the process."""
    with path.open("rb") as file:
        header = file.read(64)
    if header[:6] != b"\x7fELF\x02\x01":  # 64 bits, little endian; the loader itself refuses other files
        return False
    if len(header) < 64:
        return True
    (start,), (size, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    return path.stat().st_size < start + size * count


@cache
def pool_oldest() -> Callable[[], int]:
    """Return pool.h's function of that name. Raises KernelsUnavailableError."""
    function = _library().pool_oldest
    function.restype = c_int64
    return function


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
    return Kernels(runnable[0] if variant is None else variant)


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
    # In the name of the package: a line of our sources would tell nobody anything.
    message = f"no native kernels, so that a CPU decodes about ten times slower: {reason}"
    warnings.warn_explicit(message, RuntimeWarning, "selfspec", 1)
