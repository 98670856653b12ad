"""Policies at one exit layer beside the fixed lengths there, task by task, from a record of `selfspec-bench run`.

    python -m bench.report.at_exit_layer docs/data/pacer.jsonl.gz --exit-layer 2

Tokens per loaded layer, relative to plain decoding; a pre-verifier's passes count as loaded layers. Fixed lengths (1 to 8)
are replayed from the record's grid. The oracle per task is the length that was best on the very prompts it is scored on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.record import Line, read_record
from bench.report.run_tables import all_layers
from bench.report.table import UNKNOWN, Table, number
from bench.traces.grid import ALL, LAYERS, fixed_in_hindsight, grid_lines, pooled, with_setting
from selfspec.cli.arguments import one_line_errors


def exit_layer_table(lines: list[Line], exit_layer: int) -> Table:
    """Rows for the oracle length per task, the best single length, and each policy that only used this layer, best first.

    Raises ValueError for a record without a grid, or without that layer.
    """
    prefix = f"ls:{exit_layer}-"
    grid = [
        {**line, "cells": {name: cell for name, cell in line["cells"].items() if name.startswith(prefix)}}
        for line in grid_lines(lines)
    ]
    if not grid or not grid[0]["cells"]:
        raise ValueError(f"the record has no grid with exit layer {exit_layer}: run without --no-grid")
    best = fixed_in_hindsight(grid, LAYERS)
    length = {task: setting.removeprefix(prefix) for task, setting in best.items()}
    by_policy: dict[str, dict[str, float]] = {}
    runs = [line for line in lines if line["kind"] == "sample" and line["repeat"] == 0 and line["stats"]]
    for engine in dict.fromkeys(line["engine"] for line in runs):
        own = [line for line in runs if line["engine"] == engine]
        layers = {layer for line in own for layer in line["stats"]["rounds_by_exit_layer"]} - {"0"}
        if layers == {str(exit_layer)}:
            counts = ((line["task"], line["num_new_tokens"] - 1, all_layers(line["stats"])) for line in own)
            by_policy[f"`{engine.removeprefix('selfspec:')}`"] = pooled(counts)
    ordered = dict(sorted(by_policy.items(), key=lambda item: -item[1][ALL]))
    fixed, one = with_setting(grid, best), with_setting(grid, {ALL: best[ALL]})
    tasks = [*dict.fromkeys(line["task"] for line in grid), ALL]
    scale = lines[0]["configuration"]["num_layers"]
    return Table(
        name="exit-layer",
        title=f"Exit layer {exit_layer}: tokens per layer over plain decoding's, pre-verifier charged",
        columns=("policy", *tasks),
        rows=(
            ("*oracle length per task*", *(number(fixed.get(t), "{:.3f}", scale) for t in tasks)),
            ("*that length*", *(length.get(t, UNKNOWN) if t != ALL else "per task" for t in tasks)),
            (
                f"*oracle length for all tasks, `{best[ALL]}`*",
                *(number(one.get(t), "{:.3f}", scale) for t in tasks),
            ),
            *((name, *(number(row.get(t), "{:.3f}", scale) for t in tasks)) for name, row in ordered.items()),
        ),
    )


def main(
    record: Annotated[Path, typer.Argument(help="A record with a grid.")],
    exit_layer: Annotated[int, typer.Option(help="The exit layer to compare at.")],
) -> None:
    """Print the comparison in Markdown."""
    with one_line_errors():
        typer.echo(exit_layer_table(read_record(record), exit_layer).markdown())


if __name__ == "__main__":
    typer.run(main)
