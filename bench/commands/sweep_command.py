"""`selfspec-bench sweep`: the grid over exit layer and length, or a list of any policies."""

from __future__ import annotations

from pathlib import Path
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
    RepeatsOption,
    WarmupsOption,
)
from bench.commands.preparation import (
    configuration,
    encoded,
    exit_if_outputs_differ,
    num_layers_of,
    open_model,
    open_tokenizer,
    progress,
    recording,
    show,
)
from bench.measure import measure, num_runs
from bench.provenance import provenance
from bench.record import RecordWriter
from bench.sweep import (
    GridPolicy,
    agreement_line,
    best_line,
    fixed_grid,
    fixed_setting_of,
    parse_range,
    replay_grid,
    replay_line,
    run_grid,
    sweep_engines,
    trace_prompts,
    write_setting,
)
from layerskip_models import DEMO_PATH
from policies import LayerCost, parse_policy
from selfspec import SelfSpecGenerator
from selfspec.cli.arguments import one_line_errors
from selfspec.engine.calibrate import measured_cost


def sweep(
    model: ModelOption = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Compare these policies instead of all exit layers and lengths; repeatable."),
    ] = None,
    exit_layers: Annotated[str | None, typer.Option(help='As "1-8" or "2,4,6"; default: the first half.')] = None,
    num_speculations: Annotated[
        str | None, typer.Option(help='Drafts a round, as "1-8" or "2,4,6"; default: 1-10.')
    ] = None,
    prompts: PromptsOption = None,
    num_samples: NumSamplesOption = 8,
    prompt_tokens: PromptTokensOption = 320,
    max_new_tokens: NewTokensOption = 128,
    num_timed: Annotated[int, typer.Option(min=1, help="Number of settings to time, best predictions first.")] = 6,
    repeats: RepeatsOption = 5,
    warmups: WarmupsOption = 2,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    output: OutputOption = None,
    write: Annotated[
        bool, typer.Option("--write", help="Save the best setting beside the checkpoint's weights.")
    ] = False,
) -> None:
    """Find the best exit layer and length, or the best of some policies; the most promising are timed; greedy.

    Fixed settings are ranked by replay of traced runs, other policies by one run each. Ends with status 1 if an output
    differs from autoregressive decoding by more than a near-tie.
    """
    with one_line_errors():
        checkpoint = str(model or DEMO_PATH)
        if write and not Path(checkpoint).is_dir():
            raise ValueError(f"--write needs a local checkpoint folder, got {checkpoint!r}: download it first")
        num_layers = num_layers_of(checkpoint)
        lengths: list[int] = []
        if not policy:
            layers, lengths = _ranges(exit_layers, num_speculations, num_layers)
            grid = fixed_grid(layers, lengths)
        elif exit_layers is not None or num_speculations is not None:
            raise ValueError("give --policy, or --exit-layers and --num-speculations, not both")
        else:
            grid = [GridPolicy(name=name, values={"policy": name}) for name in dict.fromkeys(policy)]
        replayed = [_is_fixed(cell, num_layers) for cell in grid]
        if write and not all(replayed):
            raise ValueError(
                '--write keeps fixed settings ("ls:E-G"), which `generate` looks up; name any other policy as --policy when'
                " generating"
            )
        samples = encoded(prompts, num_samples, open_tokenizer(checkpoint), prompt_tokens)
        generator = SelfSpecGenerator(open_model(checkpoint, dtype, device), prefix_cache=0)
        for named in grid:
            if "pacer" in named.name:
                generator.resolve_policy(named.name)
    network = generator.model
    num_timed = min(num_timed, len(grid))
    axes = {name: list(dict.fromkeys(cell.values[name] for cell in grid)) for name in grid[0].values}
    description: dict[str, Any] = {
        "kind": "run",
        "command": "sweep",
        "configuration": {
            **configuration(checkpoint, samples, max_new_tokens, repeats, warmups),
            "runner": generator.runner,
            "axes": axes,
            "num_layers": network.num_layers,
        },
        "provenance": provenance(network.device, network.dtype),
    }
    first = len(samples) * (any(replayed) + (len(grid) - sum(replayed)))
    total = first + num_runs(num_timed + 1, len(samples), repeats=repeats, warmups=warmups)
    with recording(RecordWriter(output)) as record:
        with progress(total) as advance:
            cost = measured_cost(network, generator.runner)
            cells = []
            traces = None
            if any(replayed):
                traces = trace_prompts(generator, samples, max_new_tokens, advance)
                cells += replay_grid(traces, [cell for cell, fixed in zip(grid, replayed) if fixed], cost)
            others = [cell for cell, fixed in zip(grid, replayed) if not fixed]
            cells += run_grid(generator, others, samples, max_new_tokens, cost, advance)
            cells.sort(key=lambda cell: -cell.predicted_speedup)
            engines = sweep_engines(generator, cells[:num_timed])
            record.write({**description, "engines": {engine.name: engine.label for engine in engines}})
            record.write({"kind": "costs", **cost.as_dict()})
            if traces is not None:
                record.write(agreement_line(traces))
            for cell in cells:
                record.write(cell.as_line())
            measure(
                engines,
                samples,
                max_new_tokens=max_new_tokens,
                repeats=repeats,
                warmups=warmups,
                dtype=network.dtype,
                write=record.write,
                advance=advance,
            )
        record.write(replay_line(record.lines, cells[:num_timed], samples))
        best = best_line(record.lines, cells[:num_timed])
        record.write(best)
    show(record.lines)
    if write:
        path = write_setting(Path(checkpoint), best, description)
        typer.echo(
            f"{best['policy']} is now the best known fixed setting of this checkpoint ({path.name} beside its weights)"
        )
    if lengths and best["policy"].endswith(f"-{lengths[-1]}"):
        typer.echo(
            f"the best setting is at the edge of the grid: try --num-speculations up to {2 * lengths[-1]}", err=True
        )
    if best["speedup"] < 1:
        typer.echo("no setting was faster than autoregressive decoding (num_speculations=0)", err=True)
    exit_if_outputs_differ(record.lines)


def _ranges(exit_layers: str | None, num_speculations: str | None, num_layers: int) -> tuple[list[int], list[int]]:
    """Exit layers and lengths of the options, checked."""
    last = num_layers - 1
    layers = parse_range(exit_layers or f"1-{max(1, num_layers // 2)}", "--exit-layers")
    if layers[-1] > last:
        raise ValueError(f"--exit-layers must be in [1, {last}] for this {num_layers}-layer model, got {layers[-1]}")
    return layers, parse_range(num_speculations or "1-10", "--num-speculations")


def _is_fixed(cell: GridPolicy, num_layers: int) -> bool:
    """True if replay decides the policy's rounds. Raises ValueError for an unknown policy."""
    if "pacer" not in cell.name:  # which can be resolved for the loaded model only
        parse_policy(cell.name, num_layers=num_layers, measure=lambda: LayerCost(num_layers))
    return fixed_setting_of(cell.name) is not None
