"""`selfspec trace`, `inspect` and `verify`: look into a run, a checkpoint, or the engine itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from layerskip_models.checkpoints.synthetic import SHAPES
from policies import LayerCost, parse_policy
from selfspec.analysis.exactness import every_policy, num_steps, verify_engine
from selfspec.analysis.inspection import inspect_model, inspection_lines
from selfspec.analysis.quality import SAMPLE, quality_lines
from selfspec.analysis.shape_report import shape_lines, training_lines
from selfspec.analysis.trace_plot import plot_trace, trace_lines
from selfspec.cli.arguments import (
    checked_output_file,
    load_full_weights,
    load_generator,
    load_reference,
    notes_console,
    one_line_errors,
    progress,
)
from selfspec.cli.display import write_trace
from selfspec.cli.option_groups import (
    DeviceOption,
    DtypeOption,
    LoadOptions,
    ModelArgument,
    ModelOption,
    PolicyOption,
    with_groups,
)
from selfspec.cli.prompt_input import CODE_PROMPT, EXAMPLE_PROMPT, read_prompt
from selfspec.engine.stats import sources_text
from selfspec.pacer.inference import has_preverifier

PICTURES = (".png", ".svg", ".pdf")


@with_groups
def trace_command(
    load: LoadOptions,
    prompt: Annotated[
        str | None, typer.Argument(help='Text to continue; "-" reads standard input (default: an example).')
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Picture to draw (.png, .svg, .pdf), or .jsonl for the records.",
            callback=checked_output_file,
        ),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this UTF-8 file.")] = None,
    policy: PolicyOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate; EOS does not end the text.")] = 128,
    model: ModelOption = None,
) -> None:
    """Decode a prompt greedily and show every round: exit layer, drafts and their fate, threshold, estimated acceptance."""
    notes = notes_console(quiet=False)
    with one_line_errors():
        if output is not None and output.suffix not in (*PICTURES, ".jsonl"):
            raise ValueError(f"--output must end with one of {', '.join((*PICTURES, '.jsonl'))}, got {output.name!r}")
        text = read_prompt(prompt, file)
        generator = load_generator(model, load, notes)
        with notes.status("Decoding ..."):
            result = generator.generate(
                text, policy=policy, max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=[], trace=True
            )
        records = result.trace or ()
        if output is not None and output.suffix == ".jsonl":
            write_trace(output, records)
        elif output is not None:
            plot_trace(records, generator.model.num_layers, result.policy, output)
    typer.echo("\n".join(trace_lines(records)))
    notes.print(f"policy {result.policy}; {len(records)} rounds" + (f"; wrote {output}" if output else ""))
    if result.stats.num_copied:
        notes.print(f"= is an accepted copy, x one that was not; {sources_text(result.stats)}")


@with_groups
def inspect_command(
    load: LoadOptions,
    model: ModelArgument = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="UTF-8 file with sample text; repeatable (default: a short example).")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="New tokens per text.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Number of pairs of runs to measure.")] = 3,
    probe_minutes: Annotated[
        float,
        typer.Option(min=0, help="Minutes to fit exit adapters, to predict what train-exit would gain; 5 is enough."),
    ] = 0.0,
    quality: Annotated[
        bool,
        typer.Option(
            "--quality",
            help="Also compare the low-precision weights (--dtype, or the checkpoint's) with the full ones, on the sample "
            "text (default: 1,000 words).",
        ),
    ] = False,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Instead of a checkpoint: show what a model of this shape would hold, read and send. "
            f"One of {', '.join(SHAPES)}, or a folder with config.json.",
        ),
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="With --shape: number of processes that share the model.")
    ] = 1,
    train: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --shape: show instead what `selfspec train --shard` needs with this many processes."
        ),
    ] = None,
    micro_batch_tokens: Annotated[
        int, typer.Option(min=1, help="With --train: tokens in one forward pass of a process.")
    ] = 1024,
    optimizer: Annotated[str, typer.Option(help="With --train: adamw or muon.")] = "adamw",
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --shape: tokens of a text (default: the model's context; with --train, a micro batch).",
        ),
    ] = None,
) -> None:
    """Say whether a checkpoint is worth self-speculating with: agreement per layer, speed-up predicted and measured.

    With --shape: the memory and traffic of each process, without loading anything.
    """
    notes = notes_console(quiet=False)
    with one_line_errors():
        if shape is not None:
            if model is not None:
                raise ValueError("give a checkpoint or --shape, not both")
            if train is not None and tensor_parallel > 1:
                raise ValueError("--train divides a model by itself: leave out --tensor-parallel")
            lines = (
                shape_lines(shape, tensor_parallel, load.dtype, load.device, context)
                if train is None
                else training_lines(shape, train, load.dtype, context, micro_batch_tokens, optimizer)
            )
            typer.echo("\n".join(lines))
            return
        if tensor_parallel > 1 or context is not None or train is not None:
            raise ValueError("--tensor-parallel, --train and --context go with --shape")
        texts = [read_prompt(None, path) for path in text] if text else [EXAMPLE_PROMPT]
        full = load_full_weights(model, load.dtype, load.device, notes) if quality else None
        generator = load_generator(model, load, notes)
        with progress(2 * len(texts) + 2 + (probe_minutes > 0), notes) as advance:
            inspection = inspect_model(
                generator, texts, max_new_tokens=max_new_tokens, repeats=repeats, advance=advance,
                probe_seconds=60 * probe_minutes, say=lambda label: advance(label, 0),
            )  # fmt: skip
        lines = inspection_lines(inspection)
        if full is not None:
            with notes.status("Comparing with the full weights ..."):
                lines += quality_lines(generator, full, texts if text else [read_prompt(None, SAMPLE)])
    typer.echo("\n".join(lines))


def verify_command(
    model: ModelArgument = None,
    file: Annotated[
        list[Path] | None, typer.Option(help="UTF-8 file with a prompt; repeatable (default: two examples).")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Policy to verify; repeatable (default: one of each).")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=4, help="New tokens per greedy text.")] = 48,
    draws: Annotated[
        int, typer.Option(min=0, help="Number of samples to compare with exact probabilities; 0 for none.")
    ] = 400,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Check on this machine that the engine's output equals that of the model as transformers runs it.

    Ends with status 1 if anything fails.
    """
    notes = notes_console(quiet=False)
    with one_line_errors():
        texts = [read_prompt(None, path) for path in file] if file else [EXAMPLE_PROMPT, CODE_PROMPT]
        llama, prompts = load_reference(model, texts, dtype, device, notes)
        num_layers = llama.config.num_hidden_layers
        for name in policy or []:
            if "pacer" not in name:  # which needs the model's own files, checked below
                parse_policy(name, num_layers=num_layers, measure=lambda: LayerCost(num_layers))
        own = ["pacer"] if has_preverifier(llama.config.name_or_path) else []
        names = policy or [*every_policy(num_layers), *own]
        total = num_steps(num_layers, len(prompts), draws, len(names))
        failed = 0
        with progress(total, notes) as advance:
            for check in verify_engine(
                llama, prompts, max_new_tokens=max_new_tokens, draws=draws, policies=names, advance=advance
            ):
                failed += not check.passed
                typer.echo(f"{'ok    ' if check.passed else 'FAILED'}  {check.name}: {check.detail}")
    if failed:
        typer.echo(f"NOT verified: {failed} of the checks failed; do not trust this engine with this model here")
        raise typer.Exit(1)
    typer.echo("verified: here, with this model, the engine gives what the model itself gives")
