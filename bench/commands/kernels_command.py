"""`selfspec-bench kernels`: products of each kind of weights at 1 to 128 rows, with each variant of the kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Annotated

import torch
import typer

from bench.commands import bench_options as options
from bench.commands.preparation import progress, recording, run_line, show
from bench.machine.products import IN, KINDS, OUT, ROWS
from bench.measure import in_turn
from bench.provenance import provenance
from bench.record import RecordWriter
from bench.sweep import parse_range
from layerskip_models.kernels.library import KernelsUnavailableError, runnable_variants
from selfspec.cli.notes import one_line_errors


def kernels(
    variant: Annotated[
        list[str] | None, typer.Option(help="Variant; repeatable. Default: all that this processor runs, best first.")
    ] = None,
    weights: Annotated[list[str] | None, typer.Option(help=f"{', '.join(KINDS)}; repeatable. Default: all.")] = None,
    rows: Annotated[str, typer.Option(help="Numbers of rows, as in 1,2,4.")] = ",".join(map(str, ROWS)),
    seconds: Annotated[float, typer.Option(min=0.001, help="Seconds of each measurement.")] = 0.2,
    repeats: Annotated[int, typer.Option(min=1, help="Processes of each variant, in turn.")] = 3,
    output: options.OutputOption = None,
) -> None:
    """Speed of single products: bytes of the weights per second, and microseconds, by kind of weights, rows and variant.

    Matrices are multiplied in turn, so that their weights come from memory. Each variant runs in a process of its own.
    """
    with one_line_errors():
        try:
            runnable = runnable_variants()
        except KernelsUnavailableError as error:
            raise ValueError(f"there is nothing to measure: {error}") from None
        chosen = list(dict.fromkeys(variant or runnable))
        if unknown := set(chosen) - set(runnable):
            raise ValueError(f"this machine runs the variants {', '.join(runnable)}, not {', '.join(sorted(unknown))}")
        kinds = list(dict.fromkeys(weights or KINDS))
        if unknown := set(kinds) - set(KINDS):
            raise ValueError(f"--weights must be of {', '.join(KINDS)}, got {', '.join(sorted(unknown))}")
        job = {"kinds": kinds, "rows": parse_range(rows, "--rows"), "seconds": seconds}
    about = {
        "model": f"matrices of {OUT} x {IN}",
        "weights_digest": "random",
        "prompts_digest": None,
        "repeats": repeats,
        "variants": chosen,
    }
    with recording(RecordWriter(output)) as record:
        record.write(run_line("kernels", about, [], provenance(torch.device("cpu"), torch.float32)))
        with progress(repeats * len(chosen)) as advance:
            for repeat in range(repeats):
                for name in in_turn(chosen, repeat):
                    command = [sys.executable, "-m", "bench.machine.products", json.dumps(job)]
                    environment = {**os.environ, "SELFSPEC_NATIVE": name}
                    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
                    if done.returncode:
                        raise RuntimeError(f"variant {name} ended with exit code {done.returncode}")
                    for line in done.stdout.splitlines():
                        record.write({**json.loads(line), "repeat": repeat})
                    advance(name)
    show(record.lines)
