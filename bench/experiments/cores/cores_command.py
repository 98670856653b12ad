"""`python -m bench.experiments cores`: more threads than cores, and what the parts of a phase cost."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer

from bench.commands.bench_options import ModelOption, NewTokensOption, OutputOption, RepeatsOption
from bench.commands.preparation import configuration, encoded, load_network, open_tokenizer, progress, recording, show
from bench.experiments.cores.more_threads import measure_threads
from bench.experiments.cores.pool_parts import measure_parts
from bench.machine.bandwidth import measure_bandwidth
from bench.measure import in_turn
from bench.provenance import available_cores, provenance
from bench.record import RecordWriter
from bench.sweep import parse_range
from layerskip_models import DEMO_PATH, from_transformers
from selfspec import SelfSpecGenerator
from selfspec.cli.notes import one_line_errors

_MOST = 256  # POOL_MEMBERS of pool.h


def cores(
    model: ModelOption = None,
    threads: Annotated[str, typer.Option(help="Numbers of threads; as many as cores are always among them.")] = (
        "1,2,4,8,16,32"
    ),
    max_new_tokens: NewTokensOption = 64,
    seconds: Annotated[float, typer.Option(min=0.01, max=60, help="Seconds per measurement.")] = 1.0,
    repeats: RepeatsOption = 5,
    output: OutputOption = None,
) -> None:
    """Decoding and prompts with any number of threads, in turn, and what the parts of a phase cost.

    Needs our CPU kernels, two cores and a C compiler. The threads are those asked for, also where there are fewer cores.
    """
    with one_line_errors():
        checkpoint, own = str(model or DEMO_PATH), available_cores() or 1
        counts = sorted({own, *parse_range(threads, "--threads")})
        if not 1 <= counts[0] <= counts[-1] <= _MOST:
            raise ValueError(f"--threads must be in [1, {_MOST}], got {threads}")
        samples = encoded(None, 4, open_tokenizer(checkpoint), 128)
        network = load_network(checkpoint, "auto", "cpu")
        generator = SelfSpecGenerator(from_transformers(network), prefix_cache=0)
        if generator.model.kernels is None:
            raise ValueError("threads are those of our own kernels, which cannot be used here")
    described: dict[str, Any] = {
        "kind": "run",
        "command": "cores",
        "configuration": {
            **configuration(checkpoint, samples, max_new_tokens, repeats, warmups=1),
            "seconds": seconds,
            "threads": counts,
        },
        "engines": {},
        "provenance": provenance(network.device, network.dtype),
    }
    ids = [sample.ids for sample in samples]
    with recording(RecordWriter(output)) as record:
        record.write(described)
        with progress(repeats * len(counts) + 2) as advance:
            with one_line_errors():
                for line in measure_parts(max(counts)):
                    record.write(line)
            advance("parts of a phase")
            bandwidth = measure_bandwidth(torch.device("cpu"))
            record.write({"kind": "bandwidth", "bytes_per_second": bandwidth, "threads": torch.get_num_threads()})
            advance("reading memory")
            for line in measure_threads(generator, ids, own, seconds, max_new_tokens):
                assert line  # calibrates and warms up
            for repeat in range(repeats):
                for count in in_turn(counts, repeat):
                    for line in measure_threads(generator, ids, count, seconds, max_new_tokens):
                        record.write({**line, "repeat": repeat})
                    advance(f"{count} threads")
    show(record.lines)
