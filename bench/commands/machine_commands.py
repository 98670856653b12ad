"""`selfspec-bench kernels`, `load` and `roofline`: what this machine gives to products, loading and the engine's calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.commands import bench_options as options
from bench.commands.preparation import (
    configuration,
    encoded,
    model_name,
    open_model,
    open_tokenizer,
    progress,
    recording,
    run_line,
    show,
)
from bench.machine.bandwidth import WeightBytes, bandwidth_fields, measure_bandwidth
from bench.machine.loading import STARTS, forget, loaded, read_speed, start_seconds, weight_files
from bench.machine.products import IN, KINDS, MATRICES, OUT, ROWS
from bench.machine.roofline import best_fixed, calls, measure_phases
from bench.measure import in_turn
from bench.provenance import provenance
from bench.record import Line, RecordWriter
from bench.sweep import parse_range
from layerskip_models import DEMO_PATH
from layerskip_models.checkpoints.checkpoint_files import resolve_checkpoint
from layerskip_models.checkpoints.gguf_checkpoint import gguf_file
from layerskip_models.kernels.library import KernelsUnavailableError, runnable_variants
from policies import parse_policy
from selfspec import SelfSpecGenerator
from selfspec.cli.console import one_line_errors
from selfspec.engine.calibrate import learning_seconds, measured_cost, timed_context


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
        job = {"kinds": kinds, "rows": parse_range(rows, "--rows"), "seconds": seconds, "matrices": MATRICES}
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
    output: options.OutputOption = None,
) -> None:
    """Measure how fast checkpoints load, beside plain reads of their files, in how much memory, and how commands start.

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
    """Find the file or folder on this machine that a name stands for. Raises ValueError for a name on the hub."""
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


_LEARNING_ROWS = (1, 4)


def roofline(
    model: options.ModelOption = None,
    prompts: options.PromptsOption = None,
    num_samples: options.NumSamplesOption = 2,
    prompt_tokens: options.PromptTokensOption = 192,
    max_new_tokens: options.NewTokensOption = 128,
    repeats: options.RepeatsOption = 3,
    dtype: options.DtypeOption = "auto",
    device: options.DeviceOption = "auto",
    output: options.OutputOption = None,
) -> None:
    """Measured memory bandwidth, the bytes that each step must read, the limit that follows, and how close the engine comes.

    Plain decoding, the fixed setting that is best on the first prompt by replay, and auto; greedy.
    """
    with one_line_errors():
        checkpoint = str(model or DEMO_PATH)
        samples = encoded(prompts, num_samples, open_tokenizer(checkpoint), prompt_tokens)
        generator = SelfSpecGenerator(open_model(checkpoint, dtype, device), prefix_cache=0)
    network = generator.model
    cost = measured_cost(network)
    weights = WeightBytes.of(network)
    fixed = best_fixed(generator, samples[0], max_new_tokens, cost)
    policies = ["ar", fixed, "auto"]
    learned = parse_policy("auto", num_layers=network.num_layers, measure=lambda: cost).observes.shadow_layers
    learning = learning_seconds(network, learned, _LEARNING_ROWS)
    exit_layer = int(fixed.removeprefix("ls:").partition("-")[0])
    layers = sorted({1, exit_layer, max(1, network.num_layers // 4), max(1, network.num_layers // 2)})
    timed = timed_context(network)
    about = {
        **configuration(checkpoint, samples, max_new_tokens, repeats, warmups=1),
        "num_layers": network.num_layers,
        "timed_context": timed,
    }
    with recording(RecordWriter(output)) as record:
        record.write(run_line("roofline", about, [], provenance(network.device, network.dtype)))
        record.write({"kind": "costs", **cost.as_dict()})
        bandwidths = [measure_bandwidth(network.device)]
        for call in calls(cost, weights, context=timed, exit_layers=layers, learning=learning):
            record.write({"kind": "call", "name": call.name, "seconds": call.seconds, "bytes": call.num_bytes})
        with progress(len(policies) * (1 + len(samples) * repeats)) as advance:
            for policy in policies:  # the path that is timed
                measure_phases(generator, policy, samples[0], 0, max_new_tokens, weights, cost)
                advance(policy)
            for sample in samples:
                for repeat in range(repeats):
                    bandwidths.append(measure_bandwidth(network.device))
                    for policy in in_turn(policies, repeat):
                        record.write(measure_phases(generator, policy, sample, repeat, max_new_tokens, weights, cost))
                        advance(policy)
        record.write({"kind": "limits", **bandwidth_fields(bandwidths), **weights.as_line()})
    show(record.lines)
