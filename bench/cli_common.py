"""What the commands of `selfspec-bench` share: options' types, the record's description of a run, progress, the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from bench.datasets import EncodedPrompt, digest, encode_prompts, load_prompts, select_prompts
from bench.engines import Engine
from bench.peers import (
    transformers_early_exit,
    transformers_early_exit_default,
    transformers_generate,
    transformers_static,
)
from bench.provenance import weights_digest
from bench.record import Line
from bench.report import headline, tables
from bench.table import print_tables
from layerskip_models import DEMO_PATH, LayerSkipModel, from_transformers, load_model, load_tokenizer
from layerskip_models.loading import load_config, load_transformers, resolve_device, resolve_dtype
from layerskip_models.synthetic import PREFIX, SHAPES, parse_synthetic, synthetic_llama

_errors = Console(stderr=True)

ModelOption = Annotated[
    str | None,
    typer.Option(
        help='LayerSkip checkpoint: folder, hub name, or "synthetic:SHAPE", random weights of that shape; default: the demo.'
    ),
]
PromptsOption = Annotated[
    Path | None, typer.Option(help='Prompts, .jsonl[.gz] with "id", "task", "prompt"; default: the shipped ones.')
]
NumSamplesOption = Annotated[int, typer.Option(min=1, help="Prompts to measure, the tasks taking turns.")]
PromptTokensOption = Annotated[int, typer.Option(min=1, help="Longer prompts keep their last so many tokens.")]
NewTokensOption = Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")]
RepeatsOption = Annotated[int, typer.Option(min=1, help="Timed runs of each engine on each prompt.")]
WarmupsOption = Annotated[int, typer.Option(min=0, help="Runs of each engine before, not counted.")]
DtypeOption = Annotated[
    str, typer.Option(help="auto (float32 on a CPU), float32, bfloat16, float16, float64, or int8 (weights).")
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
RunnerOption = Annotated[
    str, typer.Option(help="eager, captured (on a CPU a slow stand-in), or auto: captured on CUDA, else eager.")
]
OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the record, JSON lines, to this file.")
]


def configuration(
    checkpoint: str, prompts: Sequence[EncodedPrompt], max_new_tokens: int, repeats: int, warmups: int
) -> dict[str, Any]:
    """What a record says about any run. A local checkpoint is named by its folder alone."""
    is_folder = Path(checkpoint).is_dir()
    return {
        "model": _described(checkpoint),
        "weights_digest": weights_digest(Path(checkpoint)) if is_folder else None,
        "prompts": [prompt.id for prompt in prompts],
        "prompts_digest": digest(prompts),
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
        "warmups": warmups,
        "eos": "off",
        "do_sample": False,
    }


def _described(checkpoint: str) -> str:
    if is_synthetic(checkpoint):
        return f"synthetic weights ({checkpoint.removeprefix(PREFIX)})"
    if checkpoint == str(DEMO_PATH):
        return "the demo model"
    return Path(checkpoint).resolve().name if Path(checkpoint).is_dir() else checkpoint


def encoded(
    path: Path | None, num_samples: int, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int
) -> list[EncodedPrompt]:
    """Prompts of a file, or the shipped ones, the tasks taking turns."""
    return encode_prompts(select_prompts(load_prompts(path), num_samples), tokenizer, prompt_tokens)


def is_synthetic(checkpoint: str) -> bool:
    """Whether a name stands for a shape with random weights."""
    return checkpoint.startswith(PREFIX)


def num_layers_of(checkpoint: str) -> int:
    """How many layers a checkpoint has, without loading its weights. Raises as loading does."""
    if is_synthetic(checkpoint):
        return int(SHAPES[parse_synthetic(checkpoint)[0]]["num_hidden_layers"])
    return int(load_config(checkpoint).num_hidden_layers)


def open_tokenizer(checkpoint: str) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer; synthetic weights know no words, and take the demo's for their prompts."""
    return load_tokenizer(str(DEMO_PATH) if is_synthetic(checkpoint) else checkpoint)


def open_model(checkpoint: str, dtype: str, device: str) -> LayerSkipModel:
    """The model alone: nothing of it is in memory twice."""
    if is_synthetic(checkpoint):
        if dtype == "int8":
            return from_transformers(load_network(checkpoint, "float32", device), layout="int8", release=True)
        return from_transformers(load_network(checkpoint, dtype, device), release=True)
    return load_model(checkpoint, dtype=dtype, device=device)


def load_network(checkpoint: str, dtype: str, device: str) -> LlamaForCausalLM:
    """transformers' own model, for engines that share its weights."""
    if is_synthetic(checkpoint):
        shape, recipe = parse_synthetic(checkpoint)
        target = resolve_device(device)
        return synthetic_llama(shape, recipe, dtype=resolve_dtype(dtype, target, torch.bfloat16), device=target)
    return load_transformers(checkpoint, dtype=dtype, device=device)


def transformers_engines(network: LlamaForCausalLM, exit_layer: int, num_speculations: int) -> list[Engine]:
    """`generate` in its cache modes, and `assistant_early_exit` at a fixed setting and at its defaults."""
    static = [transformers_static(network)] if network.device.type == "cuda" else []
    return [
        transformers_generate(network),
        *static,
        transformers_early_exit(network, exit_layer, num_speculations),
        transformers_early_exit_default(network, exit_layer),
    ]


@contextmanager
def progress(total: int, *, visible: bool = True) -> Iterator[Callable[[str], None]]:
    """A bar on stderr with the time left; yields what moves it by one. Silent where stderr is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    shown = visible and _errors.is_terminal
    with Progress(*columns, console=_errors, disable=not shown, transient=True) as bar:
        task = bar.add_task("measuring", total=total)

        def advance(label: str) -> None:
            bar.update(task, advance=1, description=label)

        yield advance


def show(lines: Sequence[Mapping[str, Any]]) -> None:
    """The record's tables and its headline, on standard output."""
    records: list[Line] = [dict(line) for line in lines]
    print_tables(tables(records))
    typer.echo(headline(records))


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
