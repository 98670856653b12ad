"""`selfspec trace`, `inspect` and `verify`: look into a run, into a checkpoint, into the engine itself."""

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
    POLICY_HELP,
    DeviceOption,
    DtypeOption,
    ExitsOption,
    KvDtypeOption,
    ModelOption,
    checked_output_file,
    load_full_weights,
    load_generator,
    load_reference,
    notes_console,
    one_line_errors,
    progress,
)
from selfspec.cli.display import write_trace
from selfspec.cli.prompt_input import CODE_PROMPT, EXAMPLE_PROMPT, read_prompt
from selfspec.engine.stats import sources_text
from selfspec.pacer.inference import has_preverifier

PICTURES = (".png", ".svg", ".pdf")


def trace_command(
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
    policy: Annotated[str | None, typer.Option(help=POLICY_HELP)] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate; EOS does not end the text.")] = 128,
    model: ModelOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    exits: ExitsOption = "auto",
    kv_dtype: KvDtypeOption = "auto",
) -> None:
    """Decode a prompt greedily and show every round: exit layer, drafts and their fate, threshold, estimated acceptance."""
    notes = notes_console(quiet=False)
    with one_line_errors():
        if output is not None and output.suffix not in (*PICTURES, ".jsonl"):
            raise ValueError(f"--output must end with one of {', '.join((*PICTURES, '.jsonl'))}, got {output.name!r}")
        text = read_prompt(prompt, file)
        generator = load_generator(model, dtype, device, notes, exits=exits, kv_dtype=kv_dtype)
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


def inspect_command(
    model: Annotated[str | None, typer.Argument(help="Hub name or folder (default: the demo model).")] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="UTF-8 file with sample text; repeatable (default: a short example).")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="New tokens per text.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Number of pairs of runs to measure.")] = 3,
    probe_minutes: Annotated[
        float,
        typer.Option(min=0, help="Fit exit adapters for so long, to say what train-exit would give; 5 is enough."),
    ] = 0.0,
    quality: Annotated[
        bool,
        typer.Option(
            "--quality",
            help="Also compare weights in fewer bits (--dtype, or the checkpoint's) with the full ones, on the sample text "
            "(default: one of 1,000 words).",
        ),
    ] = False,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Instead of a checkpoint: what a model of this shape would hold, read and send. "
            f"One of {', '.join(SHAPES)}, or a folder with config.json.",
        ),
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="With --shape: processes that the model is divided over.")
    ] = 1,
    train: Annotated[
        int | None,
        typer.Option(min=1, help="With --shape: what `selfspec train --shard` takes in so many processes, instead."),
    ] = None,
    micro_batch_tokens: Annotated[
        int, typer.Option(min=1, help="With --train: tokens of a forward pass of one process.")
    ] = 1024,
    optimizer: Annotated[str, typer.Option(help="With --train: adamw or muon.")] = "adamw",
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --shape: tokens of a text (default: as many as the model takes; with --train, of a micro batch).",
        ),
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    exits: ExitsOption = "auto",
    kv_dtype: KvDtypeOption = "auto",
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
                shape_lines(shape, tensor_parallel, dtype, device, context)
                if train is None
                else training_lines(shape, train, dtype, context, micro_batch_tokens, optimizer)
            )
            typer.echo("\n".join(lines))
            return
        if tensor_parallel > 1 or context is not None or train is not None:
            raise ValueError("--tensor-parallel, --train and --context go with --shape")
        texts = [read_prompt(None, path) for path in text] if text else [EXAMPLE_PROMPT]
        full = load_full_weights(model, dtype, device, notes) if quality else None
        generator = load_generator(model, dtype, device, notes, exits=exits, kv_dtype=kv_dtype)
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
    model: Annotated[str | None, typer.Argument(help="Hub name or folder (default: the demo model).")] = None,
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
    """Check on this machine that the engine gives what the model itself gives, with transformers as the judge.

    Ends with status 1 if anything fails.
    """
    notes = notes_console(quiet=False)
    with one_line_errors():
        texts = [read_prompt(None, path) for path in file] if file else [EXAMPLE_PROMPT, CODE_PROMPT]
        llama, prompts = load_reference(model, texts, dtype, device, notes)
        num_layers = llama.config.num_hidden_layers
        for name in policy or []:
            if "pacer" not in name:  # which can be resolved for the model itself only, below
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
