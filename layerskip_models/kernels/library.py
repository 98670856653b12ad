"""Compiles `kernels.c` for this processor with the machine's own C compiler, and binds it. None of it is needed.

Once per source, compiler and processor, in about two seconds; the result is kept in the user's cache folder. Where there
is no compiler, or its result does not compute what it should, `kernels()` is None and PyTorch's operators do the work.
Threads are those of PyTorch's own OpenMP: the library is linked to none, so that it finds the one that is loaded, and two
pools of threads never wait for the same cores. SELFSPEC_NATIVE=0 switches all of it off.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.c")
INCLUDED = (Path(__file__).with_name("head.c"),)
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fPIC", "-std=gnu11", "-w")
_SECONDS = 120  # no compiler takes so long


class Matrix(Structure):
    """`Matrix` of kernels.c: a weight [out, in], with what its elements are multiplied by and what is added."""

    _fields_ = (
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("bytes", c_int64),
        ("in_features", c_int64),
        ("out_features", c_int64),
    )


class Layer(Structure):
    """`Layer` of kernels.c."""

    _fields_ = (
        ("qkv", Matrix),
        ("output", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("input_norm", c_void_p),
        ("post_attention_norm", c_void_p),
    )


class Shape(Structure):
    """`Shape` of kernels.c."""

    _fields_ = (
        ("hidden", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("eps", c_float),
        ("scale", c_float),
    )


class Cache(Structure):
    """`Cache` of kernels.c."""

    _fields_ = (("keys", c_void_p), ("values", c_void_p), ("layer_stride", c_int64), ("head_stride", c_int64))


@cache
def kernels() -> ctypes.CDLL | None:
    """The compiled functions `linear`, `normalised_linear`, `run`, `choose` and what sizes their scratch, or None where they cannot be had."""
    if os.environ.get("SELFSPEC_NATIVE") == "0":
        return None
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return None
    try:
        return bind(_library(compiler))
    except (OSError, subprocess.SubprocessError, AttributeError):
        return None


def _library(compiler: str) -> Path:
    """The shared library, compiled if it is not there yet. Two processes may do so at once: the last one's stays."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_SECONDS).stdout
    key = hashlib.sha256(b"\0".join([*(path.read_bytes() for path in (SOURCE, *INCLUDED)), version, _processor(), " ".join(FLAGS).encode()]))
    path = _folder() / f"kernels-{key.hexdigest()[:16]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            compiled, linked = f"{folder}/kernels.o", Path(folder, "kernels.so")
            link = [compiler, "-shared", compiled, "-lm", "-o", str(linked)]  # without OpenMP: PyTorch's is loaded
            for command in ([compiler, *FLAGS, "-c", str(SOURCE), "-o", compiled], link):
                subprocess.run(command, capture_output=True, check=True, timeout=_SECONDS)
            linked.replace(path)
    return path


def _folder() -> Path:
    """Where compiled libraries are kept: the user's cache, or a folder for this process where that is read-only."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        folder = cache_home / "selfspec"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass
    return Path(tempfile.mkdtemp(prefix="selfspec-"))


def _processor() -> bytes:
    """What -march=native depends on: a home folder may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        known = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
        return "\n".join(sorted(set(known))).encode()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".encode()


def bind(path: Path) -> ctypes.CDLL:
    """The library at a path, its functions told their arguments. OSError if it cannot be loaded."""
    library = ctypes.CDLL(str(path))
    library.linear.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int]
    library.linear.restype = None
    library.normalised_linear.argtypes = [
        c_void_p, c_void_p, c_float, c_void_p, c_int64, c_void_p, c_void_p, c_int,
    ]  # fmt: skip
    library.normalised_linear.restype = None
    library.run.argtypes = [
        POINTER(Shape), c_void_p, c_int64, POINTER(Cache), c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_void_p,
        c_int,
    ]  # fmt: skip
    library.run.restype = None
    library.scratch_size.argtypes = [POINTER(Shape), c_void_p, c_int64, c_int64, c_int64]
    library.scratch_size.restype = c_int64
    library.choose.argtypes = [
        c_void_p, c_void_p, c_float, c_void_p, c_int64, c_void_p, c_int, c_void_p, c_void_p, c_int,
    ]  # fmt: skip
    library.choose.restype = None
    library.choose_scratch.argtypes = [c_void_p, c_int64, c_int64]
    library.choose_scratch.restype = c_int64
    return library
