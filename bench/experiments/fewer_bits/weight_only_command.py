"""`python -m bench.experiments weight-only`: what PyTorch's own products with weights in 8 and 4 bits take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from torch import Tensor

from bench.report.table import UNKNOWN, Table, number, print_tables
from selfspec.cli.notes import one_line_errors
from selfspec.engine.calibrate import synchronize

SIZES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
"""Outputs and inputs of the four matrices of a layer of Llama-3-8B."""
_GROUP = 64
_COPIES = 6
"""Copies of each matrix. They are used in turn, so that none is still in a cache."""


def weight_only(
    device: Annotated[str, typer.Option(help="Where.")] = "cuda",
    rows: Annotated[list[int] | None, typer.Option(help="Rows; repeatable. Default: 1, 2, 4, 8.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each is measured; the median counts.")] = 30,
) -> None:
    """Time the matrices of a layer of Llama-3-8B in bfloat16, and with weights in 8 and 4 bits."""
    with one_line_errors():
        where = torch.device(device)
        kinds = {"bfloat16": _plain, "8 bits": _eight, **({"4 bits": _four} if where.type == "cuda" else {})}
        table = []
        for count in rows or (1, 2, 4, 8):
            seconds = {
                name: sum(_seconds(kind, size, count, where, repeats) for size in SIZES) for name, kind in kinds.items()
            }
            row = {"rows": str(count)}
            for name in ("bfloat16", "8 bits", "4 bits"):
                row[f"{name}, µs"] = f"{1e6 * seconds[name]:.0f}" if name in seconds else UNKNOWN
            for name in ("8 bits", "4 bits"):
                share = seconds[name] / seconds["bfloat16"] if name in seconds else None
                row[f"{name}, of bfloat16"] = number(share, "{:.2f}")
            table.append(row)
        print_tables([Table.of("weight_only", f"A layer's four matrices on {_name(where)}", table)])


def _plain(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x @ weight.t()


def _eight(weight: Tensor) -> Callable[[Tensor], Tensor]:
    scale = weight.abs().amax(dim=1).float() / 127
    rounded = (weight / scale[:, None]).round().to(torch.int8)
    scale = scale.to(weight.dtype)
    return lambda x: torch._weight_int8pack_mm(x, rounded, scale)


def _four(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """With scales and zeros by groups, as torch packs them for CUDA."""
    numbers = torch.randint(0, 256, (weight.shape[0], weight.shape[1] // 2), dtype=torch.uint8, device=weight.device)
    packed = torch._convert_weight_to_int4pack(numbers, 8)
    scales = torch.ones(weight.shape[1] // _GROUP, weight.shape[0], 2, dtype=weight.dtype, device=weight.device)
    return lambda x: torch._weight_int4pack_mm(x, packed, _GROUP, scales)


def _seconds(
    make: Callable[[Tensor], Callable[[Tensor], Tensor]],
    size: tuple[int, int],
    rows: int,
    device: torch.device,
    repeats: int,
) -> float:
    """Median of a product, over copies of the matrix in turn."""
    products = [make(torch.randn(*size, dtype=torch.bfloat16, device=device)) for _ in range(_COPIES)]
    x = torch.randn(rows, size[1], dtype=torch.bfloat16, device=device)
    taken = []
    for repeat in range(repeats + 3):
        synchronize(device)
        start = time.perf_counter()
        for product in products:
            product(x)
        synchronize(device)
        if repeat >= 3:
            taken.append((time.perf_counter() - start) / _COPIES)
    return statistics.median(taken)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
