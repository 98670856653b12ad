"""The tables of a sweep: eTPL, speed-ups predicted and measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.record import Line, matching
from bench.report.summary import Samples
from bench.report.table import Spread, Table, cross_table


def sweep_headline(lines: Sequence[Line]) -> str:
    """Name the best measured setting."""
    model, best = lines[0]["configuration"]["model"], matching(lines, "best")[0]
    spread = Spread(value=best["speedup"], low=best["low"], high=best["high"]).text("{:.2f}", "×")
    return f"Best measured setting for {model}: `{best['policy']}`, {spread} its own autoregressive mode."


def sweep_tables(lines: Sequence[Line]) -> list[Table]:
    """Make two grids of settings."""
    samples = Samples(lines)
    cells = {line["policy"]: line for line in matching(lines, "cell")}
    measured = {
        policy: samples.speedup(f"selfspec:{policy}", "selfspec:ar")
        for policy in cells
        if f"selfspec:{policy}" in samples.engines
    }
    axes = lines[0]["configuration"]["axes"]

    def speedup(policy: str) -> str:
        return (
            f"**{measured[policy].value:.2f}**" if policy in measured else f"{cells[policy]['predicted_speedup']:.2f}"
        )

    etpl = f"eTPL by replay (autoregressive: {1 / lines[0]['configuration']['num_layers']:.4f})"
    both = (
        "Speed-up over autoregressive; bold is measured (prefill included), the rest predicted (decoding only) from rounds "
        "and timed layers"
    )
    return [
        _grid("etpl", etpl, axes, lambda policy: f"{cells[policy]['etpl']:.3f}"),
        _grid("speedup", both, axes, speedup),
    ]


def _grid(name: str, title: str, axes: Sequence[Sequence[int]], cell: Callable[[str], str]) -> Table:
    rows, columns = ({number: str(number) for number in axis} for axis in axes)
    title += "; rows: exit layer, columns: drafts a round"
    return cross_table(name, title, "exit layer", rows, columns, lambda row, column: cell(f"ls:{row}-{column}"))
