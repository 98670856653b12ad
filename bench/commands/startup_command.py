"""`selfspec-bench startup`: from the start of a process to its first token."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer

from bench.commands.bench_options import (
    DeviceOption,
    DtypeOption,
    ModelOption,
    OutputOption,
)
from bench.commands.preparation import (
    configuration,
    is_synthetic,
    num_layers_of,
    open_tokenizer,
    progress,
    recording,
    show,
)
from bench.machine.context import long_prompt
from bench.machine.startup import ENGINES, forget_files, start, start_folders
from bench.provenance import provenance
from bench.record import RecordWriter
from layerskip_models import DEMO_PATH
from layerskip_models.checkpoints.loading import load_config, resolve_device, resolve_dtype
from selfspec.cli.arguments import one_line_errors


def startup(
    model: ModelOption = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Starts of each engine, cold and warm.")] = 3,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    output: OutputOption = None,
) -> None:
    """Time from process start to the first token, by stage, cold and warm, beside transformers' own.

    Cold: the system was asked to drop the files of checkpoint and packages from its memory before.
    """
    with one_line_errors():
        checkpoint = str(model or DEMO_PATH)
        num_layers = num_layers_of(checkpoint)
        target = resolve_device(device)
        saved = torch.bfloat16 if is_synthetic(checkpoint) else getattr(load_config(checkpoint), "dtype", None)
        used = resolve_dtype(dtype, target, saved)
        prompt = long_prompt(open_tokenizer(checkpoint), prompt_tokens)
    job = {
        "model": checkpoint,
        "device": str(target),
        "dtype": str(used).removeprefix("torch."),
        "prompt": prompt.ids.tolist(),
    }
    description: dict[str, Any] = {
        "kind": "run",
        "command": "startup",
        "configuration": {
            **configuration(checkpoint, [prompt], 2, repeats, warmups=0),
            "prompt_tokens": prompt_tokens,
            "num_layers": num_layers,
        },
        "engines": {},
        "provenance": provenance(target, used),
    }
    folders = start_folders(checkpoint)
    with recording(RecordWriter(output)) as record:
        record.write(description)
        with progress(repeats * len(ENGINES) * 2) as advance:
            for repeat in range(repeats):
                for engine in ENGINES:
                    for cold in (True, False):
                        if cold:
                            forget_files(folders)
                        seconds = start({**job, "engine": engine})
                        record.write(
                            {"kind": "start", "engine": engine, "cold": cold, "repeat": repeat, "seconds": seconds}
                        )
                        advance(f"{engine}, {'cold' if cold else 'warm'}")
    show(record.lines)
