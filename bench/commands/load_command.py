"""`selfspec-bench load`: how fast checkpoints load beside plain reads of their files, and how long commands take to start."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.commands import bench_options as options
from bench.commands.preparation import model_name, progress, recording, run_line, show
from bench.machine.loading import STARTS, chat_seconds, forget, loaded, read_speed, start_seconds, weight_files
from bench.provenance import provenance
from bench.record import Line, RecordWriter
from layerskip_models import DEMO_PATH
from layerskip_models.checkpoints.checkpoint_files import resolve_checkpoint
from layerskip_models.checkpoints.gguf_checkpoint import gguf_file
from selfspec.cli.notes import one_line_errors


def load(
    model: Annotated[
        list[str] | None,
        typer.Option(help="Checkpoint folder, GGUF file or short name; repeatable. Default: the demo."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="As for `selfspec generate`.")] = "auto",
    cached: Annotated[
        bool, typer.Option("--cached", help="Load what the system may hold in memory, not from the disk.")
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Loads of each checkpoint, and starts of each command.")] = 5,
    start_up: Annotated[bool, typer.Option("--start-up/--no-start-up", help="Also time how commands start.")] = True,
    chat: Annotated[
        bool, typer.Option("--chat", help="Also time `selfspec chat` with each model until it shows its prompt.")
    ] = False,
    output: options.OutputOption = None,
) -> None:
    """How fast checkpoints load, in turn with plain reads of their files, in how much memory; and how commands start.

    Each load has a process of its own, in which everything is imported before the clock starts.
    """
    with one_line_errors():
        names = list(dict.fromkeys(model or [str(DEMO_PATH)]))
        places = {name: _place(name) for name in names}
        if not cached and not hasattr(os, "posix_fadvise"):
            raise ValueError("only Linux reads files from the disk again when it is asked to: add --cached")
    starts: dict[str, Callable[[], tuple[float, float]]] = {}
    if start_up:
        starts |= {what: partial(start_seconds, arguments) for what, arguments in STARTS.items()}
    if chat:
        starts |= {f"selfspec chat, {model_name(name)}, to its prompt": partial(chat_seconds, name) for name in names}
    about = {
        "model": ", ".join(model_name(str(place)) for place in places.values()),
        "weights_digest": None,
        "prompts_digest": None,
        "repeats": repeats,
        "cached": cached,
        "dtype": dtype,
    }
    with recording(RecordWriter(output)) as record:
        record.write(run_line("load", about, [], provenance(torch.device("cpu"), torch.float32)))
        with progress(len(places) * repeats + len(starts) * (repeats + 1)) as advance:
            for repeat in range(repeats):
                for name, place in places.items():
                    line = _measured(place, dtype, cached)
                    record.write({"kind": "load", "model": model_name(name), "repeat": repeat, **line})
                    advance(f"loading {name}")
            for what, start in starts.items():
                for repeat in range(-1, repeats):  # the first fills the caches
                    seconds, processors = start()
                    if repeat >= 0:
                        line = {"kind": "start", "what": what, "repeat": repeat}
                        record.write({**line, "seconds": seconds, "processor_seconds": processors})
                    advance(what)
    show(record.lines)


def _place(name: str) -> Path:
    """The file or folder on this machine that a name stands for. Raises ValueError for a name on the hub."""
    found = resolve_checkpoint(name)
    place = gguf_file(found) or Path(found)
    if not weight_files(place):
        raise ValueError(f"--model must be a folder with *.safetensors or a GGUF file on this machine, got {name!r}")
    return place


def _measured(place: Path, dtype: str, cached: bool) -> Line:
    """One load and the plain reads beside it."""
    files = weight_files(place)
    found: Line = {"bytes": sum(file.stat().st_size for file in files)}
    for readers in (1, 2):
        found[f"read_by_{readers}"] = read_speed(files, cached=cached, readers=readers)
    if not cached:
        forget(files)
    took = loaded(place, dtype)
    del took["layers_shown"]
    return {**found, **took}
