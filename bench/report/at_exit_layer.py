"""Policies that stay at one exit layer beside the fixed lengths there, task by task.

Tokens per loaded layer, relative to plain decoding; a pre-verifier's passes count as loaded layers. Fixed lengths (1 to 8)
are replayed from the record's grid. The oracle per task is the length that was best on the very prompts it is scored on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bench.grid import ALL, LAYERS, fixed_in_hindsight, grid_lines, pooled, with_setting
from bench.record import BEST_FIXED, Line
from bench.report.run_tables import all_layers
from bench.report.table import UNKNOWN, Table, number


def exit_layer_tables(lines: Sequence[Line]) -> list[Table]:
    """Rows for the oracle length per task, the best single length, and each policy that only used this layer, best first.

    The layer is the one where most policies stayed. None for a record without a grid, or with fewer than two such policies.
    """
    grid = grid_lines(lines)
    runs: dict[str, list[Line]] = {}
    for line in lines:
        if line["kind"] == "sample" and line["repeat"] == 0 and line["stats"] and line["engine"] != BEST_FIXED:
            runs.setdefault(line["engine"], []).append(line)
    used = {engine: {layer for line in own for layer in line["stats"]["rounds_by_exit_layer"]} - {"0"}
            for engine, own in runs.items()}  # fmt: skip
    stayed = Counter(min(layers) for layers in used.values() if len(layers) == 1)
    if not grid or not stayed or stayed.most_common(1)[0][1] < 2:
        return []
    exit_layer = stayed.most_common(1)[0][0]
    prefix = f"ls:{exit_layer}-"
    grid = [
        {**line, "cells": {name: cell for name, cell in line["cells"].items() if name.startswith(prefix)}}
        for line in grid
    ]
    best = fixed_in_hindsight(grid, LAYERS)
    length = {task: setting.removeprefix(prefix) for task, setting in best.items()}
    by_policy: dict[str, dict[str, float]] = {}
    for engine, own in runs.items():
        if used[engine] == {exit_layer}:
            counts = ((line["task"], line["num_new_tokens"] - 1, all_layers(line["stats"])) for line in own)
            by_policy[f"`{engine.removeprefix('selfspec:')}`"] = pooled(counts)
    ordered = dict(sorted(by_policy.items(), key=lambda item: -item[1][ALL]))
    fixed, one = with_setting(grid, best), with_setting(grid, {ALL: best[ALL]})
    tasks = [*dict.fromkeys(line["task"] for line in grid), ALL]
    scale = lines[0]["configuration"]["num_layers"]
    table = Table(
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
    return [table]
