"""`python -m bench.experiments loading`: how fast a checkpoint of a 7B's size loads beside plain reads of its file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.commands.bench_options import OutputOption
from bench.commands.preparation import progress, recording, show
from bench.experiments.loading.large_checkpoints import (
    LAYERS,
    forget,
    loaded,
    read_speed,
    write_gguf,
    write_safetensors,
)
from bench.provenance import provenance
from bench.record import Line, RecordWriter
from selfspec.cli.notes import one_line_errors

WRITERS: dict[str, Callable[[Path, int], Path]] = {"bfloat16": write_safetensors, "Q8_0": write_gguf}


def loading(
    formats: Annotated[str, typer.Option(help="Which files: bfloat16 (safetensors), Q8_0 (GGUF).")] = "bfloat16,Q8_0",
    layers: Annotated[int, typer.Option(min=2, max=LAYERS, help="Layers of a Llama 2 7B.")] = LAYERS,
    repeats: Annotated[int, typer.Option(min=1, help="Loads of each file.")] = 5,
    folder: Annotated[Path, typer.Option(help="On the disk to measure. 14 GB are written there and removed.")] = Path(),
    output: OutputOption = None,
) -> None:
    """Write a large checkpoint, then in turn read its file plainly and load it, from the disk each time."""
    with one_line_errors():
        chosen = formats.split(",")
        if unknown := [name for name in chosen if name not in WRITERS]:
            raise ValueError(f"--formats must be of {', '.join(WRITERS)}, got {unknown[0]}")
    description: Line = {
        "kind": "run",
        "command": "loading",
        "configuration": {
            "model": f"a Llama 2 7B with {layers} of its {LAYERS} layers",
            "repeats": repeats,
            "weights_digest": None,
            "prompts_digest": None,
        },
        "engines": {},
        "provenance": provenance(torch.device("cpu"), torch.float32),
    }
    with recording(RecordWriter(output)) as record, progress(len(chosen) * repeats) as advance:
        record.write(description)
        for name in chosen:
            with tempfile.TemporaryDirectory(dir=folder) as place:
                path = WRITERS[name](Path(place), layers)
                for repeat in range(repeats):
                    record.write({"kind": "load", "format": name, "repeat": repeat, **_measured(path)})
                    advance(name)
    show(record.lines)


def _measured(path: Path) -> Line:
    """One load and the reads beside it, each of a file that the system has forgotten."""
    size = path.stat().st_size
    found: Line = {"bytes": size}
    for readers in (1, 2):
        found[f"read_by_{readers}"] = read_speed(path, readers=readers)
    forget(path)
    load = loaded(path if path.suffix == ".gguf" else path.parent)
    del load["layers_shown"]
    return {**found, **load}
