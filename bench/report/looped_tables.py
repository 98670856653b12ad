"""The tables of `selfspec-bench looped`: tokens per second by context and agreement, and what a sweep costs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.record import Line, by_value, matching
from bench.report.table import Table

DIAGONAL = "wave:loop=1"


def looped_tables(lines: Sequence[Line]) -> list[Table]:
    """Show speeds by context and share of right drafts, and what a sweep costs at each context."""
    asked = lines[0]["configuration"]
    of = f"{asked['weights']}, keys and values in {asked['kv_dtype']}"
    loops, decoded, sweeps = asked["loops"], [], []
    for context, own in by_value(matching(lines, "decode"), "context").items():
        plain = _speed(matching(own, "decode", policy="ar"))
        for share in asked["agreements"]:
            runs = by_value(matching(own, "decode", agreement=share), "policy")
            diagonal = runs.pop(DIAGONAL)
            best = max(runs, key=lambda policy: _speed(runs[policy]))
            decoded.append(
                {
                    "context": str(context),
                    "right drafts": f"{share:g}",
                    "plain": f"{plain:.2f}",
                    "best rounds": f"{_speed(runs[best]):.2f} ({_speed(runs[best]) / plain:.2f}×, `{best}`)",
                    "diagonal": f"{_speed(diagonal):.2f} ({_speed(diagonal) / plain:.2f}×)",
                    "its sweeps a token": f"{median(run['passes'] / run['tokens'] for run in diagonal):.2f}",
                    "other texts": str(sum(not run["outputs_equal"] for run in own)),
                }
            )
        speed = median(line["bytes_per_second"] for line in matching(lines, "bandwidth", context=context))
        row, seconds = {"context": str(context)}, {}
        for rows in (1, loops):
            timed = matching(lines, "sweep", context=context, rows=rows)
            seconds[rows] = median(line["seconds"] for line in timed)
            share = timed[0]["bytes"] / seconds[rows] / speed
            row[f"ms with {rows}"] = f"{1000 * seconds[rows]:.1f} ({100 * share:.0f} %)"
        sweeps.append({**row, "ratio": f"{seconds[loops] / seconds[1]:.2f}", "GB/s": f"{speed / 1e9:.1f}"})
    speeds = f"Tokens/s (× plain) with so many right drafts, which are set and not the model's; weights in {of}"
    costs = (
        f"A sweep over one loop's layers, and the head: ms with 1 and {loops} rows (share of the memory's bandwidth)"
    )
    return [Table.of("looped", speeds, decoded), Table.of("sweeps", costs, sweeps)]


def _speed(runs: Sequence[Line]) -> float:
    return median(run["tokens"] / run["seconds"] for run in runs)
