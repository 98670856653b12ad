"""`python -m bench.experiments variants`: the variants of the kernels beside each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Annotated

import torch
import typer

from bench.commands.bench_options import OutputOption
from bench.commands.preparation import progress, recording, show
from bench.experiments.variants.one_variant import PROMPTS, ROWS, TEXTS, WEIGHTS, Job, as_argument
from bench.measure import in_turn
from bench.provenance import provenance
from bench.record import RecordWriter
from layerskip_models.kernels.library import KernelsUnavailableError, runnable_variants
from selfspec.cli.notes import one_line_errors


def variants(
    variant: Annotated[
        list[str] | None, typer.Option(help="Variant; repeatable, the one to compare with last. Default: the two best.")
    ] = None,
    weights: Annotated[list[str] | None, typer.Option(help=f"{', '.join(WEIGHTS)}; repeatable. Default: all.")] = None,
    model: Annotated[str, typer.Option(help="Checkpoint or synthetic:SHAPE; none for single products only.")] = (
        "synthetic:medium"
    ),
    max_new_tokens: Annotated[int, typer.Option(min=2, help="New tokens of a text.")] = 64,
    seconds: Annotated[float, typer.Option(min=0.001, help="Seconds of each measurement.")] = 0.3,
    repeats: Annotated[int, typer.Option(min=1, help="Processes of each variant, in turn.")] = 3,
    output: OutputOption = None,
) -> None:
    """Single products at 1 to 128 rows, prompts, one text and 16 texts with each variant of the kernels.

    Each runs in a process of its own, in turn. On a machine with a matrix unit the two best are `amx` and `vnni`.
    """
    with one_line_errors():
        try:
            runnable = runnable_variants()
        except KernelsUnavailableError as error:
            raise ValueError(f"there is nothing to compare: {error}") from None
        chosen = list(dict.fromkeys(variant or runnable[:2]))
        if unknown := set(chosen) - set(runnable):
            raise ValueError(f"this machine runs the variants {', '.join(runnable)}, not {', '.join(sorted(unknown))}")
        kinds = tuple(dict.fromkeys(weights or WEIGHTS))
        if unknown := set(kinds) - set(WEIGHTS):
            raise ValueError(f"weights are {', '.join(WEIGHTS)}, got {', '.join(sorted(unknown))}")
        job = Job(
            model=None if model == "none" else model,
            weights=kinds,
            rows=ROWS,
            prompts=PROMPTS,
            texts=TEXTS,
            max_new_tokens=max_new_tokens,
            seconds=seconds,
        )
    with recording(RecordWriter(output)) as record:
        record.write(
            {
                "kind": "run",
                "command": "variants",
                "configuration": {
                    "model": model,
                    "weights_digest": "random",
                    "prompts": [],
                    "prompts_digest": "random",
                    "max_new_tokens": max_new_tokens,
                    "repeats": repeats,
                    "do_sample": False,
                    "variants": chosen,
                    "texts": job.texts,
                },
                "engines": {},
                "provenance": provenance(torch.device("cpu"), torch.float32),
            }
        )
        with progress(repeats * len(chosen)) as advance:
            for repeat in range(repeats):
                for name in in_turn(chosen, repeat):
                    command = [sys.executable, "-m", "bench.experiments.variants.one_variant", as_argument(job)]
                    environment = {**os.environ, "SELFSPEC_NATIVE": name}
                    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
                    if done.returncode:
                        raise RuntimeError(f"variant {name} ended with exit code {done.returncode}")
                    for line in done.stdout.splitlines():
                        record.write({**json.loads(line), "repeat": repeat})
                    advance(name)
    show(record.lines)
