"""Shared by the commands of `selfspec-bench`: the header of a record, progress, interruption, and how a command ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import typer
from transformers import PreTrainedTokenizerBase

from bench.commands.bench_options import ContextCommand, OnModel, RooflineCommand, RunCommand
from bench.datasets import EncodedPrompt, digest, encode_prompts, load_prompts, select_prompts
from bench.engines.catalogue import Maker
from bench.engines.own import EngineLostError, TimedEngine
from bench.engines.peer_process import PeerProcess
from bench.machine import WeightBytes, measure_bandwidth
from bench.measure import Measurement
from bench.models import model_name, open_model, weights_digest
from bench.provenance import load_average, policy_files, provenance, public_argument
from bench.record import Line, Record, matching
from bench.report.page import terminal_text
from layerskip_models import LayerSkipModel
from selfspec import SelfSpecGenerator
from selfspec.analysis.comparison import load_warning
from selfspec.cli.arguments import progress_bar
from selfspec.cli.console import LogConsole, one_line_errors

_errors = LogConsole()


def header(
    command: str,
    where: Mapping[str, Any],
    checkpoint: str,
    prompts: Sequence[EncodedPrompt],
    max_new_tokens: int,
    repeats: int,
    **more: Any,
) -> Line:
    """Return the first line of a record of a run on prompts. where: its provenance."""
    named: dict[str, Sequence[str]] = {key: more[key] for key in ("policies", "warmed_up") if key in more}
    configuration = {
        "model": model_name(checkpoint),
        "weights_digest": weights_digest(checkpoint),
        "prompts": [prompt.id for prompt in prompts],
        "prompts_digest": digest(prompts),
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
        **more,
        **{key: [*map(public_argument, names)] for key, names in named.items()},
        **policy_files(chain(*named.values())),
    }
    return {"kind": "run", "command": command, "configuration": configuration, "provenance": where}


def encoded(
    path: Path | None, num_samples: int, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int
) -> list[EncodedPrompt]:
    """Return the prompts of a file, or the shipped ones, the tasks taking turns."""
    return encode_prompts(select_prompts(load_prompts(path), num_samples), tokenizer, prompt_tokens)


def loaded(options: OnModel) -> LayerSkipModel:
    """Load the model that a command names, beneath a status line."""
    with _errors.status(f"Loading {model_name(options.model)} ..."):
        return open_model(options.model, options.dtype, options.device, options.rows)


progress = partial(progress_bar, log=_errors)


@contextmanager
def recording(path: Path | None, first: Line) -> Iterator[Record]:
    """Write a record within it; errors end the command in one line, and Ctrl-C says how to go on, with status 130."""
    cores = first["provenance"]["cores"]

    def warn(load: float) -> None:
        if warning := load_warning(load, cores=cores):
            _errors.print(warning)

    with one_line_errors():
        record = Record(path, first)
        warn(first["provenance"]["load_average"])
        try:
            with record:
                yield record
                if not record.is_complete:
                    warn(record.write("load_average", load_average=load_average())["load_average"])
        except KeyboardInterrupt:
            if path is None:
                _errors.print("interrupted: nothing was kept, since there was no --output")
            else:
                _errors.print(f"interrupted: what was measured is in {path}; the same command goes on with it")
            raise typer.Exit(130) from None


def measure(record: Record, engines: Sequence[TimedEngine], prompts: Sequence[EncodedPrompt]) -> None:
    """Time the engines on the prompts, and compare their outputs."""
    measurement = Measurement(engines=engines, prompts=prompts, record=record)
    with progress(measurement.num_runs) as measurement.advance:
        measurement.run()


def measure_own(
    command: str,
    options: RunCommand | RooflineCommand | ContextCommand,
    generator: SelfSpecGenerator,
    engines: Sequence[TimedEngine],
    prompts: Sequence[EncodedPrompt],
    **asked: Any,
) -> None:
    """Record and show engines of one generator on prompts, and the memory's speed before and after them."""
    weights = generator.model
    said = {
        "engines": [engine.name for engine in engines],
        "runner": generator.runner,
        "num_layers": weights.num_layers,
        "rows": options.rows,
        **asked,
    }
    where = provenance(weights.device, weights.dtype)
    first = header(command, where, options.model, prompts, options.max_new_tokens, options.repeats, **said)
    with recording(options.output, first) as record:

        def limits() -> Line:
            return {"bytes_per_second": measure_bandwidth(weights.device), **WeightBytes.of(weights).as_line()}

        write_engines(record, engines)
        record.once("limits", limits, when="before")
        measure(record, engines, prompts)
        record.once("limits", limits, when="after")
    show(record.lines)


def write_engines(record: Record, engines: Sequence[TimedEngine], missing: Mapping[str, str] | None = None) -> None:
    """Write what tables call the engines, and by name why others did not start."""
    for engine in engines:
        if record.find("engine", engine=engine.name) is None:
            record.write("engine", engine=engine.name, label=engine.label, weights=engine.weights)
    for name, reason in (missing or {}).items():
        if record.find("lost", engine=name) is None:
            record.write("lost", engine=name, label=name, reason=reason)


@contextmanager
def started(
    makers: Mapping[str, Maker], timeout: float
) -> Iterator[tuple[list[TimedEngine], dict[str, Any], dict[str, str]]]:
    """Run each peer's engines in a process. Yields engines, provenance, and why others did not start; ends with the first."""
    engines: list[TimedEngine] = []
    where: dict[str, Any] = {}
    missing: dict[str, str] = {}
    with ended_by_loss(), ExitStack() as running:
        for name, make in makers.items():
            try:
                with _errors.status(f"Starting {name} ..."):
                    peer = running.enter_context(PeerProcess(name, make, timeout=timeout))
            except EngineLostError as error:
                if not where:
                    raise
                missing[name] = str(error)
                continue
            where = where or {**peer.about["provenance"], "versions": {}}
            where["versions"] |= peer.about.get("versions", {})
            engines += peer.engines
        yield engines, where, missing


@contextmanager
def ended_by_loss() -> Iterator[None]:
    """End the command in one line if an engine is lost that nothing goes on without."""
    try:
        yield
    except EngineLostError as error:
        if error.mistake is not None:
            raise ValueError(error.mistake) from None
        _errors.print(f"error: {error}")
        raise typer.Exit(1) from None


def show(lines: Sequence[Line]) -> None:
    """Print a record's tables, and who was left out. Exits with 1 if an output differs by more than a near-tie."""
    typer.echo(terminal_text(lines))
    for reason in dict.fromkeys(line["reason"] for line in matching(lines, "lost")):
        _errors.print(f"left out: {reason}")
    faults = matching(lines, "output", near_tie=False)
    for line in faults:
        where = f"on {line['prompt']} at new token {line['first_difference']}"
        apart = f"the reference's top two logits are {line['reference_logit_gap']:.3g} apart"
        _errors.print(f"{line['engine']} differs from {line['reference']} {where}, where {apart}")
    if faults:
        raise typer.Exit(1)
