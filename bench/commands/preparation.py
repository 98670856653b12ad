"""What the commands of `selfspec-bench` share: what a record says about a run, loading, progress, interruption, the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.datasets import EncodedPrompt, digest, encode_prompts, load_prompts, select_prompts
from bench.engines.own import HasLabel, Sampling
from bench.engines.peers import (
    TransformersEngine,
    transformers_early_exit,
    transformers_early_exit_default,
    transformers_generate,
    transformers_static,
)
from bench.provenance import weights_digest
from bench.record import Line, RecordWriter, part_of
from bench.report.markdown import headline, tables
from bench.report.table import counted
from layerskip_models import DEMO_PATH, LayerSkipModel, from_transformers, load_model, load_tokenizer
from layerskip_models.checkpoints.loading import (
    FEW_BITS,
    load_config,
    load_transformers,
    resolve_device,
    resolve_dtype,
)
from layerskip_models.checkpoints.synthetic import PREFIX, SHAPES, parse_synthetic, synthetic_llama
from selfspec.cli.console import one_line_errors

_errors = Console(stderr=True)


def configuration(
    checkpoint: str,
    prompts: Sequence[EncodedPrompt],
    max_new_tokens: int,
    repeats: int,
    warmups: int,
    sampling: Sampling | None = None,
) -> dict[str, Any]:
    """Return what a record says about any run; a local checkpoint by its folder alone. sampling: None if greedy."""
    is_folder = Path(checkpoint).is_dir()
    return {
        "model": model_name(checkpoint),
        "weights_digest": weights_digest(Path(checkpoint)) if is_folder else None,
        "prompts": [prompt.id for prompt in prompts],
        "prompts_digest": digest(prompts),
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
        "warmups": warmups,
        "eos": "off",
        **({"do_sample": False} if sampling is None else {**sampling.arguments(), "seed": sampling.seed}),
    }


def model_name(checkpoint: str) -> str:
    """Return the name that a record gives a checkpoint: for a local one its folder or file alone."""
    if is_synthetic(checkpoint):
        return f"synthetic weights ({checkpoint.removeprefix(PREFIX)})"
    if checkpoint == str(DEMO_PATH):
        return "the demo model"
    return Path(checkpoint).resolve().name if Path(checkpoint).exists() else checkpoint


def run_line(
    command: str, configuration: Mapping[str, Any], engines: Sequence[HasLabel], provenance: Mapping[str, Any]
) -> dict[str, Any]:
    """Make a record's first line."""
    return {
        "kind": "run",
        "command": command,
        "configuration": dict(configuration),
        "engines": {engine.name: engine.label for engine in engines},
        "provenance": dict(provenance),
    }


def encoded(
    path: Path | None, num_samples: int, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int
) -> list[EncodedPrompt]:
    """Prompts of a file, or the shipped ones, the tasks taking turns."""
    return encode_prompts(select_prompts(load_prompts(path), num_samples), tokenizer, prompt_tokens)


def is_synthetic(checkpoint: str) -> bool:
    """Tell whether a name stands for a shape with random weights."""
    return checkpoint.startswith(PREFIX)


def num_layers_of(checkpoint: str) -> int:
    """How many layers a checkpoint has, without loading its weights. Raises as loading does."""
    if is_synthetic(checkpoint):
        return int(SHAPES[parse_synthetic(checkpoint)[0]]["num_hidden_layers"])
    return int(load_config(checkpoint).num_hidden_layers)


def open_tokenizer(checkpoint: str) -> PreTrainedTokenizerBase:
    """Open the checkpoint's tokenizer; synthetic weights know no words, and take the demo's for their prompts."""
    return load_tokenizer(str(DEMO_PATH) if is_synthetic(checkpoint) else checkpoint)


def open_model(checkpoint: str, dtype: str, device: str) -> LayerSkipModel:
    """Open the model alone, so that its weights are in memory once."""
    if is_synthetic(checkpoint):
        layout = dtype if dtype in FEW_BITS else None
        network = load_network(checkpoint, dtype if layout is None else "float32", device)
        return from_transformers(network, layout=layout, release=True)
    return load_model(checkpoint, dtype=dtype, device=device)


def load_network(checkpoint: str, dtype: str, device: str) -> PreTrainedModel:
    """Load transformers' own model, for engines that share its weights."""
    if is_synthetic(checkpoint):
        shape, recipe = parse_synthetic(checkpoint)
        target = resolve_device(device)
        return synthetic_llama(shape, recipe, dtype=resolve_dtype(dtype, target, torch.bfloat16), device=target)
    return load_transformers(checkpoint, dtype=dtype, device=device)


def transformers_engines(
    network: PreTrainedModel, exit_layer: int, num_speculations: int, sampling: Sampling | None = None
) -> list[TransformersEngine]:
    """`generate` in its cache modes, and `assistant_early_exit` at a fixed setting and at its defaults."""
    static = [transformers_static(network, sampling)] if network.device.type == "cuda" else []
    return [
        transformers_generate(network, sampling),
        *static,
        transformers_early_exit(network, exit_layer, num_speculations, sampling),
        transformers_early_exit_default(network, exit_layer, sampling),
    ]


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on stderr, if that is a terminal; yield a function that advances the bar by one."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=_errors, disable=not _errors.is_terminal, transient=True) as bar:
        task = bar.add_task("measuring", total=total)

        def advance(label: str) -> None:
            bar.update(task, advance=1, description=label)

        yield advance


@contextmanager
def recording(writer: RecordWriter, *, resume: str | None = None) -> Iterator[RecordWriter]:
    """Write a record within it; errors end the command in one line, and Ctrl-C says what was kept, with status 130.

    resume: the command line that goes on with the run, None where a run of this kind has to start again.
    """
    with one_line_errors():
        try:
            with writer:
                yield writer
        except KeyboardInterrupt:
            typer.echo(_after_interrupt(writer, resume), err=True)
            raise typer.Exit(130) from None


def _after_interrupt(writer: RecordWriter, resume: str | None) -> str:
    if writer.path is None:
        return "interrupted: nothing was kept, since there was no --output"
    part = part_of(writer.path)
    if resume is None:
        return f"interrupted: what was measured so far is in {part}; the command has to be run again"
    done = sum(line["kind"] == "sample" for line in writer.lines)
    return f"interrupted: {counted(done, 'measurement')} done and kept in {part}; to go on: {resume}"


def show(lines: Sequence[Mapping[str, Any]]) -> None:
    """Print the record's tables and its headline on standard output."""
    records: list[Line] = [dict(line) for line in lines]
    typer.echo("\n\n".join([*(table.markdown(aligned=True) for table in tables(records)), headline(records)]))


def exit_if_outputs_differ(lines: Sequence[Mapping[str, Any]]) -> None:
    """Name every difference that is no near-tie, and end with status 1 if there is one."""
    faults = [line for line in lines if line["kind"] == "output" and line["near_tie"] is False]
    for line in faults:
        typer.echo(
            f"{line['engine']} differs from {line['reference']} on {line['prompt']} at new token "
            f"{line['first_difference']}, where the reference's top two logits are {line['reference_logit_gap']:.3g} apart",
            err=True,
        )
    if faults:
        raise typer.Exit(1)
