"""`python -m bench.experiments attention`: attention over a long context, beside what memory and arithmetic allow."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer

from bench.commands.bench_options import OutputOption, RepeatsOption
from bench.commands.preparation import progress, recording, show
from bench.experiments.attention.attention_time import HeadShape, measure_attention
from bench.provenance import provenance
from bench.record import RecordWriter
from bench.sweep import parse_range
from layerskip_models.kernels.check import native_works
from layerskip_models.kernels.native_layers import KV_DTYPES
from selfspec.cli.notes import one_line_errors

_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in KV_DTYPES}


def attention(
    shape: Annotated[
        list[str] | None,
        typer.Option(help="Whose heads, as in --model synthetic:SHAPE; repeatable. Default: llama3-8B and medium."),
    ] = None,
    kv_dtype: Annotated[
        list[str] | None,
        typer.Option(help=f"What keys and values are kept in, {' or '.join(_NAMES)}; repeatable. Default: both."),
    ] = None,
    context: Annotated[int, typer.Option(min=64, help="Positions whose keys and values are read.")] = 16384,
    rows: Annotated[str, typer.Option(help="Rows of a pass: one decodes, several verify.")] = "1,4,8",
    repeats: RepeatsOption = 5,
    output: OutputOption = None,
) -> None:
    """A layer's attention on our CPU kernels, beside reading its keys and values at the bandwidth measured in turn.

    Keys and values are random, and no weights are loaded.
    """
    with one_line_errors():
        names = kv_dtype or list(_NAMES)
        if unknown := set(names) - set(_NAMES):
            raise ValueError(f"--kv-dtype must be {' or '.join(_NAMES)}, got {unknown.pop()!r}")
        shapes = [HeadShape.of(name, _NAMES[kept]) for name in shape or ("llama3-8B", "medium") for kept in names]
        numbers = parse_range(rows, "--rows")
        if max(numbers) > context:
            raise ValueError(f"--rows must be at most the context's {context} positions, got {max(numbers)}")
        if not native_works(torch.device("cpu"), torch.float32):
            raise ValueError("attention is measured on our own kernels, which cannot be used here")
    described: dict[str, Any] = {
        "kind": "run",
        "command": "attention",
        "configuration": {
            "model": "no weights",
            "weights_digest": "none",
            "prompts_digest": "no prompts",
            "context": context,
            "repeats": repeats,
        },
        "engines": {},
        "provenance": provenance(torch.device("cpu"), torch.float32),
    }
    with recording(RecordWriter(output)) as record:
        record.write(described)
        with progress(repeats * len(shapes) * (1 + len(numbers))) as advance:
            for line in measure_attention(shapes, context, numbers, repeats):
                record.write(line)
                advance(line["shape"])
    show(record.lines)
