"""Policies that stay at one exit layer, compared with the fixed lengths there, task by task.

Tokens per loaded layer, relative to plain decoding; a pre-verifier's passes count as loaded layers. Fixed lengths (1 to 8)
are replayed from the record's grid. The oracle per task is the length that was best on the very prompts it is scored on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from bench.grid import ALL, LAYERS, fixed_in_hindsight, grid_lines, with_setting
from bench.record import Line
from bench.report.run_tables import first_runs, ratio_table, tokens_per_layer
from bench.report.table import Table


def exit_layer_tables(lines: Sequence[Line]) -> list[Table]:
    """Rows for the oracle length per task, the best single length, and each policy that only used this layer, best first.

    The layer is the one where most policies stayed. None for a record without a grid, or with fewer than two such policies.
    """
    grid, runs = grid_lines(lines), first_runs(lines)
    used = {
        engine: {layer for line in own for layer in line["stats"]["rounds_by_exit_layer"]} - {"0"}
        for engine, own in runs.items()
    }
    stayed = Counter(min(layers) for layers in used.values() if len(layers) == 1).most_common(1)
    if not grid or not stayed or stayed[0][1] < 2:
        return []
    exit_layer = stayed[0][0]
    prefix = f"ls:{exit_layer}-"
    grid = [
        {**line, "cells": {name: cell for name, cell in line["cells"].items() if name.startswith(prefix)}}
        for line in grid
    ]
    best = fixed_in_hindsight(grid, LAYERS)
    table = ratio_table(
        "exit-layer",
        f"Exit layer {exit_layer}: tokens per layer over plain decoding's, pre-verifier charged",
        {
            "*oracle length per task*": with_setting(grid, best),
            f"*oracle length for all tasks, `{best[ALL]}`*": with_setting(grid, {ALL: best[ALL]}),
            **tokens_per_layer({engine: own for engine, own in runs.items() if used[engine] == {exit_layer}}),
        },
        [line["task"] for line in grid],
        lines[0]["configuration"]["num_layers"],
    )
    lengths = (best[task].removeprefix(prefix) for task in table.columns[1:-1])
    first, *others = table.rows
    return [replace(table, rows=(first, ("*that length*", *lengths, "per task"), *others))]
