"""`selfspec trace`, `inspect` and `verify`: look into a run, a checkpoint, or the engine itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import psutil
import typer

from policies import LayerCost, parse_policy
from selfspec.analysis.comparison import load_warning
from selfspec.analysis.exactness import every_policy, num_steps, verify_engine
from selfspec.analysis.inspection import SAMPLES, inspect_model, inspection_lines
from selfspec.analysis.trace_plot import plot_trace, trace_lines
from selfspec.cli.arguments import checked_output_file, load_generator, load_reference, progress_bar
from selfspec.cli.console import LogConsole, one_line_errors
from selfspec.cli.display import write_trace
from selfspec.cli.option_groups import DeviceOptions, LoadOptions, ModelArgument, ModelOption, PolicyOption, with_groups
from selfspec.cli.text_input import CODE_PROMPT, EXAMPLE_PROMPT, PromptArgument, read_prompt
from selfspec.engine.results import sources_text
from selfspec.pacer.inference import has_preverifier

_ENDINGS = (".png", ".svg", ".pdf", ".jsonl")
_OUTPUT_HELP = "Picture to draw (.png, .svg, .pdf), or .jsonl for the records."


@with_groups
def trace_command(
    load: LoadOptions,
    prompt: PromptArgument = None,
    policy: PolicyOption = None,
    model: ModelOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help=_OUTPUT_HELP, callback=checked_output_file)
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this UTF-8 file.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate; EOS does not end the text.", min=2)] = 128,
) -> None:
    """Decode greedily and show every round: exit layer, drafts and their fate, threshold, estimated acceptance."""
    log = LogConsole()
    with one_line_errors():
        if output is not None and output.suffix not in _ENDINGS:
            raise ValueError(f"--output must end with one of {', '.join(_ENDINGS)}, got {output.name!r}")
        text = read_prompt(prompt, file)
        generator = load_generator(model, load, log)
        with log.status("Decoding ..."):
            result = generator.generate(
                text, policy=policy, max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=[], trace=True
            )
        records = result.trace or ()
        if output is not None and output.suffix == ".jsonl":
            write_trace(output, records)
        elif output is not None:
            plot_trace(records, generator.model.num_layers, result.policy, output)
    typer.echo("\n".join(trace_lines(records)))
    log.print(f"policy {result.policy}; {len(records)} rounds" + (f"; wrote {output}" if output else ""))
    if result.stats.num_copied:
        log.print(f"= is an accepted copy, x one that was not; {sources_text(result.stats)}")


@with_groups
def inspect_command(
    load: LoadOptions,
    model: ModelArgument = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="UTF-8 file with a message to the model, or a prompt; repeatable (default: two questions)."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens per text.", min=2)] = 64,
    repeats: Annotated[int, typer.Option(help="Number of pairs of runs on each text.", min=1)] = 2,
) -> None:
    """Say what the default policy gains on this model, and where its drafts come from."""
    log = LogConsole()
    with one_line_errors():
        texts = [read_prompt(None, path) for path in text or ()] or SAMPLES
        generator = load_generator(model, load, log, prefix_cache=0)
        with progress_bar(len(texts) * (2 * repeats + 1) + 2, log) as on_progress:
            inspection = inspect_model(
                generator, texts, max_new_tokens=max_new_tokens, repeats=repeats, on_progress=on_progress
            )
    typer.echo("\n".join(inspection_lines(inspection)))
    if warning := load_warning(psutil.getloadavg()[0], cores=psutil.cpu_count() or 1):
        log.print(warning)


@with_groups
def verify_command(
    load: DeviceOptions,
    model: ModelArgument = None,
    file: Annotated[
        list[Path] | None, typer.Option(help="UTF-8 file with a prompt; repeatable (default: two examples).")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Policy to verify; repeatable (default: one of each).")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens per greedy text.", min=4)] = 48,
    draws: Annotated[
        int, typer.Option(help="Number of samples to compare with exact probabilities; 0 for none.", min=0)
    ] = 400,
) -> None:
    """Check on this machine that the engine's output equals that of the model as transformers runs it.

    Ends with status 1 if anything fails.
    """
    log = LogConsole()
    with one_line_errors():
        texts = [read_prompt(None, path) for path in file or ()] or [EXAMPLE_PROMPT, CODE_PROMPT]
        llama, prompts = load_reference(model, texts, load.dtype, load.device, log)
        num_layers = llama.config.num_hidden_layers
        for name in policy or []:
            if "pacer" not in name:  # which needs the model's own files, checked below
                parse_policy(name, num_layers=num_layers, measure=lambda: LayerCost(num_layers))
        own = ["pacer"] if has_preverifier(llama.config.name_or_path) else []
        total = num_steps(num_layers, len(prompts), draws, len(policy or [*every_policy(num_layers), *own]))
        failed = 0
        with progress_bar(total, log) as on_progress:
            checks = verify_engine(
                llama, prompts, max_new_tokens=max_new_tokens, draws=draws, policies=policy, besides=own,
                on_progress=on_progress,
            )  # fmt: skip
            for check in checks:
                failed += not check.passed
                typer.echo(f"{'ok    ' if check.passed else 'FAILED'}  {check.name}: {check.detail}")
    if failed:
        typer.echo(f"NOT verified: {failed} of the checks failed; do not trust this engine with this model here")
        raise typer.Exit(1)
    typer.echo("verified: here, with this model, the engine gives what the model itself gives")
