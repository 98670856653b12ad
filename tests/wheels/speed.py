"""How long products take in two builds of the library: does a wheel's compiler make slower code than this machine's?

Both libraries are in one process and take turns with the same numbers on one thread, so that what else the machine does meets
both alike. The matrix stays in the cache: what comes from memory takes as long in either.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch

from layerskip_models.kernels.library import GROUPED_KINDS, KINDS, SCALES, VARIANTS, Matrix
from tests.wheels.targets import ReleaseError

OUTPUTS, INPUTS = 1024, 1024
ROWS = (1, 4, 8, 128)
GROUP = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTimes:
    """The shortest times of one product in the first and the second library."""

    weights: str
    rows: int
    seconds: tuple[float, float]

    @property
    def ratio(self) -> float:
        """Above 1 if the second library is slower."""
        return self.seconds[1] / self.seconds[0]


def compare(first: Path, second: Path, variant: str, *, repeats: int = 40) -> list[ProductTimes]:
    """Time every kind of weights. Raises ReleaseError if one of the libraries has no such variant that runs here."""
    functions = [_linear(path, variant) for path in (first, second)]
    generator = torch.Generator().manual_seed(1)
    found = []
    for name, matrix, _kept in _matrices(generator):
        matrix.interleaved = _interleaves(first, variant, matrix)
        for rows in ROWS:
            x = torch.randn(rows, INPUTS, generator=generator)
            y = torch.empty(rows, OUTPUTS)
            arguments = (ctypes.byref(matrix), x.data_ptr(), rows, None, y.data_ptr(), 1)
            calls = max(1, 32 // rows)
            rounds = [[_seconds(function, arguments, calls) for function in functions] for _ in range(repeats)]
            shortest = (min(of[0] for of in rounds), min(of[1] for of in rounds))
            found.append(ProductTimes(weights=name, rows=rows, seconds=shortest))
    return found


def variants_of_both(first: Path, second: Path) -> list[str]:
    """What both libraries have and this processor runs, best first. Raises ReleaseError."""
    libraries = [_opened(path) for path in (first, second)]
    return [name for name in VARIANTS if all(_runs(library, name) for library in libraries)]


def _opened(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise ReleaseError(f"{path} cannot be loaded here: {error}") from error


def _runs(library: ctypes.CDLL, variant: str) -> bool:
    return hasattr(library, f"linear_{variant}") and bool(getattr(library, f"runs_{variant}")())


def _linear(path: Path, variant: str) -> Callable[..., int]:
    library = _opened(path)
    if not _runs(library, variant):
        raise ReleaseError(f"{path} has no variant {variant} that runs here")
    function: Callable[..., int] = getattr(library, f"linear_{variant}")
    function.restype = c_int64  # type: ignore[attr-defined]
    function.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int]  # type: ignore[attr-defined]
    return function


def _interleaves(path: Path, variant: str, matrix: Matrix) -> int:
    """Whether the variant wants the matrix in that order; any numbers will do in any order."""
    function = getattr(_opened(path), f"interleaves_{variant}")
    function.argtypes = [c_int64, c_int64, c_int64]
    return int(function(matrix.kind, matrix.out_features, matrix.in_features))


def _matrices(generator: torch.Generator) -> list[tuple[str, Matrix, Sequence[torch.Tensor]]]:
    """A matrix of every kind, by a name, with the tensors that it points to."""
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator)
    scale = torch.full((OUTPUTS,), 1 / 127)
    found: list[tuple[str, Matrix, Sequence[torch.Tensor]]] = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8):
        stored = (weight * 30).clamp(-127, 127).to(dtype) if dtype == torch.int8 else weight.to(dtype)
        matrix = Matrix(weight=stored.data_ptr(), kind=KINDS[dtype], in_features=INPUTS, out_features=OUTPUTS)
        if dtype == torch.int8:
            matrix.scale = scale.data_ptr()
        found.append((str(dtype).removeprefix("torch."), matrix, (stored, scale)))
    numbers = torch.randint(0, 256, (OUTPUTS, INPUTS // 2), dtype=torch.uint8, generator=generator)
    scales = torch.rand(OUTPUTS, INPUTS // GROUP, generator=generator).half()
    matrix = Matrix(
        weight=numbers.data_ptr(),
        kind=GROUPED_KINDS[4],
        in_features=INPUTS,
        out_features=OUTPUTS,
        groups=scales.data_ptr(),
        group=GROUP,
        scales=SCALES[torch.float16],
        zero=8,
    )
    found.append(("4 bits", matrix, (numbers, scales)))
    return found


def _seconds(function: Callable[..., int], arguments: tuple[object, ...], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function(*arguments)
    return (time.perf_counter() - start) / calls
