"""`selfspec-bench shapes`: the costs of real models without their weights, one record and one page per shape."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.commands import bench_options as options
from bench.commands.run_command import run
from bench.record import read_record
from layerskip_models.checkpoints.loading import resolve_device
from layerskip_models.checkpoints.synthetic import PREFIX, parse_synthetic
from selfspec.cli.arguments import checked_output_folder
from selfspec.cli.notes import one_line_errors

GPU_SHAPES = ("llama3.2-1B", "llama3-8B", "llama2-7B")
CPU_SHAPES = ("small", "medium")
POLICIES = ("auto", "auto:cost=layers", "del", "del+spide")


def shapes(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="Shape, as in --model synthetic:SHAPE; repeatable. Default: "
            f"{', '.join(GPU_SHAPES)} on CUDA, else {', '.join(CPU_SHAPES)}."
        ),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help=f"Policy to run; repeatable. Default: {', '.join(POLICIES)}.")
    ] = None,
    kept: options.KeptOption = None,
    output_dir: Annotated[
        Path, typer.Option(help="Folder for SHAPE.jsonl and SHAPE.html.", callback=checked_output_folder)
    ] = Path("shapes"),
    num_samples: options.TaskSamplesOption = 1,
    prompt_tokens: options.PromptTokensOption = 128,
    max_new_tokens: options.NewTokensOption = 128,
    repeats: options.RepeatsOption = 2,
    warmups: options.WarmupsOption = 1,
    dtype: options.DtypeOption = "auto",
    device: options.DeviceOption = "auto",
    runner: options.RunnerOption = "auto",
) -> None:
    """Policies, plain decoding and transformers at real shapes with synthetic weights, one shape after the other.

    All of it in one call. Ends with status 1 if an output differed by more than a near-tie, after the last shape.
    """
    with one_line_errors():
        target = resolve_device(device)
        names = shape or list(GPU_SHAPES if target.type == "cuda" else CPU_SHAPES)
        for name in names:
            parse_synthetic(PREFIX + name)
    failed = False
    for name in names:
        record = output_dir / f"{name.partition(',')[0]}.jsonl"
        try:
            run(
                model=PREFIX + name,
                policy=list(policy or POLICIES),
                kept=kept,
                num_samples=num_samples,
                prompt_tokens=prompt_tokens,
                max_new_tokens=max_new_tokens,
                repeats=repeats,
                warmups=warmups,
                dtype=dtype,
                device=device,
                runner=runner,
                output=record,
            )
        except typer.Exit as stopped:
            if stopped.exit_code != 1:
                raise
            failed = True  # an output differed; what was measured is there
        from bench.report.page import page  # matplotlib takes a second to load

        record.with_suffix(".html").write_text(page(read_record(record)), encoding="utf-8")
        if target.type == "cuda":
            torch.cuda.empty_cache()
    if failed:
        raise typer.Exit(1)
