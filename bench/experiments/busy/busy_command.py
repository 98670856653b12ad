"""`python -m bench.experiments busy`: speed on a machine that others use, too."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bench.commands.bench_options import (
    DeviceOption,
    DtypeOption,
    ModelOption,
    NewTokensOption,
    NumSamplesOption,
    OutputOption,
    PromptsOption,
    PromptTokensOption,
)
from bench.commands.preparation import configuration, encoded, load_network, open_tokenizer, progress, recording, show
from bench.experiments.busy.busy import Timed, TimedSelfSpec, TimedTransformers, busy_processes, measure_cell
from bench.measure import in_turn
from bench.provenance import available_cores, provenance
from bench.record import RecordWriter
from bench.sweep import parse_range
from layerskip_models import DEMO_PATH, from_transformers
from selfspec import SelfSpecGenerator
from selfspec.cli.notes import one_line_errors

_STARTING = 30.0  # seconds that a cell may last beyond its own: a token of an engine that has come to a halt
_LONGEST = 600.0


def busy(
    model: ModelOption = None,
    prompts: PromptsOption = None,
    num_samples: NumSamplesOption = 4,
    prompt_tokens: PromptTokensOption = 64,
    max_new_tokens: NewTokensOption = 128,
    processes: Annotated[
        str, typer.Option(help="Busy processes per core, for example 1,2,3; 0 is always measured.")
    ] = "1,2,3",
    seconds: Annotated[float, typer.Option(min=0.1, max=120, help="Seconds per measurement.")] = 3.0,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each engine at each load.")] = 3,
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Measure transformers' generate beside plain decoding and auto.")
    ] = True,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    output: OutputOption = None,
) -> None:
    """Speed beside busy processes on every core: plain decoding, auto and transformers' generate in turn, greedy.

    The busy processes end with the command, however it ends.
    """
    with one_line_errors():
        checkpoint = str(model or DEMO_PATH)
        levels = sorted({0, *parse_range(processes, "--processes")})
        samples = encoded(prompts, num_samples, open_tokenizer(checkpoint), prompt_tokens)
        network = load_network(checkpoint, dtype, device)
        generator = SelfSpecGenerator(from_transformers(network), prefix_cache=0)
    engines: list[Timed] = [TimedSelfSpec(generator, "ar", "plain"), TimedSelfSpec(generator, "auto", "auto")]
    if peers:
        engines.append(TimedTransformers(network))
    cores = available_cores() or 1
    description: dict[str, Any] = {
        "kind": "run",
        "command": "busy",
        "configuration": {
            **configuration(checkpoint, samples, max_new_tokens, repeats, warmups=1),
            "seconds": seconds,
            "processes_per_core": levels,
        },
        "engines": {engine.name: engine.label for engine in engines},
        "provenance": provenance(network.device, network.dtype),
    }
    ids = [sample.ids for sample in samples]
    limit = min(_LONGEST, len(engines) * (seconds + _STARTING))
    with recording(RecordWriter(output)) as record:
        record.write(description)
        with progress(len(engines) * len(levels) * repeats) as advance:
            for engine in engines:  # calibrates and warms up, in quiet
                measure_cell(engine, ids, max_new_tokens, seconds / 2, network.device)
            for repeat in range(repeats):
                for level in levels:
                    with busy_processes(level * cores, limit):
                        for engine in in_turn(engines, repeat):
                            cell = measure_cell(engine, ids, max_new_tokens, seconds, network.device)
                            record.write({**cell, "busy": level, "repeat": repeat})
                            advance(f"{engine.label}, {level} busy per core")
    show(record.lines)
