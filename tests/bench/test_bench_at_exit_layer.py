"""The comparison at one exit layer, from a record by hand."""

from __future__ import annotations

from typing import Any

from bench.report.at_exit_layer import exit_layer_tables


def sample(engine: str, task: str, layers: int, passes: int, exit_layer: int = 2) -> dict[str, Any]:
    stats = {
        "loaded_layers": layers,
        "preverifier_layers": passes,
        "rounds_by_exit_layer": {"0": 1, str(exit_layer): 3},
    }
    return {
        "kind": "sample", "engine": engine, "task": task, "repeat": 0, "num_new_tokens": 13, "stats": stats,
    }  # fmt: skip


def test_table_by_hand() -> None:
    """8 layers. Task a: ls:2-1 has 12 tokens in 48 layers, 2.0 times plain's 1/8; pacer in 40 + 8, as many; dv in 96."""
    cells = {"ls:2-1": [12, 48, 1.0], "ls:2-2": [12, 60, 1.0], "ls:3-1": [12, 12, 1.0]}
    lines = [
        {"kind": "run", "configuration": {"num_layers": 8}},
        {"kind": "grid", "task": "a", "prompt": "1", "cells": cells, "agreement": []},
        sample("selfspec:dv:2", "a", 96, 0),
        sample("selfspec:pacer", "a", 40, 8),
        sample("selfspec:auto", "a", 40, 0, exit_layer=3),
    ]
    (table,) = exit_layer_tables(lines)
    assert table.columns == ("policy", "a", "all")
    assert [row[:2] for row in table.rows] == [
        ("*oracle length per task*", "2.000"),
        ("*that length*", "1"),
        ("*oracle length for all tasks, `ls:2-1`*", "2.000"),
        ("`pacer`", "2.000"),
        ("`dv:2`", "1.000"),
    ]
    assert exit_layer_tables([lines[0], *lines[2:]]) == []  # no grid
    assert exit_layer_tables(lines[:3]) == []  # a single policy
