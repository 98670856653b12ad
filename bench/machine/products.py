"""Products of rows with matrices of each kind of weights, by the kernels that this process uses.

Run as a program, it prints a line for each product. The variant is that of SELFSPEC_NATIVE. A process that has asked for
matrix tiles may clock lower, so that variants do not share one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from bench.engines.k_quants import QUANTISERS, in_blocks
from bench.record import Line
from layerskip_models.checkpoints.gguf_blocks import numbers_of_blocks
from layerskip_models.decoder_layer import Linear
from layerskip_models.kernels.library import kernels
from layerskip_models.linear import LAYOUTS, grouped_linear

OUT, IN = 2816, 1024
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
MATRICES = 40
"""Multiplied in turn, so that none is found in a cache."""


def _in_blocks(kind: str) -> Callable[[Tensor], Linear]:
    return lambda weight: grouped_linear(
        numbers_of_blocks(torch.from_numpy(in_blocks(weight.numpy(), kind)), kind), own=True
    )


KINDS: dict[str, Callable[[Tensor], Linear]] = {
    "float32": lambda weight: LAYOUTS["native"](weight, None),
    "bfloat16": lambda weight: LAYOUTS["native"](weight.bfloat16(), None),
    "int8": lambda weight: LAYOUTS["int8"](weight, None),
    "int4": lambda weight: LAYOUTS["int4"](weight, None),
    **{kind: _in_blocks(kind) for kind in QUANTISERS},
}
"""How a matrix [out, in] of float32 is kept: as our own layouts, and as the types of GGUF files."""


def products(kinds: Sequence[str], rows: Sequence[int], seconds: float, matrices: int) -> Iterator[Line]:
    """Seconds of a product, median of at least three turns through all matrices, and the bytes of its weights.

    seconds: of each measurement, at least.
    """
    for kind in kinds:
        draw = torch.Generator().manual_seed(0)
        made = [KINDS[kind](torch.randn(OUT, IN, generator=draw)) for _ in range(matrices)]
        for count in rows:
            x = torch.randn(count, IN, generator=draw)
            taken = _timed(made, x, seconds) / matrices
            yield {"kind": "product", "weights": kind, "rows": count, "seconds": taken, "bytes": made[0].num_bytes}


@torch.inference_mode()
def _timed(matrices: Sequence[Linear], x: Tensor, seconds: float) -> float:
    taken: list[float] = []
    while len(taken) < 4 or sum(taken) < seconds:
        start = perf_counter()
        for matrix in matrices:
            matrix(x)
        taken.append(perf_counter() - start)
    return median(taken[1:])  # the first warms up


def main(asked: str) -> None:
    """asked: the arguments of `products` as JSON."""
    chosen = kernels()
    assert chosen is not None
    for line in products(**json.loads(asked)):
        print(json.dumps({**line, "variant": chosen.variant}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
