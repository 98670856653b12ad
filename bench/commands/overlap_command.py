"""`selfspec-bench overlap`: what drafting while the other stage verifies would gain on two devices, from recorded traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.record import Line, read_record, showing
from bench.report.table import Table, print_tables
from bench.traces.grid import grid_lines
from bench.traces.overlap import OverlapGain, overlap_gain
from policies import MeasuredCost
from selfspec.cli.arguments import one_line_errors
from selfspec.parallel.overlap_timing import Stages


def overlap(
    record: Annotated[Path, typer.Argument(help="A record of selfspec-bench run, made without --no-grid.")],
    exit_layer: Annotated[
        list[int] | None, typer.Option(min=1, help="Exit layer; repeatable (default: all of them).")
    ] = None,
    handover_us: Annotated[
        float, typer.Option(min=0, help="Microseconds that one stage takes to tell the other something.")
    ] = 0.0,
    contention: Annotated[
        float,
        typer.Option(
            min=0,
            help="By how much of itself work grows while both stages work: 0 with memory of their own, 1 on one bus.",
        ),
    ] = 0.0,
) -> None:
    """Replay recorded texts on two devices: the first layers draft on one while the others verify on the other.

    Each text runs with the costs of the record on both devices, for each exit layer at its best settings. Drafts that were
    made ahead of a rejection are counted as thrown away. Nothing is decoded.
    """
    with one_line_errors():
        lines = read_record(record)
        with showing(record):
            found = gains(lines, exit_layer or [], handover_us * 1e-6, contention)
        if not found:
            raise ValueError(
                f"{record} holds no traces and costs: measure again with selfspec-bench run, without --no-grid"
            )
    columns = (
        "exit layer", "acceptance", "verify / draft step", "one after the other", "with overlap", "overlap gains",
        "thrown away per token",
    )  # fmt: skip
    rows = [
        (
            str(gain.exit_layer), f"{gain.acceptance:.2f}", f"{gain.ratio:.1f}",
            f"{gain.apart / gain.plain:.2f}x ({gain.length} drafts)",
            f"{gain.overlapped / gain.plain:.2f}x ({gain.rows}, {gain.ahead} ahead)",
            f"{100 * (gain.overlapped / gain.apart - 1):+.0f} %", f"{gain.discarded:.2f}",
        )
        for gain in found
    ]  # fmt: skip
    title = "Two stages on two devices, times plain decoding on one"
    print_tables([Table(name="overlap", title=title, columns=columns, rows=tuple(rows))])


def gains(lines: list[Line], exit_layers: list[int], handover: float, contention: float) -> list[OverlapGain]:
    """Of a record; [] if it holds no traces or no costs. ValueError for an exit layer that it does not have."""
    texts = [line["agrees"] for line in grid_lines(lines) if "agrees" in line]
    described = next((line for line in lines if line["kind"] == "costs"), None)
    if not texts or described is None:
        return []
    cost = MeasuredCost.from_dict({name: value for name, value in described.items() if name != "kind"})
    layers = [int(layer) for layer in texts[0]]
    if unknown := sorted(set(exit_layers) - set(layers)):
        raise ValueError(f"the record has no exit layer {unknown[0]}: there are {layers[0]} to {layers[-1]}")
    return [
        overlap_gain(
            [[flag == "1" for flag in text[str(layer)]] for text in texts],
            layer,
            Stages.of(cost, layer, handover=handover, contention=contention),
            cost.autoregressive(),
        )
        for layer in (exit_layers or layers)
    ]
