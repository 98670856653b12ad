"""`selfspec trace`, `inspect` and `verify`: look into a run, a checkpoint, or the engine itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from policies import LayerCost, parse_policy
from selfspec.analysis.exactness import every_policy, num_steps, verify_engine
from selfspec.analysis.inspection import inspect_model, inspection_lines
from selfspec.analysis.trace_plot import plot_trace, trace_lines
from selfspec.cli.arguments import checked_output_file, load_generator, load_reference, progress
from selfspec.cli.display import write_trace
from selfspec.cli.notes import notes_console, one_line_errors
from selfspec.cli.option_groups import (
    DeviceOptions,
    LoadOptions,
    ModelArgument,
    ModelOption,
    PolicyOption,
    option,
    with_groups,
)
from selfspec.cli.text_input import CODE_PROMPT, EXAMPLE_PROMPT, PromptArgument, read_prompt
from selfspec.engine.results import sources_text
from selfspec.pacer.inference import has_preverifier

PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    output: Path | None = option(
        None,
        "Picture to draw (.png, .svg, .pdf), or .jsonl for the records.",
        None,
        *("--output", "-o"),
        callback=checked_output_file,
    )
    file: Path | None = option(None, "Read the prompt from this UTF-8 file.")
    max_new_tokens: int = option(128, "Tokens to generate; EOS does not end the text.", min=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectOptions:
    text: list[Path] | None = option(None, "UTF-8 file with sample text; repeatable (default: a short example).")
    max_new_tokens: int = option(64, "New tokens per text.", min=2)
    repeats: int = option(3, "Number of pairs of runs to measure.", min=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    file: list[Path] | None = option(None, "UTF-8 file with a prompt; repeatable (default: two examples).")
    policy: list[str] | None = option(None, "Policy to verify; repeatable (default: one of each).")
    max_new_tokens: int = option(48, "New tokens per greedy text.", min=4)
    draws: int = option(400, "Number of samples to compare with exact probabilities; 0 for none.", min=0)


@with_groups
def trace_command(
    asked: TraceOptions,
    load: LoadOptions,
    prompt: PromptArgument = None,
    policy: PolicyOption = None,
    model: ModelOption = None,
) -> None:
    """Decode a prompt greedily and show every round: exit layer, drafts and their fate, threshold, estimated acceptance."""
    notes = notes_console()
    with one_line_errors():
        output = asked.output
        if output is not None and output.suffix not in (*PICTURES, ".jsonl"):
            raise ValueError(f"--output must end with one of {', '.join((*PICTURES, '.jsonl'))}, got {output.name!r}")
        text = read_prompt(prompt, asked.file)
        generator = load_generator(model, load, notes)
        with notes.status("Decoding ..."):
            result = generator.generate(
                text, policy=policy, max_new_tokens=asked.max_new_tokens, do_sample=False, eos_token_id=[], trace=True
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
def inspect_command(asked: InspectOptions, load: LoadOptions, model: ModelArgument = None) -> None:
    """Say whether a checkpoint is worth self-speculating with: agreement per layer, speed-up predicted and measured."""
    notes = notes_console()
    with one_line_errors():
        texts = [read_prompt(None, path) for path in asked.text or ()]
        generator = load_generator(model, load, notes)
        with progress(2 * max(1, len(texts)) + 2, notes) as advance:
            inspection = inspect_model(
                generator,
                texts or [EXAMPLE_PROMPT],
                max_new_tokens=asked.max_new_tokens,
                repeats=asked.repeats,
                advance=advance,
            )
    typer.echo("\n".join(inspection_lines(inspection)))


@with_groups
def verify_command(asked: VerifyOptions, load: DeviceOptions, model: ModelArgument = None) -> None:
    """Check on this machine that the engine's output equals that of the model as transformers runs it.

    Ends with status 1 if anything fails.
    """
    notes = notes_console()
    with one_line_errors():
        texts = [read_prompt(None, path) for path in asked.file or ()] or [EXAMPLE_PROMPT, CODE_PROMPT]
        llama, prompts = load_reference(model, texts, load.dtype, load.device, notes)
        num_layers = llama.config.num_hidden_layers
        for name in asked.policy or []:
            if "pacer" not in name:  # which needs the model's own files, checked below
                parse_policy(name, num_layers=num_layers, measure=lambda: LayerCost(num_layers))
        own = ["pacer"] if has_preverifier(llama.config.name_or_path) else []
        num_policies = len(asked.policy or [*every_policy(num_layers), *own])
        total = num_steps(num_layers, len(prompts), asked.draws, num_policies)
        failed = 0
        with progress(total, notes) as advance:
            for check in verify_engine(
                llama,
                prompts,
                max_new_tokens=asked.max_new_tokens,
                draws=asked.draws,
                policies=asked.policy,
                besides=own,
                advance=advance,
            ):
                failed += not check.passed
                typer.echo(f"{'ok    ' if check.passed else 'FAILED'}  {check.name}: {check.detail}")
    if failed:
        typer.echo(f"NOT verified: {failed} of the checks failed; do not trust this engine with this model here")
        raise typer.Exit(1)
    typer.echo("verified: here, with this model, the engine gives what the model itself gives")
