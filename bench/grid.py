"""Every fixed setting (exit layer and length) on every prompt, by replay of one traced run per prompt.

A fixed setting "chosen on the other half" is what a careful user gets: each task's prompts alternate between two halves, and
each half is scored with the setting that was best on the other one. The "oracle" setting is the best on the very prompts that
it is scored on: an upper bound for fixed settings, not something a user can have. Tokens per cost of several prompts are all
their tokens over all their cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from bench.datasets import EncodedPrompt
from bench.record import Line
from policies import CostModel
from selfspec.analysis.replay import AgreementTrace, replay

LAYERS, SECONDS = "layers", "seconds"
"""What counts as cost: a field of `GridCell`."""
ALL = "all"
_HALVES = 2


class GridCell(NamedTuple):
    """One setting on one prompt: tokens committed in rounds, layers loaded, measured cost. A list in the record's JSON."""

    tokens: int
    layers: int
    seconds: float


def grid_line(prompt: EncodedPrompt, trace: AgreementTrace, lengths: Sequence[int], cost: CostModel) -> Line:
    """One prompt's line: a `GridCell` of every setting."""
    cells = {}
    for layer in trace.agrees:
        for length in lengths:
            rounds = replay(trace, layer, length)
            cells[f"ls:{layer}-{length}"] = GridCell(
                rounds.num_tokens, rounds.loaded_layers, round(rounds.cost(cost), 6)
            )
    return {"kind": "grid", "prompt": prompt.id, "task": prompt.task, "cells": cells}


def grid_lines(lines: Iterable[Line]) -> list[Line]:
    """Return the grid lines of a record."""
    return [line for line in lines if line["kind"] == "grid"]


def fixed_in_hindsight(grid: Sequence[Line], cost: str = LAYERS) -> dict[str, str]:
    """Find the best fixed setting of each task; under "all" the best single setting over all tasks."""
    result = {task: _best([line for line in grid if line["task"] == task], cost) for task in _tasks(grid)}
    return {**result, ALL: _best(grid, cost)}


def fixed_from_other_half(grid: Sequence[Line], cost: str = LAYERS) -> dict[str, float]:
    """Tokens per cost, per task and "all", where each half of a task runs with what was best on the other half.

    Tasks with a single prompt are left out.
    """
    chosen: dict[str, str] = {}
    for task in _tasks(grid):
        rows = [line for line in grid if line["task"] == task]
        halves = [rows[half::_HALVES] for half in range(_HALVES)]
        if all(halves):
            for half, scored in enumerate(halves):
                chosen.update(dict.fromkeys((line["prompt"] for line in scored), _best(halves[1 - half], cost)))
    return tokens_per_cost([line for line in grid if line["prompt"] in chosen], chosen, cost)


def with_setting(grid: Sequence[Line], by_task: Mapping[str, str], cost: str = LAYERS) -> dict[str, float]:
    """Tokens per cost, per task and "all"; every task runs with the setting given for it, else with the one for "all"."""
    chosen = {line["prompt"]: by_task.get(line["task"], by_task.get(ALL, "")) for line in grid}
    return tokens_per_cost(grid, chosen, cost)


def tokens_per_cost(grid: Sequence[Line], by_prompt: Mapping[str, str], cost: str) -> dict[str, float]:
    """Tokens per cost, per task and "all", where every prompt runs with the setting given for it."""
    return pooled((line["task"], *_counts(line, by_prompt[line["prompt"]], cost)) for line in grid)


def pooled(counts: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """(task, tokens, cost) of many prompts as tokens per cost, per task and "all"."""
    totals: dict[str, tuple[float, float]] = {}
    for task, tokens, cost in counts:
        for key in (task, ALL):
            tokens_before, cost_before = totals.get(key, (0.0, 0.0))
            totals[key] = (tokens_before + tokens, cost_before + cost)
    return {task: tokens / cost for task, (tokens, cost) in totals.items() if cost}


def _tasks(grid: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(line["task"] for line in grid))


def _counts(line: Line, setting: str, cost: str) -> tuple[float, float]:
    cell = GridCell(*line["cells"][setting])
    return cell.tokens, getattr(cell, cost)


def _best(grid: Sequence[Line], cost: str) -> str:
    def value(setting: str) -> float:
        counts = [_counts(line, setting, cost) for line in grid]
        return sum(tokens for tokens, _ in counts) / sum(cost for _, cost in counts)

    return max(grid[0]["cells"], key=value)
