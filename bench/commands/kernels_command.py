"""`selfspec-bench kernels`: speed of single products, by kind of weights, rows and variant of the kernels.

A process that has asked for matrix tiles may clock lower, so that variants do not share one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from bench.commands.bench_options import KernelsCommand
from bench.commands.session import progress, recording, show
from bench.commands.sweep_command import parse_range
from bench.engines.k_quants import QUANTISERS, in_blocks
from bench.measure import in_turn
from bench.provenance import provenance
from bench.record import Line
from layerskip_models.checkpoints.gguf_blocks import numbers_of_blocks
from layerskip_models.checkpoints.loading import FEW_BITS
from layerskip_models.decoder_layer import Linear
from layerskip_models.kernels.library import KernelsUnavailableError, runnable_variants
from layerskip_models.linear import LAYOUTS, grouped_linear
from selfspec.cli.console import one_line_errors

OUT, IN = 2816, 1024
MATRICES = 40
"""Multiplied in turn, so that none is found in a cache."""


KINDS = ("float32", "bfloat16", "int8", "int4", *QUANTISERS)
"""Ways to keep a matrix: our own layouts, and the types of GGUF files."""


def matrix_of(kind: str, weight: Tensor) -> Linear:
    """Keep a float32 matrix, [out, in], as one of `KINDS`."""
    if kind in QUANTISERS:
        return grouped_linear(numbers_of_blocks(torch.from_numpy(in_blocks(weight.numpy(), kind)), kind), own=True)
    if kind in FEW_BITS:
        return LAYOUTS[kind](weight, None)
    return LAYOUTS["native"](weight.to(getattr(torch, kind)), None)


def kernels(options: KernelsCommand) -> None:
    with one_line_errors():
        try:
            runnable = runnable_variants()
        except KernelsUnavailableError as error:
            raise ValueError(f"there is nothing to measure: {error}") from None
        chosen = list(dict.fromkeys(options.variant or runnable))
        if unknown := set(chosen) - set(runnable):
            raise ValueError(f"this machine runs the variants {', '.join(runnable)}, not {', '.join(sorted(unknown))}")
        kinds = list(dict.fromkeys(options.weights or KINDS))
        if unknown := set(kinds) - set(KINDS):
            raise ValueError(f"--weights must be of {', '.join(KINDS)}, got {', '.join(sorted(unknown))}")
        rows = parse_range(options.rows, "--rows")
        job = {"kinds": kinds, "rows": rows, "seconds": options.seconds, "matrices": MATRICES}
    first = {
        "kind": "run",
        "command": "kernels",
        "configuration": {"model": f"matrices of {OUT} x {IN}", "repeats": options.repeats, "variants": chosen, **job},
        "provenance": provenance(torch.device("cpu"), torch.float32),
    }
    with recording(options.output, first) as record, progress(options.repeats * len(chosen)) as advance:
        for repeat in range(options.repeats):
            for name in in_turn(chosen, repeat):
                record.once("products", partial(_measured, name, job), variant=name, repeat=repeat)
                advance(name)
    show(record.lines)


def _measured(variant: str, job: dict[str, Any]) -> dict[str, list[Line]]:
    """Measure all products of one variant in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return {"measured": process.submit(products, variant, **job).result()}


def products(variant: str, kinds: Sequence[str], rows: Sequence[int], seconds: float, matrices: int) -> list[Line]:
    """Time products, for `seconds` each at least: the median of three turns or more through all matrices, and one's bytes."""
    os.environ["SELFSPEC_NATIVE"] = variant  # which nothing has read in this process so far
    found = []
    for kind in kinds:
        draw = torch.Generator().manual_seed(0)
        made = [matrix_of(kind, torch.randn(OUT, IN, generator=draw)) for _ in range(matrices)]
        for count in rows:
            x = torch.randn(count, IN, generator=draw)
            taken = _timed(made, x, seconds) / matrices
            found.append({"weights": kind, "rows": count, "seconds": taken, "bytes": made[0].num_bytes})
    return found


@torch.inference_mode()
def _timed(matrices: Sequence[Linear], x: Tensor, seconds: float) -> float:
    taken: list[float] = []
    while len(taken) < 4 or sum(taken) < seconds:
        start = perf_counter()
        for matrix in matrices:
            matrix(x)
        taken.append(perf_counter() - start)
    return median(taken[1:])  # the first warms up
