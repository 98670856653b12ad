"""The pictures of `bench.experiments.readings.readings`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.experiments.readings.reading_tables import exit_layers
from bench.experiments.readings.readings import (
    SEGMENT,
    OracleLengths,
    Segment,
    Traces,
    acceptance_by_position,
    oracle_lengths,
    segments,
    too_short,
    transfer,
)
from bench.grid import ALL, grid_lines
from bench.record import Line
from bench.report.figures import COLOURS, WIDTH, bare, curves

_POSITIONS = 10
_LAYERS = 5
_TEXTS, _SEGMENTS = 2, 3
"""How many texts and segments of each are drawn, as in DEL's Fig. 1b."""


def reading_figures(lines: Sequence[Line], segment: int = SEGMENT) -> dict[str, dict[str, Figure]]:
    """Part of the record -> title -> figure, for all that the record has lines for."""
    grid = grid_lines(lines)
    made: dict[str, dict[str, Figure]] = {}
    if len({line["task"] for line in grid}) > 1:
        made["transfer"] = {"Transfer of a setting between tasks": transfer_bars(grid)}
    traces = Traces.of(lines)
    if traces is None:
        return made
    parts = [] if too_short(traces, segment) else segments(traces, segment)
    if parts:
        made["segments"] = {f"Best setting in segments of {segment} tokens": segment_maps(parts)}
    layers = exit_layers(traces)
    found = [oracle_lengths(traces, layer) for layer in layers]
    if found:
        made["oracle"] = {"Oracle length per round": oracle_histogram(max(found, key=lambda oracle: oracle.longest))}
        made["positions"] = {"Acceptance by position in the draft": position_curves(traces, layers)}
    return made


def transfer_bars(grid: Sequence[Line]) -> Figure:
    """For each task a bar per setting, coloured by the task that it was tuned on (DEL, Fig. 1a)."""
    found = transfer(grid)
    tasks = [task for task in found.settings if task != ALL]
    figure = Figure(figsize=(WIDTH, 3.0))
    axes = figure.add_subplot()
    width = 0.8 / len(found.settings)
    for number, (tuned, setting) in enumerate(found.settings.items()):
        heights = [100 * found.kept[tuned, task] for task in tasks]
        places = np.arange(len(tasks)) + (number - (len(found.settings) - 1) / 2) * width
        axes.bar(places, heights, width, color=COLOURS[number % len(COLOURS)], label=f"{tuned}: {setting}")
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_ylabel("% of the task's best speed")
    axes.legend(title="tuned on", frameon=False, fontsize=8, title_fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    bare(axes)
    return figure


def segment_maps(parts: Sequence[Segment]) -> Figure:
    """Decoding speed over exit layer and length, a row per text and a column per segment; a ring marks the best."""
    prompts = list(dict.fromkeys(part.prompt for part in parts))[:_TEXTS]
    rows = [[part for part in parts if part.prompt == prompt][:_SEGMENTS] for prompt in prompts]
    columns = max(map(len, rows))
    figure = Figure(figsize=(WIDTH, 1.9 * len(rows)))
    for row, drawn in enumerate(rows):
        for column, part in enumerate(drawn):
            axes = figure.add_subplot(len(rows), columns, row * columns + column + 1)
            layers = sorted({layer for layer, _ in part.cells})
            lengths = sorted({length for _, length in part.cells})
            speeds = [[part.cells[layer, n][0] / part.cells[layer, n][1] for n in lengths] for layer in layers]
            axes.imshow(speeds, cmap="YlGn", aspect="auto", origin="lower")
            best_layer, best_length = part.best
            axes.plot(lengths.index(best_length), layers.index(best_layer), "o", mec="#D55E00", mfc="none", ms=9, mew=2)
            axes.set_xticks(range(len(lengths)), list(map(str, lengths)), fontsize=7)
            step = max(1, len(layers) // 5)
            axes.set_yticks(range(0, len(layers), step), list(map(str, layers[::step])), fontsize=7)
            axes.set_title(f"{part.prompt}, segment {part.number + 1}: ls:{best_layer}-{best_length}", fontsize=7)
            if row == len(rows) - 1:
                axes.set_xlabel("length", fontsize=8)
            if column == 0:
                axes.set_ylabel("exit layer", fontsize=8)
    figure.tight_layout()
    return figure


def oracle_histogram(oracle: OracleLengths) -> Figure:
    """Left: one text's rounds and the drafts each would have had accepted. Right: how often each length (Pacer, Fig. 2)."""
    figure = Figure(figsize=(WIDTH, 2.8))
    first, second = figure.subplots(1, 2)
    text = oracle.lengths[0]
    first.bar(range(1, len(text) + 1), text, color=COLOURS[0], width=0.9)
    first.axhline(oracle.fixed_length, color=COLOURS[5], linewidth=1, label=f"best fixed length, {oracle.fixed_length}")
    first.set_xlabel("round of the first text", fontsize=8)
    first.set_ylabel(f"drafts accepted, exit layer {oracle.exit_layer}", fontsize=8)
    first.legend(frameon=False, fontsize=7)
    counts = Counter(chain.from_iterable(oracle.lengths))
    total = sum(counts.values())
    second.bar(list(counts), [100 * count / total for count in counts.values()], color=COLOURS[0], width=0.9)
    second.set_xlabel("drafts accepted in a round", fontsize=8)
    second.set_ylabel("% of rounds, all texts", fontsize=8)
    for axes in (first, second):
        axes.tick_params(labelsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        bare(axes)
    figure.tight_layout()
    return figure


def position_curves(traces: Traces, layers: Sequence[int]) -> Figure:
    """Acceptance over the position, a colour per exit layer; dashed: where all tokens before are right (Pacer, Fig. 6)."""
    longest = min(_POSITIONS, max(len(trace.tokens) - 1 for trace in traces.by_prompt.values()))
    figure, axes = curves("position in the draft (dashed: if all before it are right)", "accepted")
    shown = layers[:: max(1, -(-len(layers) // _LAYERS))]
    for colour, layer in zip(COLOURS, shown):
        found = acceptance_by_position(traces, layer, longest)
        places = range(1, longest + 1)
        axes.plot(places, _numbers(found.accepted), marker="o", ms=3, color=colour, label=f"exit layer {layer}")
        axes.plot(places, _numbers(found.conditional), linestyle="--", linewidth=1, color=colour)
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [np.nan if value is None else value for value in values]
