"""`selfspec-bench sweep`: the grid over exit layer and length, or a list of any policies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.commands import bench_options as options
from bench.commands.preparation import (
    configuration,
    encoded,
    exit_if_outputs_differ,
    num_layers_of,
    open_model,
    open_tokenizer,
    progress,
    recording,
    run_line,
    show,
)
from bench.engines.own import SelfSpecEngine
from bench.measure import measure, num_runs
from bench.provenance import provenance
from bench.record import RecordWriter
from bench.sweep import (
    Grid,
    best_line,
    fixed_grid,
    fixed_setting_of,
    parse_range,
    replay_grid,
    run_grid,
    write_setting,
)
from layerskip_models import DEMO_PATH
from policies import LayerCost, parse_policy
from selfspec import SelfSpecGenerator
from selfspec.analysis.replay import trace_agreement
from selfspec.cli.console import one_line_errors
from selfspec.engine.calibrate import measured_cost


def sweep(
    model: options.ModelOption = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Compare these policies instead of all exit layers and lengths; repeatable."),
    ] = None,
    exit_layers: Annotated[str | None, typer.Option(help='As "1-8" or "2,4,6"; default: the first half.')] = None,
    num_speculations: Annotated[
        str | None, typer.Option(help='Drafts a round, as "1-8" or "2,4,6"; default: 1-10.')
    ] = None,
    prompts: options.PromptsOption = None,
    num_samples: options.NumSamplesOption = 8,
    prompt_tokens: options.PromptTokensOption = 320,
    max_new_tokens: options.NewTokensOption = 128,
    num_timed: Annotated[int, typer.Option(min=1, help="Number of settings to time, best predictions first.")] = 6,
    repeats: options.RepeatsOption = 5,
    warmups: options.WarmupsOption = 2,
    dtype: options.DtypeOption = "auto",
    device: options.DeviceOption = "auto",
    output: options.OutputOption = None,
    write: Annotated[
        bool, typer.Option("--write", help="Save the best setting next to the checkpoint's weights.")
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
            grid: Grid = fixed_grid(layers, lengths)
        elif exit_layers is not None or num_speculations is not None:
            raise ValueError("give --policy, or --exit-layers and --num-speculations, not both")
        else:
            grid = {name: {"policy": name} for name in policy}
        fixed = {name: values for name, values in grid.items() if _is_fixed(name, num_layers)}
        others = {name: values for name, values in grid.items() if name not in fixed}
        if write and others:
            raise ValueError(
                '--write keeps fixed settings ("ls:E-G"), which `generate` looks up; name any other policy as --policy when'
                " generating"
            )
        samples = encoded(prompts, num_samples, open_tokenizer(checkpoint), prompt_tokens)
        generator = SelfSpecGenerator(open_model(checkpoint, dtype, device), prefix_cache=0)
        for name in grid:
            if "pacer" in name:
                generator.resolve_policy(name)
    network = generator.model
    num_timed = min(num_timed, len(grid))
    places = list(grid.values())
    axes = {axis: list(dict.fromkeys(place[axis] for place in places)) for axis in places[0]}
    about = {
        **configuration(checkpoint, samples, max_new_tokens, repeats, warmups),
        "runner": generator.runner,
        "axes": axes,
        "num_layers": network.num_layers,
    }
    where = provenance(network.device, network.dtype)
    first = len(samples) * (bool(fixed) + len(others))
    total = first + num_runs(num_timed + 1, len(samples), repeats=repeats, warmups=warmups)
    with recording(RecordWriter(output)) as record:
        with progress(total) as advance:
            cost = measured_cost(network)
            traces = []
            for sample in samples if fixed else ():
                traces.append(trace_agreement(generator, sample.ids, max_new_tokens))
                advance("tracing every layer")
            cells = replay_grid(traces, fixed, cost)
            cells += run_grid(generator, others, samples, max_new_tokens, cost, advance)
            cells.sort(key=lambda cell: -cell.predicted_speedup)
            engines = [SelfSpecEngine(generator, name) for name in ("ar", *(cell.policy for cell in cells[:num_timed]))]
            record.write(run_line("sweep", about, engines, where))
            record.write({"kind": "costs", **cost.as_dict()})
            for cell in cells:
                record.write(cell.as_line())
            measure(
                engines,
                samples,
                max_new_tokens=max_new_tokens,
                repeats=repeats,
                warmups=warmups,
                dtype=network.dtype,
                record=record,
                advance=advance,
            )
        best = best_line(record.lines, cells[:num_timed])
        record.write(best)
    show(record.lines)
    if write:
        path = write_setting(Path(checkpoint), best, record.lines[0])
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


def _is_fixed(policy: str, num_layers: int) -> bool:
    """Tell whether replay decides the policy's rounds. Raises ValueError for an unknown policy."""
    if "pacer" not in policy:  # which can be resolved for the loaded model only
        parse_policy(policy, num_layers=num_layers, measure=lambda: LayerCost(num_layers))
    return fixed_setting_of(policy) is not None
