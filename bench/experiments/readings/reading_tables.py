"""Tables of the readings: transfer between tasks, segments of a text, oracle lengths, acceptance by position."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from bench.experiments.readings.readings import (
    SEGMENT,
    OracleLengths,
    Segment,
    Traces,
    acceptance_by_position,
    best_of,
    oracle_lengths,
    segment_speed,
    segments,
    too_short,
    transfer,
)
from bench.grid import ALL, grid_lines
from bench.record import Line
from bench.report.table import Table, counted, heat_table, number
from selfspec.engine.stats import mean

POSITIONS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Positions in a draft that the tables show."""
_BINS = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, None))


def reading_tables(lines: Sequence[Line], segment: int = SEGMENT) -> list[Table]:
    """All that the record has lines for. segment: new tokens in a segment; they are left out where texts are too short."""
    grid = grid_lines(lines)
    made = [_transfer_table(grid)] if len({line["task"] for line in grid}) > 1 else []
    traces = Traces.of(lines)
    if traces is None:
        return made
    if too_short(traces, segment) is None:
        made.append(_segment_table(traces, segments(traces, segment), segment))
    layers = exit_layers(traces)
    return [
        *made,
        _oracle_table([oracle_lengths(traces, layer) for layer in layers]),
        *_position_tables(traces, layers),
    ]


def exit_layers(traces: Traces) -> list[int]:
    """The traced exit layers of the model's lower half: those that can pay."""
    trace = next(iter(traces.by_prompt.values()))
    return [layer for layer in trace.agrees if layer <= max(1, trace.num_layers // 2)]


def _transfer_table(grid: Sequence[Line]) -> Table:
    found = transfer(grid)
    tasks = [task for task in found.settings if task != ALL]
    values = {(tuned, task): found.kept[tuned, task] for tuned in found.settings for task in tasks}
    names = {tuned: f"{tuned} (`{setting}`)" for tuned, setting in found.settings.items()}
    return heat_table(
        "transfer",
        "Transfer of a fixed setting: % of a task's best decoding speed that is kept with the setting tuned on another task "
        "(rows: tuned on, columns: applied to), by replay",
        {"tuned on": list(names.values()), "applied to": tasks},
        {(names[tuned], task): f"{100 * value:.0f}" for (tuned, task), value in values.items()},
        {(names[tuned], task): value for (tuned, task), value in values.items()},
    )


def _segment_table(traces: Traces, parts: Sequence[Segment], length: int) -> Table:
    """A row per task and one for all: how often and by how much another setting is better in a part of a text."""
    by_task: dict[str, list[Segment]] = {}
    for part in parts:
        by_task.setdefault(traces.tasks[part.prompt], []).append(part)
    of_text = {
        prompt: best_of([part for part in parts if part.prompt == prompt]) for prompt in {p.prompt for p in parts}
    }
    rows = []
    for task, own in [*by_task.items(), (ALL, list(parts))]:
        best = [part.best for part in own]
        best_speed = segment_speed(own, best)
        common = best_of(own)
        texts = [of_text[part.prompt] for part in own]
        rows.append(
            (
                task,
                str(len(own)),
                str(len(set(best))),
                f"`ls:{common[0]}-{common[1]}`",
                f"{100 * sum(setting == common for setting in best) / len(own):.0f} %",
                f"{100 * segment_speed(own, [common] * len(own)) / best_speed:.1f} %",
                f"{100 * segment_speed(own, texts) / best_speed:.1f} %",
            )
        )
    return Table(
        name="segments",
        title=f"Segments of {length} new tokens: is one setting best all along? Speeds are shares of the speed with each "
        "segment's own best setting, by replay",
        columns=(
            "task",
            "segments",
            "different best settings",
            "best single setting",
            "is the best in",
            "its speed",
            "speed with each text's best",
        ),
        rows=tuple(rows),
    )


def _oracle_table(found: Sequence[OracleLengths]) -> Table:
    rows = []
    for oracle in found:
        lengths = list(chain.from_iterable(oracle.lengths))
        rows.append(
            (
                str(oracle.exit_layer),
                f"{oracle.fixed:.2f} (`{oracle.fixed_length}`)",
                f"{oracle.longest:.2f}",
                f"{oracle.cheapest:.2f}",
                f"{oracle.fixed_passes[0]:.0f}, {oracle.fixed_passes[1]:.0f}",
                f"{oracle.longest_passes[0]:.0f}, {oracle.longest_passes[1]:.0f}",
                number(mean(lengths), "{:.1f}"),
                *(f"{100 * _share(lengths, low, high):.0f}" for low, high in _BINS),
            )
        )
    return Table(
        name="oracle",
        title="Oracle length, the best length of each round in hindsight, beside the best fixed length: decoding speed over "
        "plain decoding's by replay; draft and verify passes per 100 tokens; % of rounds by drafts that would be accepted",
        columns=(
            "exit layer",
            "best fixed (length)",
            "all that is accepted",
            "cheapest",
            "passes, fixed",
            "passes, oracle",
            "mean",
            *(_bin_name(low, high) for low, high in _BINS),
        ),
        rows=tuple(rows),
    )


def _share(lengths: Sequence[int], low: int, high: int | None) -> float:
    return sum(low <= length and (high is None or length <= high) for length in lengths) / (len(lengths) or 1)


def _bin_name(low: int, high: int | None) -> str:
    return f"{low}+" if high is None else str(low) if low == high else f"{low}–{high}"


def _position_tables(traces: Traces, layers: Sequence[int]) -> list[Table]:
    longest = max(len(trace.tokens) - 1 for trace in traces.by_prompt.values())
    shown = [position for position in POSITIONS if position <= longest]
    found = [acceptance_by_position(traces, layer, shown[-1]) for layer in layers] if shown else []
    if not found:
        return []
    columns = ("exit layer", *map(str, shown))
    starts = f"drafts from every position of {counted(len(traces.by_prompt), 'text')}"

    def rows(name: str) -> tuple[tuple[str, ...], ...]:
        return tuple(
            (str(each.exit_layer), *(number(getattr(each, name)[position - 1], "{:.2f}") for position in shown))
            for each in found
        )

    return [
        Table(
            name="positions",
            title=f"Acceptance by position in the draft: share of drafts whose first tokens up to there are right ({starts})",
            columns=columns,
            rows=rows("accepted"),
        ),
        Table(
            name="conditional",
            title="The same for a token whose predecessors in the draft are right",
            columns=columns,
            rows=rows("conditional"),
        ),
    ]
