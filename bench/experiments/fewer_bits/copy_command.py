"""`python -m bench.experiments draft-copies`: seconds and memory that copies of the weights in fewer bits take."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import psutil
import torch
import typer

from bench.commands.bench_options import OutputOption
from bench.commands.preparation import model_name, open_model, progress, recording, show
from bench.provenance import provenance
from bench.record import RecordWriter
from layerskip_models.draft_weights import DRAFT_BITS, draft_bytes, drafter
from selfspec.cli.arguments import one_line_errors
from selfspec.serve.memory_return import find_trim

_EVERY = 0.002
"""Seconds between two looks at the memory in use."""


def draft_copies(
    model: Annotated[list[str], typer.Argument(help="Models, also synthetic:SHAPE.")],
    dtype: Annotated[str, typer.Option(help="Of the model's weights.")] = "bfloat16",
    repeats: Annotated[int, typer.Option(min=1, help="Copies of each kind, one after the other.")] = 3,
    output: OutputOption = None,
) -> None:
    """Make copies of models' weights to draft with, and compare their memory with what is announced.

    Memory is what the process holds in pages of its own, at its most while a copy is made, and once it is there.
    """
    with one_line_errors():
        total = len(model) * len(DRAFT_BITS) * repeats
        with progress(total) as advance, recording(RecordWriter(output)) as record:
            record.write(
                {
                    "kind": "run",
                    "command": "draft-copies",
                    "configuration": {
                        "model": ", ".join(map(model_name, model)),
                        "weights_digest": None,
                        "prompts_digest": None,
                        "repeats": repeats,
                    },
                    "provenance": provenance(torch.device("cpu"), getattr(torch, dtype)),
                }
            )
            for name in model:
                loaded = open_model(name, dtype, "cpu")
                for bits in DRAFT_BITS:
                    for _ in range(repeats):
                        _give_back()
                        before, started = _in_use(), time.perf_counter()
                        with _watched() as most:
                            copy = drafter(loaded, bits)
                        seconds, after = time.perf_counter() - started, _in_use()
                        record.write(
                            {
                                "kind": "copy",
                                "model": model_name(name),
                                "bits": bits,
                                "weight_bytes": loaded.num_layers * loaded.layer_bytes + loaded.head_bytes,
                                "announced": draft_bytes(loaded, bits),
                                "held": after - before,
                                "most": max(most[0], after) - before,
                                "seconds": seconds,
                            }
                        )
                        del copy
                        advance("copies")
                del loaded
    show(record.lines)


def _give_back() -> None:
    """Give back what is free, so that a copy does not hide in memory that an earlier one has left."""
    gc.collect()
    trim = find_trim()
    if trim is not None:
        trim()


def _in_use() -> int:
    """Bytes of the process that are in no file."""
    found = psutil.Process().memory_info()
    return int(found.rss - found.shared)


@contextmanager
def _watched() -> Iterator[list[int]]:
    """Gives the most memory that was in use within it, in a list of one."""
    most, done = [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            most[0] = max(most[0], _in_use())
            time.sleep(_EVERY)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()
